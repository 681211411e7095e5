//! The pages' commands for a cluster, typed as they stand on a real control plane. What needs nodes that run pods,
//! a registry, or goes on for ever is stood in for by [`STAND_INS`].

use std::os::unix::fs::symlink;
use std::process::Command;

use gpushare_tests::artifacts::{checkout, helm, kubectl};
use gpushare_tests::cluster::kubelet::NODE;
use gpushare_tests::cluster::programs;
use gpushare_tests::command;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::pages::{Block, Page, pages};
use gpushare_tests::scratch::Scratch;
use serde_json::json;

use crate::control_plane::ControlPlane;
use crate::{CLAIMS, PODS, claim};

/// What stands before a page's commands in the shell.
const STAND_INS: &str = r#"
# Root's commands and folders on a node: no test writes there.
sudo() { while [[ $1 == *=* ]]; do shift; done; "$@"; }
ln() { :; }
mkdir() { :; }
cd() { :; }
# There is no registry.
podman() { :; }
# They go on for ever: whether they have these options is asked.
gpushare-kube() { "$PROGRAM" "$@" --help >/dev/null; }
# No kubelet and no controller runs pods, so that there are no logs and no rollout ends.
kubectl() {
    case " $* " in
    *" logs "* | *" rollout "*) command kubectl "$@" --help >/dev/null ;;
    *) command kubectl "$@" ;;
    esac
}
"#;

/// What a page's placeholders and the paths of an installed node stand for.
fn filled_in(lines: &str) -> String {
    let packaging = format!("{}/packaging", checkout().display());
    let lines = lines.replace("/usr/share/gpushare", &packaging).replace("REGISTRY", "registry.test");
    let word = |word: &str| match word {
        "NODE" => NODE.to_owned(),
        "POD" => "web".to_owned(),
        other => other.to_owned(),
    };
    lines.lines().map(|line| line.split(' ').map(word).collect::<Vec<_>>().join(" ") + "\n").collect()
}

/// The reader's folder: of the checkout what the commands name, and room for what they make.
fn folder() -> Scratch {
    let folder = Scratch::new("cluster-pages");
    for name in ["kubernetes", "examples", "packaging"] {
        symlink(checkout().join(name), folder.path().join(name)).expect("a link can be made");
    }
    for (name, program) in [("kubectl", kubectl()), ("helm", helm())] {
        symlink(program, folder.path().join(name)).expect("a link can be made");
    }
    symlink(env!("CARGO_BIN_EXE_gpushare-kube"), folder.path().join("kubectl-gpushare")).expect("the same");
    folder
}

/// Types the page's blocks for a cluster, and those by openssl, whose files they take.
fn type_in(page: &Page, blocks: &[Block]) {
    let cluster = ControlPlane::start(&programs().expect("it was looked for"));
    cluster.add_node();
    let folder = folder();
    for (namespace, labels) in [("team", json!({})), ("default", json!({"app": "shared"}))] {
        let _ =
            cluster.try_call("POST", "/api/v1/namespaces", Some(&json!({"metadata": {"name": namespace}})));
        let container = json!({"name": "main", "image": "none"});
        // No scheduler places it: a drained node would have to be asked for it.
        let spec = json!({"schedulerName": "none", "containers": [container]});
        let pod = json!({"metadata": {"name": "web", "labels": labels}, "spec": spec});
        cluster.post(&PODS.replace("team", namespace), &pod);
        cluster.post(&CLAIMS.replace("team", namespace), &claim("training", "30Gi"));
    }
    let shell = |lines: &str| {
        let mut shell = Command::new("bash");
        shell.args(["-ec", &format!("{STAND_INS}\n{lines}")]).current_dir(folder.path());
        shell.env_clear().env("HOME", folder.path()).env("KUBECONFIG", cluster.kubeconfig());
        shell.env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()));
        shell.env("PROGRAM", env!("CARGO_BIN_EXE_gpushare-kube"));
        command::run(&mut shell).expect_success(&format!("{}:\n{lines}", page.name()))
    };
    if page.name() == "docs/kubernetes.md" {
        // It goes on where the first pod's page ends.
        let _ = shell("helm install gpushare kubernetes/chart -n gpushare --create-namespace");
    }
    for block in blocks {
        let told = shell(&filled_in(&block.text));
        println!("{}:{}\n{}", page.name(), block.line, told.stdout);
    }
}

#[test]
#[ignore = "needs Kubernetes' programs in KUBE_BIN"]
fn every_command_of_the_pages_for_a_cluster_succeeds_on_a_real_control_plane() {
    if !met(&[Need::Kubernetes, Need::Kubectl, Need::Helm]) {
        return;
    }
    let mut count = 0;
    for page in pages() {
        let is_here = |block: &Block| {
            block.kind == "sh cluster" || (block.kind == "sh" && block.text.contains("openssl req"))
        };
        let blocks: Vec<Block> = page.blocks().into_iter().filter(is_here).collect();
        if !blocks.is_empty() {
            type_in(&page, &blocks);
            count += blocks.len();
        }
    }
    assert!(count > 15, "{count} blocks");
}
