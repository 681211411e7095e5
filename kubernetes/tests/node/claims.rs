//! Claims, from what the scheduler allotted to containers that cannot have more.

use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::cluster::kubelet::{NODE, in_pod};
use gpushare_tests::cluster::{ClusterNode, NEEDS, SOON, Settings};
use gpushare_tests::command::eventually;
use gpushare_tests::containerd::Containerd;
use gpushare_tests::hooked::{self, Cgroups};
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use gpushare_tests::view::View;
use serde_json::{Value, json};

const CONTAINERS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

const UID: &str = "0b5c1f6e-8e0f-4c7d-9a51-3f6f2b8f1a10";

const HOLDER: [&str; 7] =
    ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "20GiB", "--hold", "1000"];

/// The runtime, with one mount namespace for all calls, as an engine has it.
fn runtime(low_level: LowLevel, node: &ClusterNode) -> Runtime {
    Runtime::wrapped(low_level, &node.node).in_view(low_level.view())
}

fn wait_until_it_holds(container: &Container<'_>) {
    assert!(eventually(Duration::from_secs(20), || !container.stdout().is_empty()), "{}", container.stderr());
    assert_eq!(Report::parse(&container.stdout()).allocations(), [SUCCESS]);
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn the_containers_of_a_claim_share_one_budget_that_ends_with_the_claim() {
    if !met(CONTAINERS) {
        return;
    }
    let node = crate::node(1);
    for low_level in LowLevel::ALL {
        let runtime = runtime(low_level, &node);
        node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "0")], &[]);
        let devices = node.kubelet.prepare("training", UID).expect("it fits");
        assert_eq!(devices[0].request_names, ["gpu"]);
        let holder = node.kubelet.bundle(Bundle::with_probe().args(&HOLDER), "pod", &devices, false);
        let other = node.kubelet.bundle(Bundle::with_probe(), "pod", &devices, false);
        let (first, second) = (runtime.run(&holder), runtime.run(&other));
        wait_until_it_holds(&first);
        let report = Report::of(&second, &["10GiB", "8GiB"]);
        report.assert_size(30 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?}");
        assert_eq!(node.left().0, 1, "one lease for both");
        drop((first, second));
        // The pod's containers may come again: the claim still holds its share.
        let again = node.kubelet.bundle(Bundle::with_probe(), "pod", &devices, false);
        let container = runtime.run(&again);
        assert_eq!(Report::of(&container, &["29GiB"]).allocations(), [SUCCESS], "{low_level:?}");
        drop(container);
        assert_eq!(leases(runtime.config())[0].memory, [30 * GIB]);
        node.kubelet.unprepare("training", UID).expect("it is given back");
        node.kubelet.unprepare("training", UID).expect("twice is once");
        assert_eq!(node.left(), (0, 0, 0), "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_gets_the_gpus_of_the_requests_that_it_names() {
    if !met(CONTAINERS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = crate::node(2);
        let shares = [node.share("small", 1, "10Gi", "25"), node.share("large", 0, "60Gi", "0")];
        node.api.claim("pair", UID, &shares, &[]);
        let devices = node.kubelet.prepare("pair", UID).expect("it fits");
        let runtime = runtime(low_level, &node);
        for (named, gpus, size) in
            [(&devices[..], 2, 60 * GIB), (&devices[..1], 1, 10 * GIB), (&devices[1..], 1, 60 * GIB)]
        {
            let bundle = node.kubelet.bundle(Bundle::with_probe(), "pod", named, false);
            let container = runtime.run(&bundle);
            let report = Report::of(&container, &[]);
            assert_eq!(
                (report.number("devices"), report.number("nvml_devices")),
                (gpus, gpus),
                "{low_level:?}"
            );
            report.assert_size(size);
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_claim_is_enforced_by_its_cdi_hook_alone() {
    if !met(CONTAINERS) {
        return;
    }
    let node = crate::node(1);
    node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "0")], &[]);
    let devices = node.kubelet.prepare("training", UID).expect("it fits");
    let bundle = node.kubelet.bundle(Bundle::with_probe(), "pod", &devices, true);
    let runtime = hooked::runtime(LowLevel::Runc, &node.node, Cgroups::V1);
    let container = runtime.run(&bundle);
    let report = Report::of(&container, &["30GiB", "29GiB"]);
    report.assert_size(30 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    drop(container);
    node.kubelet.unprepare("training", UID).expect("it is given back");
    assert_eq!(node.left(), (0, 0, 0));
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_claim_is_prepared_once_however_often_kubelet_and_agent_begin_anew() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(1);
    node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "40")], &[]);
    let files = |node: &ClusterNode| {
        let texts = node
            .kubelet
            .cdi_files()
            .into_iter()
            .map(|path| std::fs::read_to_string(path).expect("it is there"));
        texts.collect::<Vec<_>>()
    };
    let devices = node.kubelet.prepare("training", UID).expect("it fits");
    let written = files(&node);
    assert_eq!(written.len(), 1);
    for _ in 0..3 {
        node.start_agent();
        assert_eq!(node.kubelet.prepare("training", UID).expect("it holds it already"), devices);
        assert_eq!((node.left(), files(&node)), ((1, 1, 0), written.clone()));
    }
    // The folder of CDI files is in memory, which somebody may have emptied.
    node.kubelet.cdi_files().iter().for_each(|path| std::fs::remove_file(path).expect("it can go"));
    node.kubelet.prepare("training", UID).expect("it holds it already");
    assert_eq!(files(&node), written);
    node.kubelet.unprepare("training", UID).expect("it is given back");
    assert_eq!(node.left(), (0, 0, 0));
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_claim_that_cannot_be_served_is_refused_in_words_and_leaves_nothing() {
    if !met(NEEDS) {
        return;
    }
    let node = crate::node(1);
    let share = node.share("gpu", 0, "30Gi", "0");
    let with = |change: &dyn Fn(&mut Value)| {
        let mut share = share.clone();
        change(&mut share);
        vec![share]
    };
    let parameters = |parameters: Value| json!({"source": "FromClaim", "opaque": {"driver": "gpu.gpushare.io", "parameters": parameters}});
    let sound = json!({"apiVersion": "gpu.gpushare.io/v1", "kind": "ShareParameters"});
    let beside = |key: &str, value: Value| {
        let mut sound = sound.clone();
        sound[key] = value;
        vec![parameters(sound)]
    };
    for (results, config, part) in [
        (with(&|share| share["device"] = json!("gpu-gone")), vec![], "gpu-gone is not on this node"),
        (with(&|share| share["consumedCapacity"] = Value::Null), vec![], "states no memory"),
        (with(&|share| share["consumedCapacity"]["memory"] = json!("0")), vec![], "states memory \"0\""),
        (with(&|share| share["consumedCapacity"]["memory"] = json!("1.5")), vec![], "states memory \"1.5\""),
        (
            with(&|share| share["consumedCapacity"]["memory"] = json!("-1Gi")),
            vec![],
            "states memory \"-1Gi\"",
        ),
        (with(&|share| share["consumedCapacity"]["cores"] = json!("101")), vec![], "states cores \"101\""),
        (with(&|share| share["consumedCapacity"]["memory"] = json!("81Gi")), vec![], "81 GiB requested"),
        (with(&|share| share["adminAccess"] = json!(true)), vec![], "administrative access"),
        (with(&|share| share["pool"] = json!("node-b")), vec![], "no device of this driver on node node-a"),
        (with(&|share| share["driver"] = json!("gpu.nvidia.com")), vec![], "no device of this driver"),
        (vec![share.clone()], beside("computePolicy", json!("loose")), "computePolicy"),
        (vec![share.clone()], beside("priority", json!(10)), "priority"),
        (vec![share.clone()], beside("memory", json!("40Gi")), "unknown field `memory`"),
        (vec![share.clone()], beside("apiVersion", json!("v2")), "v2 \"ShareParameters\" is unknown"),
        (vec![share.clone()], vec![parameters(json!("burst"))], "cannot be taken"),
    ] {
        node.api.claim("training", UID, &results, &config);
        let told = node.kubelet.prepare("training", UID).expect_err(part);
        assert!(told.contains(part) && !told.contains('\n'), "{part}: {told}");
        assert_eq!(node.left(), (0, 0, 0), "{told}");
    }
    node.api.change_claim("training", |claim| claim["status"] = json!({}));
    assert!(node.kubelet.prepare("training", UID).expect_err("not allocated").contains("no allocation"));
    node.api.claim("training", "another-uid", &[share], &[]);
    assert!(node.kubelet.prepare("training", UID).expect_err("made anew").contains("made anew"));
    node.api.forget_claim("training");
    assert!(node.kubelet.prepare("training", UID).expect_err("gone").contains("gone"));
    node.api.set_away(true);
    assert!(node.kubelet.prepare("training", UID).expect_err("away").contains("API server"));
    assert_eq!(node.left(), (0, 0, 0));
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_claim_has_no_room_that_the_nodes_own_containers_took() {
    if !met(CONTAINERS) {
        return;
    }
    let node = crate::node(1);
    let runtime = runtime(LowLevel::Runc, &node);
    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "60GiB");
    let container = runtime.run(&bundle);
    node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "0")], &[]);
    let told = node.kubelet.prepare("training", UID).expect_err("it does not fit");
    assert!(told.contains("30 GiB requested, 20 GiB free"), "{told}");
    drop(container);
    node.kubelet.prepare("training", UID).expect("it fits now");
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_token_opens_a_claim_to_its_namespace_and_a_guess_opens_none() {
    if !met(CONTAINERS) {
        return;
    }
    let node = crate::node(1);
    let runtime = runtime(LowLevel::Runc, &node);
    node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "0")], &[]);
    let devices = node.kubelet.prepare("training", UID).expect("it fits");
    let refused = |bundle: Bundle| runtime.create(&bundle).expect_err("nothing is granted").line();
    let stolen = |pod: &str, namespace: &str| {
        in_pod(node.kubelet.bundle(Bundle::small(), "pod", &devices, false), pod, namespace)
    };
    let told = refused(stolen("pod", "others"));
    assert!(told.contains("team/training") && told.contains("others"), "{told}");
    let told = refused(stolen("another-pod", "team"));
    assert!(told.contains("team/training") && told.contains("uid-of-another-pod"), "{told}");
    let nameless = stolen("pod", "team").edit(|spec| {
        let annotations = spec["annotations"].as_object_mut().expect("it has some");
        annotations.remove("io.kubernetes.cri.sandbox-uid");
    });
    assert!(refused(nameless).contains("not reserved for this pod"));
    let gpu = node.gpus().remove(0);
    let guess = |token: &str| format!("gpushare.io/claim={token}/{gpu}");
    for (value, part) in [
        (guess(&"0".repeat(32)), "holds nothing on this node"),
        (guess(UID), "holds nothing on this node"),
        (guess("*"), "holds nothing on this node"),
        ("gpushare.io/claim=".to_owned(), "names no resource claim"),
        ("60GiB".to_owned(), "names no resource claim"),
    ] {
        let bundle = in_pod(Bundle::small(), "pod", "team").env("GPUSHARE_CDI_CLAIM_X", &value);
        let told = refused(bundle);
        assert!(told.contains(part), "{value}: {told}");
    }
    node.kubelet.unprepare("training", UID).expect("it is given back");
    assert_eq!(node.left(), (0, 0, 0));
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_claim_that_nobody_gives_back_is_given_back_once_its_containers_have_ended() {
    if !met(CONTAINERS) {
        return;
    }
    let mut node = crate::node(1);
    let runtime = runtime(LowLevel::Runc, &node);
    node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "0")], &[]);
    node.api.claim("kept", "uid-of-kept", &[node.share("gpu", 0, "10Gi", "0")], &[]);
    let devices = node.kubelet.prepare("training", UID).expect("it fits");
    node.kubelet.prepare("kept", "uid-of-kept").expect("it fits");
    let bundle = node.kubelet.bundle(Bundle::small(), "pod", &devices, false);
    let container = runtime.run(&bundle);
    node.kill_agent();
    // The pod was deleted by force, and kubelet's notes are gone.
    node.api.forget_claim("training");
    let left = |name: &str| std::fs::write(node.kubelet.cdi.join(name), "{}").expect("it can be written");
    ["gpushare.io-claim_of-nobody.json", ".gpushare.io-claim_x.json.1.new", "other.json"]
        .into_iter()
        .for_each(left);
    node.start_agent();
    let names = |node: &ClusterNode| {
        let files = node.kubelet.cdi_files();
        let names = files.iter().filter_map(|path| path.file_name()?.to_str()).map(str::to_owned);
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let file = |uid: &str| format!("gpushare.io-claim_{uid}.json");
    let kept = [file(UID), file("uid-of-kept"), "other.json".to_owned()];
    assert!(eventually(SOON, || names(&node) == kept.clone().into()), "{:?}", names(&node));
    let asked = node.api.asked("training");
    assert!(eventually(SOON, || node.api.asked("training") > asked + 4));
    assert_eq!(node.left().0, 2, "a container that runs keeps its claim's share");
    assert_eq!(names(&node), kept.clone().into(), "and its claim");
    drop(container);
    assert!(eventually(SOON, || node.left().0 == 1), "{:?}", node.left());
    assert!(eventually(SOON, || names(&node) == kept[1..].iter().cloned().collect()), "{:?}", names(&node));
    node.kubelet.unprepare("kept", "uid-of-kept").expect("it is given back");
    assert_eq!(node.left(), (0, 1, 0), "a file of somebody else's stays");
}

