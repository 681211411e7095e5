//! Living shares that pods and claims state anew by their annotations.

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::cluster::kubelet::{NODE, in_pod};
use gpushare_tests::cluster::{ClusterNode, SOON};
use gpushare_tests::command::eventually;
use gpushare_tests::hooked::{self, Cgroups};
use gpushare_tests::leases::{cli, leases};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

const UID: &str = "0b5c1f6e-8e0f-4c7d-9a51-3f6f2b8f1a10";

/// The pod `pod` with these annotations, in the cluster and as the engine marks its one container.
fn pod(node: &ClusterNode, annotations: &[(&str, &str)]) -> Bundle {
    node.api.pod("pod", &json!({"nodeName": NODE, "containers": [{"name": "main"}]}), &json!({}));
    node.api.annotate_pod("pod", &of(annotations));
    let bundle = in_pod(Bundle::with_probe(), "pod", "team");
    annotations.iter().fold(bundle, |bundle, (key, value)| bundle.annotation(key, value))
}

fn of(annotations: &[(&str, &str)]) -> Value {
    annotations.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect()
}

/// What was told last of the object `name`, after all of it was told `count` times.
fn told(node: &ClusterNode, name: &str, reason: &str, count: u64) -> String {
    let found = || {
        let events = node.api.events(name).into_iter();
        events.filter(|(its, _, _)| its == reason).find(|(_, its, _)| *its == count)
    };
    assert!(eventually(SOON, || found().is_some()), "{reason} {count}: {:?}", node.api.events(name));
    found().expect("it was there").2
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_running_pods_share_follows_its_annotations_as_far_as_the_node_has_room() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = crate::node(1);
        let runtime = Runtime::wrapped(low_level, &node.node);
        if low_level != LowLevel::Runc {
            // Here crun runs in a mount namespace of its own, as no engine has it on a node of a cluster.
            let bundle = pod(&node, &[("gpushare.io/memory", "4GiB")]);
            let _container = runtime.run(&bundle);
            node.api.annotate_pod("pod", &of(&[("gpushare.io/memory", "2GiB")]));
            let text = told(&node, "pod", "GpuShareNotResized", 1);
            assert!(text.contains("its share is as it was (an engine in a mount namespace"), "{text}");
            assert_eq!(leases(runtime.config())[0].memory, [4 * GIB]);
            continue;
        }
        let bundle = pod(&node, &[("gpushare.io/memory", "4GiB"), ("gpushare.io/cores", "30")]);
        let container = runtime.run(&bundle);
        Report::of(&container, &[]).assert_size(4 * GIB);
        let restate = |annotations: &[(&str, &str)]| node.api.annotate_pod("pod", &of(annotations));
        // More, for this container alone; less; and without a limit on compute.
        let more = [("gpushare.io/memory", "1GiB"), ("gpushare.io/main.memory", "6GiB"), ("other.io/a", "b")];
        restate(&more);
        let text = told(&node, "pod", "GpuShareResized", 1);
        assert!(text.starts_with("container main: 6 GiB and compute no limit of GPU GPU-"), "{text}");
        let report = Report::of(&container, &["6GiB", "5GiB"]);
        report.assert_size(6 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?}");
        restate(&[("gpushare.io/memory", "2GiB"), ("gpushare.io/cores", "50%")]);
        assert!(told(&node, "pod", "GpuShareResized", 2).contains("2 GiB and compute 50%"));
        Report::of(&container, &[]).assert_size(2 * GIB);
        // What the node has no room for waits, and is told once.
        let neighbour = Bundle::small().env("GPUSHARE_MEMORY", "70GiB");
        let neighbour = runtime.run(&neighbour);
        restate(&[("gpushare.io/memory", "20GiB"), ("gpushare.io/cores", "50%")]);
        let text = told(&node, "pod", "GpuShareNotResized", 1);
        assert!(text.contains("20 GiB requested, 10 GiB free on GPU 0"), "{text}");
        Report::of(&container, &[]).assert_size(2 * GIB);
        drop(neighbour);
        assert!(told(&node, "pod", "GpuShareResized", 3).contains("20 GiB"));
        let events = node.api.events("pod");
        let waited = events.iter().find(|(reason, ..)| reason == "GpuShareNotResized");
        assert_eq!(waited.map(|(_, count, _)| *count), Some(1), "{events:?}");
        Report::of(&container, &[]).assert_size(20 * GIB);
        assert_eq!(leases(runtime.config())[0].memory, [20 * GIB]);
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn what_cannot_change_in_place_is_told_and_the_share_stays() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(2);
    let config = node.node.config_with("strict", "[request]\nstrict = true\npod_ceiling = \"8GiB\"");
    node.configure(&config);
    let runtime = Runtime::with_config(LowLevel::Runc, &config);
    let bundle = pod(&node, &[("gpushare.io/memory", "4GiB"), ("gpushare.io/devices", "1")]);
    let container = runtime.run(&bundle);
    let base = [("gpushare.io/devices", "1")];
    for (number, (annotation, part)) in (1..).zip([
        (("gpushare.io/memory", "9GiB"), "request.pod_ceiling"),
        (("gpushare.io/memory", "4 elephants"), "4 elephants"),
        (("gpushare.io/memroy", "6GiB"), "gpushare.io/memory"),
        (("gpushare.io/count", "2"), "gpushare.io/count"),
        (("gpushare.io/mode", "exclusive"), "request.pod_ceiling"),
        (("gpushare.io/pod-memory", "6GiB"), "start the pod anew"),
    ]) {
        node.api.annotate_pod("pod", &of(&[base[0], annotation]));
        let text = told(&node, "pod", "GpuShareNotResized", number);
        assert!(text.contains(part) && !text.contains('\n'), "{annotation:?}: {text}");
        assert_eq!(leases(&config)[0].memory, [4 * GIB], "{annotation:?}");
    }
    node.api.annotate_pod("pod", &of(&[("gpushare.io/memory", "6GiB"), ("gpushare.io/devices", "0")]));
    assert!(told(&node, "pod", "GpuShareNotResized", 7).contains("keeps its GPUs"));
    // Another agent finds the same, and a share that an administrator changed stays where nobody restates it.
    node.api.annotate_pod("pod", &of(&[("gpushare.io/memory", "6GiB"), ("gpushare.io/devices", "1")]));
    assert!(told(&node, "pod", "GpuShareResized", 1).contains("6 GiB"));
    let by_hand = cli(&config, &["update", "team/pod", "--memory", "5GiB"]).expect_success("gpushare update");
    assert!(by_hand.stdout.contains("team/pod/main"), "{}", by_hand.stdout);
    node.api.annotate_pod(
        "pod",
        &json!({"other.io/a": "b", "gpushare.io/memory": "6GiB", "gpushare.io/devices": "1"}),
    );
    let asked = node.api.asked("resourceslices");
    assert!(eventually(SOON, || node.api.asked("resourceslices") > asked + 1), "it looked again");
    assert_eq!(leases(&config)[0].memory, [5 * GIB]);
    node.start_agent();
    node.api.annotate_pod("pod", &of(&[("gpushare.io/memory", "7GiB"), ("gpushare.io/devices", "1")]));
    assert!(told(&node, "pod", "GpuShareResized", 2).contains("7 GiB"));
    Report::of(&container, &[]).assert_size(7 * GIB);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_claims_share_follows_its_annotations_within_what_was_allocated() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(1);
    let runtime = Runtime::wrapped(LowLevel::Runc, &node.node);
    node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "40")], &[]);
    node.api.annotate_claim("training", &of(&[("gpushare.io/memory", "20GiB")]));
    let devices = node.kubelet.prepare("training", UID).expect("it fits");
    let held = || leases(runtime.config())[0].memory.clone();
    assert_eq!(held(), [20 * GIB], "before its first container");
    node.api.annotate_claim("training", &of(&[("gpushare.io/gpu.memory", "12GiB")]));
    assert!(told(&node, "training", "GpuShareResized", 2).contains("12 GiB and compute 40%"));
    let bundle = node.kubelet.bundle(Bundle::with_probe(), "pod", &devices, false);
    let container = runtime.run(&bundle);
    Report::of(&container, &[]).assert_size(12 * GIB);
    for (number, (annotations, part)) in (1..).zip([
        ([("gpushare.io/memory", "31GiB")], "31GiB\" is more than the 30 GiB that the scheduler allocated"),
        ([("gpushare.io/cores", "41")], "more than the 40%"),
        ([("gpushare.io/memory", "25%")], "stated in bytes"),
        ([("gpushare.io/memory", "much")], "cannot be read"),
        ([("gpushare.io/other.memory", "1GiB")], "says nothing about the claim's shares"),
        ([("gpushare.io/priority", "1")], "says nothing about the claim's shares"),
    ]) {
        node.api.annotate_claim("training", &of(&annotations));
        let text = told(&node, "training", "GpuShareNotResized", number);
        assert!(text.contains(part), "{annotations:?}: {text}");
        assert_eq!(held(), [12 * GIB]);
    }
    // kubelet and the agent begin anew: the share stays what the claim says, and holds its lease.
    node.api.annotate_claim("training", &of(&[("gpushare.io/cores", "10"), ("gpushare.io/memory", "25GiB")]));
    assert!(told(&node, "training", "GpuShareResized", 3).contains("25 GiB and compute 10%"));
    node.start_agent();
    assert_eq!(node.kubelet.prepare("training", UID).expect("it holds it already"), devices);
    assert_eq!(held(), [25 * GIB]);
    // Room that it left may be another's by now.
    let neighbour = Bundle::small().env("GPUSHARE_MEMORY", "52GiB");
    let neighbour = runtime.run(&neighbour);
    node.api.annotate_claim("training", &json!({}));
    let text = told(&node, "training", "GpuShareNotResized", 7);
    assert!(text.contains("30 GiB requested, 28 GiB free"), "{text}");
    drop(neighbour);
    assert!(told(&node, "training", "GpuShareResized", 4).contains("30 GiB and compute 40%"));
    let report = Report::of(&container, &["30GiB", "29GiB"]);
    report.assert_size(30 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    drop(container);
    node.kubelet.unprepare("training", UID).expect("it is given back");
    assert_eq!(node.left(), (0, 0, 0));
}

