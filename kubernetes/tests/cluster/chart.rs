//! The chart in a real cluster: helm installs, changes and takes it away, and its accounts have the rights of their
//! work and no more.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use gpushare_tests::artifacts::{helm, kubectl};
use gpushare_tests::cluster::extender::Extender;
use gpushare_tests::cluster::kubelet::NODE;
use gpushare_tests::cluster::{ClusterNode, Settings, programs};
use gpushare_tests::command::{self, Outcome, eventually};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::scratch::Scratch;
use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, GROUP};
use crate::{CLAIMS, PODS, SOON, claim, is_bound, pod, prepare, why};

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

/// The rights of the agent everywhere.
const OF_AGENT: [&str; 5] = [
    "events [] [] [get create patch]",
    "nodes [] [] [get]",
    "pods [] [] [list watch]",
    "resourceclaims.resource.k8s.io [] [] [get]",
    "resourceslices.resource.k8s.io [] [] [list create update]",
];
/// What it may besides in its own namespace.
const OF_AGENT_AT_HOME: &str = "configmaps [] [] [get create patch delete]";
/// What the extender may in its own namespace, besides what a kube-scheduler may; and where the quotas are.
/// Making leases is a kube-scheduler's right already.
const OF_EXTENDER_AT_HOME: [&str; 2] =
    ["configmaps [] [] [list watch]", "leases.coordination.k8s.io [] [] [get update]"];
const OF_EXTENDER_ABOUT_QUOTAS: &str = "configmaps [] [gpuquota] [list watch]";

/// A cluster with the chart's namespace, and the tools of its administrator.
struct Administrator {
    cluster: ControlPlane,
    scratch: Scratch,
    namespace: &'static str,
}

impl Administrator {
    fn new(namespace: &'static str) -> Option<Self> {
        if !met(&[Need::Kubernetes, Need::Kubectl, Need::Helm]) {
            return None;
        }
        let cluster = ControlPlane::start(&programs()?);
        cluster.post("/api/v1/namespaces", &json!({"metadata": {"name": namespace}}));
        Some(Self { cluster, scratch: Scratch::new("chart"), namespace })
    }

    fn kubectl(&self, arguments: &[&str]) -> Outcome {
        let mut run = Command::new(kubectl());
        command::run(run.arg("--kubeconfig").arg(self.cluster.kubeconfig()).args(arguments))
    }

    /// `helm VERB gpushare CHART` with these values.
    fn helm(&self, verb: &str, values: &str) -> Outcome {
        self.helm_in(self.namespace, verb, values)
    }

