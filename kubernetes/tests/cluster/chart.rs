//! The chart in a real cluster: helm installs, changes and takes it away, and its accounts have the rights of their
//! work and no more.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use gpushare_tests::artifacts::{helm, kubectl};
use gpushare_tests::cluster::programs;
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::scratch::Scratch;
use serde_json::{Value, json};

use crate::control_plane::ControlPlane;

/// Everything on, with values that go into texts, lists and names.
const ALL: &str = "settings: |\n  [request]\n  strict = true\n\
    engine: {name: containerd, defaultShare: 25%}\n\
    imagePullSecrets: [{name: registry}]\n\
    image: {repository: registry.test:5000/gpushare, tag: 1.2.3, pullPolicy: Always}\n\
    nodes: {selector: {gpu: \"true\"}, tolerations: [{key: gpu, operator: Exists}]}\n\
    agent: {arguments: [--metrics-address=127.0.0.1:9846]}\n\
    meter: {listen: \"0.0.0.0:9836\", tokenSecret: figures}\n\
    runtimeClass: {nodeSelector: {gpu: \"yes\"}}\n\
    extender: {enabled: true, quota: kube-system/quotas, arguments: [--policy=spread], nodeSelector: {a: b}}\n\
    webhook: {enabled: true, caBundle: QUFBQQ==, annotations: {a: b}, arguments: [--count-annotations]}\n";
/// What the chart is changed to, one after the other.
const VALUES: [&str; 6] = [
    ALL,
    "installer: {mode: remove}\nextender: {enabled: true}",
    "installer: {enabled: false}\nmeter: {enabled: false}\nwebhook: {enabled: true, annotations: {a: b}}",
    "agent: {enabled: false}\ndeviceClass: {enabled: false}\nruntimeClass: {enabled: false}",
    "engine: {name: crio, unit: none, config: /etc/crio/crio.conf}\ninstaller: {maxUnavailable: 3}",
    "{}",
];
/// What a chart could leave behind.
const KINDS: &str = "clusterroles,clusterrolebindings,roles,rolebindings,serviceaccounts,configmaps,services,\
    daemonsets.apps,deployments.apps,poddisruptionbudgets,runtimeclasses,deviceclasses,secrets,\
    validatingadmissionpolicies,validatingadmissionpolicybindings,mutatingwebhookconfigurations,\
    validatingwebhookconfigurations";

/// A cluster with the chart's namespace, and the tools of its administrator.
struct Administrator {
    cluster: ControlPlane,
    scratch: Scratch,
}

impl Administrator {
    fn new() -> Option<Self> {
        if !met(&[Need::Kubernetes, Need::Kubectl, Need::Helm]) {
            return None;
        }
        let cluster = ControlPlane::start(&programs()?);
        cluster.post("/api/v1/namespaces", &json!({"metadata": {"name": "gpushare"}}));
        Some(Self { cluster, scratch: Scratch::new("chart") })
    }

    fn kubectl(&self, arguments: &[&str]) -> Outcome {
        let mut run = Command::new(kubectl());
        command::run(run.arg("--kubeconfig").arg(self.cluster.kubeconfig()).args(arguments))
    }

    /// `helm VERB gpushare CHART` with these values.
    fn helm(&self, verb: &str, values: &str) -> Outcome {
        let values = self.scratch.file("values.yaml", values);
        let mut run = Command::new(helm());
        // helm would look for settings and plugins of whoever runs the test.
        run.env("HOME", self.scratch.path()).arg("--kubeconfig").arg(self.cluster.kubeconfig());
        run.args([verb, "gpushare"]).args(["--namespace", "gpushare"]);
        if verb != "uninstall" {
            run.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("chart")).arg("--values").arg(values);
        }
        command::run(&mut run)
    }

    /// All objects of [`KINDS`], by kind and name.
    fn objects(&self) -> BTreeSet<String> {
        let told = self.kubectl(&["get", KINDS, "--all-namespaces", "--output=json"]).expect_success("get");
        let listed: Value = serde_json::from_str(&told.stdout).expect("it is JSON");
        listed["items"].as_array().expect("a list").iter().map(name).filter(|name| !of_helm(name)).collect()
    }

    /// What an account may do in a namespace beyond what everybody may, as `kubectl auth can-i --list` tells it: each
    /// verb behind its resource and, in brackets, the names that it holds for.
    fn rights(&self, account: &str, namespace: &str) -> BTreeSet<String> {
        let of = |user: &str| -> BTreeSet<String> {
            let who = format!("--as={user}");
            let groups = ["--as-group=system:serviceaccounts", "--as-group=system:authenticated"];
            let words = [&["auth", "can-i", "--list", "--namespace", namespace, &who][..], &groups].concat();
            let told = self.kubectl(&words).expect_success("kubectl auth can-i");
            assert!(!told.stderr.contains("incomplete"), "{}", told.stderr);
            told.stdout.lines().skip(1).flat_map(single).collect()
        };
        // That of the extender is a kube-scheduler's, too.
        let others = if account == "gpushare-scheduler" { "system:kube-scheduler" } else { "nobody" };
        &of(&format!("system:serviceaccount:gpushare:{account}")) - &of(others)
    }
}