#[test]
#[ignore = "needs root, and runc: runs containers"]
fn a_container_starts_anew_in_a_pod_whose_one_share_was_changed() {
    if !met(NEEDS) {
        return;
    }
    let node = crate::node(1);
    let runtime = Runtime::wrapped(LowLevel::Runc, &node.node);
    let words = |memory: &'static str| [("gpushare.io/memory", memory), ("gpushare.io/scope", "pod")];
    let before = pod(&node, &words("4GiB"));
    let first = runtime.run(&before);
    Report::of(&first, &[]).assert_size(4 * GIB);
    node.api.annotate_pod("pod", &of(&words("8GiB")));
    assert!(told(&node, "pod", "GpuShareResized", 1).contains("8 GiB"));
    let more = words("8GiB");
    let again = in_pod(Bundle::with_probe(), "pod", "team");
    let again = more.iter().fold(again, |bundle, (key, value)| bundle.annotation(key, value));
    let second = runtime.run(&again);
    Report::of(&second, &[]).assert_size(8 * GIB);
    assert_eq!(leases(runtime.config()).len(), 1, "both hold one share");
}

#[test]
#[ignore = "needs root, and runc: runs containers"]
fn what_a_hook_prepared_is_told_of_only_when_its_pod_states_anything_anew() {
    if !met(NEEDS) {
        return;
    }
    let node = crate::node(1);
    let runtime = hooked::runtime(LowLevel::Runc, &node.node, Cgroups::V1);
    let config = node.node.config().to_string_lossy().into_owned();
    let bundle = pod(&node, &[("gpushare.io/memory", "4GiB")]);
    let bundle = bundle.hook("createRuntime", &artifacts::hook(), &["createRuntime", "--config", &config]);
    let container = runtime.run(&bundle);
    Report::of(&container, &[]).assert_size(4 * GIB);
    let asked = node.api.asked("resourceslices");
    assert!(eventually(SOON, || node.api.asked("resourceslices") > asked + 2), "it looked");
    assert_eq!(node.api.events("pod"), []);
    node.api.annotate_pod("pod", &of(&[("gpushare.io/memory", "2GiB")]));
    assert!(told(&node, "pod", "GpuShareNotResized", 1).contains("gpushare update"));
}