    /// The same for a release in another namespace, which is made where it is not there.
    fn helm_in(&self, namespace: &str, verb: &str, values: &str) -> Outcome {
        let values = self.scratch.file("values.yaml", values);
        let mut run = Command::new(helm());
        // helm would look for settings and plugins of whoever runs the test.
        run.env("HOME", self.scratch.path()).arg("--kubeconfig").arg(self.cluster.kubeconfig());
        run.args([verb, "gpushare"]).args(["--namespace", namespace]);
        if verb == "install" {
            run.arg("--create-namespace");
        }
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
        &of(&format!("system:serviceaccount:{}:{account}", self.namespace)) - &of(others)
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
    let Some(admin) = Administrator::new("gpushare") else { return };
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
    // As docs/kubernetes.md takes it away: what the installer needs is left, until nothing is.
    let _ = admin.helm("upgrade", "installer: {mode: remove}").expect_success("mode: remove");
    assert_eq!(&admin.objects() - &before, BTreeSet::from(["DaemonSet gpushare-installer".to_owned()]));
    let _ = admin.helm("uninstall", "{}").expect_success("helm uninstall");
    assert_eq!(admin.objects(), before, "nothing is left");
}

#[test]
#[ignore = "needs Kubernetes' programs in KUBE_BIN"]
fn each_account_of_the_chart_has_the_rights_of_its_work_and_no_more() {
    let Some(admin) = Administrator::new("gpushare") else { return };
    let values = ALL.replace("kube-system/quotas", "kube-system/gpuquota");
    let _ = admin.helm("install", &values).expect_success("helm install");
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
    assert_eq!(rights("gpushare-node", "default"), lines(&OF_AGENT));
    let at_home = [&[OF_AGENT_AT_HOME][..], &OF_AGENT].concat();
    assert_eq!(rights("gpushare-node", "gpushare"), lines(&at_home));
    assert_eq!(rights("gpushare-scheduler", "default"), [""; 0]);
    assert_eq!(rights("gpushare-scheduler", "gpushare"), lines(&OF_EXTENDER_AT_HOME));
    assert_eq!(rights("gpushare-scheduler", "kube-system"), lines(&[OF_EXTENDER_ABOUT_QUOTAS]));
}

/// Rights as resource and verb.
fn uses(lines: &[&str]) -> BTreeSet<(String, String)> {
    let ends = |line: &String| {
        let mut words = line.split(' ').map(str::to_owned);
        (words.next().unwrap_or_default(), words.next_back().unwrap_or_default())
    };
    lines.iter().flat_map(|line| single(line)).map(|line| ends(&line)).collect()
}

#[test]
#[ignore = "needs root, and Kubernetes' programs in KUBE_BIN"]
fn agent_and_extender_use_each_of_their_rights_and_ask_for_nothing_else() {
    if !met(&[Need::Root]) {
        return;
    }
    let home = "apart";
    let Some(admin) = Administrator::new(home) else { return };
    let cluster = &admin.cluster;
    cluster.add_node();
    cluster.post("/api/v1/namespaces", &json!({"metadata": {"name": "team"}}));
    let _ = admin.helm("install", "extender: {enabled: true}").expect_success("helm install");
    let settings = Settings {
        kubeconfig: Some(cluster.kubeconfig_of_agent_in(home)),
        namespace: Some(home.to_owned()),
        ..Settings::default()
    };
    let mut node = ClusterNode::start(Path::new(env!("CARGO_BIN_EXE_gpushare-kube")), 1, settings);
    let told = |path: &str, is: &dyn Fn(&Value) -> bool| {
        let seen = || cluster.try_call("GET", path, None).is_ok_and(|object| is(&object));
        assert!(eventually(SOON, seen), "{path}: {:?}", cluster.try_call("GET", path, None));
    };
    let cordon = |node: &ClusterNode, gpus: &str| {
        let text = fs::read_to_string(node.config()).expect("it can be read");
        fs::write(node.config(), format!("{text}\n[quota]\ncordoned = [{gpus}]\n"))
            .expect("it can be written");
    };
    // Claims: one is given, and changed two times.
    cluster.post(CLAIMS, &claim("a", "30Gi"));
    cluster.post(PODS, &pod("a"));
    assert!(eventually(SOON, || is_bound(cluster, "a")), "{}", why(cluster, "a"));
    prepare(cluster, &node, "a");
    for (count, memory) in (1..).zip(["20GiB", "25GiB"]) {
        cluster.annotate(&format!("{CLAIMS}/a"), &json!({"gpushare.io/memory": memory}));
        let is_told = |events: &Value| {
            let mut events = events["items"].as_array().into_iter().flatten();
            events.any(|event| event["reason"] == "GpuShareResized" && event["count"] == count)
        };
        told("/api/v1/namespaces/team/events", &is_told);
    }
    cordon(&node, &format!("{:?}", node.gpus()[0]));
    let slices = format!("{GROUP}/resourceslices");
    told(&slices, &|slices| slices["items"][0]["spec"]["devices"][0]["taints"].is_array());
    // Resources: the extender, which knows by the agent of the node's GPU, binds a pod.
    let counted =
        "[request]\ndefault_memory = \"10%\"\n[kubernetes]\nresources = [\"gpushare.io/gpu-memory\"]\n";
    let config = node.node.config_with("counted", counted);
    node.configure(&config);
    let map = format!("/api/v1/namespaces/{home}/configmaps/gpus.{NODE}");
    told(&map, &|map| map["data"]["gpus"].as_str().is_some_and(|gpus| gpus.contains("\"is_open\":true")));
    let kubeconfig = cluster.kubeconfig_of(home, "gpushare-scheduler", &Value::Null);
    let arguments = [&format!("--namespace={home}"), "--quota=kube-system/gpuquota"];
    let extender = Extender::start(Path::new(env!("CARGO_BIN_EXE_gpushare-kube")), &kubeconfig, &arguments);
    let limits = json!({"gpushare.io/gpu-memory": "4"});
    let container = json!({"name": "main", "image": "none", "resources": {"limits": limits}});
    let counted =
        json!({"metadata": {"name": "b"}, "spec": {"schedulerName": "ours", "containers": [container]}});
    let counted = cluster.post(PODS, &counted);
    let fits = || extender.filter(&counted, &[NODE]).0 == [NODE];
    assert!(eventually(SOON, fits), "{}", extender.filter(&counted, &[NODE]).1);
    extender.schedule(&counted, &[NODE]).expect("it is bound");
    assert!(is_bound(cluster, "b"));
    cordon(&node, &format!("{:?}", node.gpus()[0]));
    told(&map, &|map| map["data"]["gpus"].as_str().is_some_and(|gpus| gpus.contains("\"is_open\":false")));
    // Claims again.
    let config = node.node.config_with("claims", "");
    node.configure(&config);
    assert!(eventually(SOON, || cluster.try_call("GET", &map, None).is_err()), "what it told is gone");

    let used = |account: &str, is_at: &dyn Fn(&str) -> bool| -> BTreeSet<(String, String)> {
        let calls = cluster.calls_of(home, account).into_iter();
        calls.filter(|((at, ..), _)| is_at(at)).map(|((_, resource, verb), _)| (resource, verb)).collect()
    };
    let agents = [&[OF_AGENT_AT_HOME][..], &OF_AGENT].concat();
    assert_eq!(used("gpushare-node", &|_| true), uses(&agents), "the agent");
    let extenders = uses(&OF_EXTENDER_AT_HOME);
    let missing = || {
        // It renews its lease while it is called.
        extender.wait();
        &extenders - &used("gpushare-scheduler", &|at| at == home)
    };
    assert!(eventually(SOON, || missing().is_empty()), "the extender never uses {:?}", missing());
    let quotas = used("gpushare-scheduler", &|at| at == "kube-system");
    assert_eq!(quotas, uses(&[OF_EXTENDER_ABOUT_QUOTAS]), "the extender");
    for account in ["gpushare-node", "gpushare-scheduler"] {
        let mut calls = cluster.calls_of(home, account);
        calls.retain(|_, is_allowed| !*is_allowed);
        assert!(calls.is_empty(), "{account} was refused {calls:?}");
    }
}

#[test]
#[ignore = "needs Kubernetes' programs in KUBE_BIN"]
fn a_second_release_is_refused_and_a_namespace_of_the_chart_stays() {
    let Some(admin) = Administrator::new("first") else { return };
    let created = "namespace: {create: true}\nextender: {enabled: true}";
    let _ = admin.helm_in("gpushare", "install", created).expect_success("helm install");
    let objects = admin.objects();
    let told = admin.helm("install", "{}");
    assert!(!told.success() && told.stderr.contains("cannot be imported"), "{told:?}");
    assert_eq!(admin.objects(), objects, "the first one stays as it is");
    // Whoever forgets a value does not lose what else is in the namespace.
    let stays = |after: &str| {
        let namespace = admin.cluster.get("/api/v1/namespaces/gpushare");
        assert!(namespace["metadata"]["deletionTimestamp"].is_null(), "{after}: {namespace}");
        assert_eq!(namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "privileged");
    };
    stays("install");
    let _ = admin.helm_in("gpushare", "upgrade", "meter: {enabled: false}").expect_success("helm upgrade");
    stays("upgrade");
    let _ = admin.helm_in("gpushare", "upgrade", created).expect_success("helm upgrade");
    let _ = admin.helm_in("gpushare", "uninstall", "{}").expect_success("helm uninstall");
    stays("uninstall");
}