/// A line with a resource, URLs, names and verbs, as one text for each verb.
fn single(line: &str) -> Vec<String> {
    let (left, verbs) = line.rsplit_once('[').unwrap_or_default();
    let left = left.split_whitespace().collect::<Vec<_>>().join(" ");
    verbs.trim_end_matches(']').split(' ').map(|verb| format!("{left} {verb}")).collect()
}

fn name(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!("{} {}", text(&object["kind"]), text(&object["metadata"]["name"]))
}

/// Whether helm keeps it for its own work.
fn of_helm(name: &str) -> bool {
    name.starts_with("Secret sh.helm.release.")
}

#[test]
#[ignore = "needs Kubernetes' programs in KUBE_BIN"]
fn helm_installs_the_chart_changes_it_to_all_that_it_can_be_and_takes_it_away() {
    let Some(admin) = Administrator::new() else { return };
    let before = admin.objects();
    let _ = admin.helm("install", "{}").expect_success("helm install");
    for values in VALUES {
        let _ = admin.helm("upgrade", values).expect_success(values);
        let made = admin.helm("template", values).expect_success(values).stdout;
        let documents = made.split("\n---\n").map(|text| text.trim_start_matches("---\n"));
        let objects = documents.map(|text| serde_saphyr::from_str::<Value>(text).expect("it is YAML"));
        let wanted: BTreeSet<String> = objects.map(|object| name(&object)).collect();
        let there = &admin.objects() - &before;
        assert_eq!(there, wanted, "{values}");
        // The API server knows each field, and warns of none.
        let file = admin.scratch.file("made.yaml", made);
        let apply = ["apply", "--server-side", "--dry-run=server", "--force-conflicts", "--validate=strict"];
        let applied = admin.kubectl(&[&apply[..], &["--filename", &file.to_string_lossy()]].concat());
        assert_eq!(applied.expect_success(values).stderr, "", "{values}");
    }
    let _ = admin.helm("uninstall", "{}").expect_success("helm uninstall");
    assert_eq!(admin.objects(), before, "nothing is left");
}

#[test]
#[ignore = "needs Kubernetes' programs in KUBE_BIN"]
fn each_account_of_the_chart_has_the_rights_of_its_work_and_no_more() {
    let Some(admin) = Administrator::new() else { return };
    let _ = admin.helm("install", &ALL.replace("kube-system/quotas", "kube-system/gpuquota"));
    let accounts: Vec<String> = admin
        .objects()
        .into_iter()
        .filter_map(|name| name.strip_prefix("ServiceAccount gpushare").map(|rest| format!("gpushare{rest}")))
        .collect();
    assert_eq!(accounts, ["gpushare-node", "gpushare-scheduler"], "the other parts have none of their own");
    let rights = |account, namespace| admin.rights(account, namespace).into_iter().collect::<Vec<_>>();
    let lines = |lines: &[&str]| {
        let mut all: Vec<String> = lines.iter().flat_map(|line| single(line)).collect();
        all.sort();
        all
    };
    let of_agent = [
        "events [] [] [get create patch]",
        "nodes [] [] [get]",
        "pods [] [] [list watch]",
        "resourceclaims.resource.k8s.io [] [] [get]",
        "resourceslices.resource.k8s.io [] [] [get list create update]",
    ];
    assert_eq!(rights("gpushare-node", "default"), lines(&of_agent));
    let own = ["configmaps [] [] [get create patch delete]"];
    assert_eq!(rights("gpushare-node", "gpushare"), lines(&[&own[..], &of_agent].concat()));
    assert_eq!(rights("gpushare-scheduler", "default"), [""; 0]);
    // Making leases is a kube-scheduler's right already.
    let own = ["configmaps [] [] [get list watch]", "leases.coordination.k8s.io [] [] [get update]"];
    assert_eq!(rights("gpushare-scheduler", "gpushare"), lines(&own));
    let quotas = ["configmaps [] [gpuquota] [get list watch]"];
    assert_eq!(rights("gpushare-scheduler", "kube-system"), lines(&quotas));
}