#[test]
#[ignore = "needs root and containerd: starts a daemon"]
fn an_engine_that_applies_no_cdi_devices_is_refused_in_words() {
    if !met(&[Need::Root, Need::Containerd]) {
        return;
    }
    let mut node = crate::node(1);
    node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "0")], &[]);
    // Debian's containerd 1.6: it takes kubelet's CDI devices, and passes them over.
    let containerd = Containerd::start(node.node.config(), View::AsItIs, "");
    for (socket, part) in [
        (containerd.socket(), "containerd 1.6"),
        (node.kubelet.root.join("no-such.sock"), "cannot be asked whether it applies CDI devices"),
    ] {
        node.settings.engine = Some(socket);
        node.start_agent();
        let told = node.kubelet.prepare("training", UID).expect_err(part);
        assert!(told.contains(part), "{told}");
        assert_eq!(node.left(), (0, 0, 0));
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_pod_that_comes_to_share_a_claim_is_let_in_soon() {
    if !met(CONTAINERS) {
        return;
    }
    // It is the pod that makes the agent look, and not its rounds.
    let node = ClusterNode::start(crate::program(), 2, Settings { period: 3600, ..Settings::default() });
    let runtime = runtime(LowLevel::Runc, &node);
    node.api.claim("together", UID, &[node.share("gpu", 0, "30Gi", "0")], &[]);
    let devices = node.kubelet.prepare("together", UID).expect("it fits");
    let bundle = node.kubelet.bundle(Bundle::small(), "second", &devices, false);
    assert!(
        runtime.create(&bundle).expect_err("it is not told yet").line().contains("not reserved for this pod")
    );
    // kubelet has the claim prepared already, and calls nobody for the second pod.
    node.api.change_claim("together", |claim| {
        let consumers = claim["status"]["reservedFor"].as_array_mut().expect("it is a list");
        consumers.push(json!({"resource": "pods", "name": "second", "uid": "uid-of-second"}));
    });
    sharing_pod(&node, "second");
    assert!(eventually(SOON, || runtime.create(&bundle).map(drop).is_ok()));
    assert_eq!(node.left().0, 1);
    // The first pod was deleted by force, and the claim allocated anew while its containers end: what is
    // prepared is not what the scheduler counts.
    node.api.change_claim("together", |claim| {
        claim["status"]["allocation"]["devices"]["results"] = json!([node.share("gpu", 1, "30Gi", "0")]);
        let third = json!({"resource": "pods", "name": "third", "uid": "uid-of-third"});
        claim["status"]["reservedFor"] = json!([third]);
    });
    sharing_pod(&node, "third");
    let told = || node.api.events("together").into_iter().find(|(reason, ..)| reason == "GpuShareStale");
    assert!(eventually(SOON, || told().is_some()), "{:?}", node.api.events("together"));
    assert!(told().expect("it was there").2.contains("delete the pods that use it"));
    let bundle = node.kubelet.bundle(Bundle::small(), "third", &devices, false);
    assert!(
        runtime
            .create(&bundle)
            .expect_err("it is another share")
            .line()
            .contains("not reserved for this pod")
    );
    // kubelet unprepares it with its last pod, and prepares it anew.
    node.kubelet.unprepare("together", UID).expect("it is given back");
    let devices = node.kubelet.prepare("together", UID).expect("it fits");
    let bundle = node.kubelet.bundle(Bundle::small(), "third", &devices, false);
    runtime.create(&bundle).map(drop).expect("it is its share");
}

/// A pod of the claim `together` comes to the node.
fn sharing_pod(node: &ClusterNode, name: &str) {
    let claims = json!([{"name": "share", "resourceClaimName": "together"}]);
    let spec = json!({"nodeName": NODE, "containers": [{"name": "main"}], "resourceClaims": claims});
    node.api.pod(name, &spec, &json!({}));
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn what_is_no_word_of_the_api_server_ends_no_claim() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(1);
    node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "0")], &[]);
    node.kubelet.prepare("training", UID).expect("it fits");
    node.api.set_proxy(true);
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(node.left(), (1, 1, 0));
    assert!(node.kubelet.prepare("training", UID).expect_err("nobody tells").contains("API server"));
    node.api.set_proxy(false);
    node.start_agent();
    node.kubelet.prepare("training", UID).expect("it holds it");
    // The claim went to another node while kubelet had lost its notes.
    node.api.change_claim("training", |claim| {
        claim["status"]["allocation"]["devices"]["results"][0]["pool"] = json!("node-b");
    });
    assert!(eventually(SOON, || node.left() == (0, 0, 0)), "{:?}", node.left());
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_claims_parameters_ask_for_no_more_than_its_class_and_a_strict_node_give() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(1);
    let config = |source: &str, key: &str, value: Value| {
        let mut parameters = json!({"apiVersion": "gpu.gpushare.io/v1", "kind": "ShareParameters"});
        parameters[key] = value;
        json!({"source": source, "opaque": {"driver": "gpu.gpushare.io", "parameters": parameters}})
    };
    let class = |key: &str, value: Value| config("FromClass", key, value);
    let claim = |key: &str, value: Value| config("FromClaim", key, value);
    let strict = node.node.config_with("strict", "[request]\nstrict = true");
    for (is_strict, configs, is_granted) in [
        (false, vec![claim("priority", json!(9))], true),
        (false, vec![claim("computePolicy", json!("none"))], true),
        (false, vec![class("priority", json!(3)), claim("priority", json!(4))], false),
        (false, vec![class("computePolicy", json!("burst")), claim("computePolicy", json!("none"))], false),
        (false, vec![class("computePolicy", json!("burst")), claim("computePolicy", json!("fixed"))], true),
        (true, vec![claim("priority", json!(9))], false),
        (true, vec![claim("priority", json!(1))], true),
        (true, vec![claim("computePolicy", json!("burst"))], false),
        (true, vec![class("computePolicy", json!("burst")), claim("computePolicy", json!("burst"))], true),
        (true, vec![class("priority", json!(9))], true),
    ] {
        if is_strict && !node.is_configured(&strict) {
            node.configure(&strict);
        }
        node.api.claim("training", UID, &[node.share("gpu", 0, "30Gi", "40")], &configs);
        let prepared = node.kubelet.prepare("training", UID);
        assert_eq!(prepared.is_ok(), is_granted, "strict: {is_strict}, {configs:?}: {prepared:?}");
        assert!(prepared.err().is_none_or(|told| told.contains("is more than the device class")));
        node.kubelet.unprepare("training", UID).expect("it is given back");
    }
}
