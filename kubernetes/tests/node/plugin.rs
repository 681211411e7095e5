//! GPUs as countable resources, from kubelet's device manager to containers that cannot have more.

use std::collections::BTreeSet;
use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::cluster::device_manager::{Allocated, DeviceManager};
use gpushare_tests::cluster::kubelet::in_pod;
use gpushare_tests::cluster::{ClusterNode, NEEDS, SOON};
use gpushare_tests::command::eventually;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};

const CONTAINERS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];
const OWN: [&str; 2] = ["gpushare.io/gpu-memory", "gpushare.io/gpu-core"];

/// A node of two GPUs of 80 GiB whose agent serves these resources, and the device manager that knows them.
fn node(resources: &[&str], more: &str) -> (ClusterNode, DeviceManager) {
    let mut node = crate::node(2);
    let manager = DeviceManager::start(&node.kubelet.root);
    let settings =
        format!("[request]\ndefault_memory = \"10%\"\n[kubernetes]\nresources = {resources:?}\n{more}");
    let config = node.node.config_with("plugin", &format!("{}\n{settings}", LowLevel::Runc.settings()));
    node.configure(&config);
    let known = |name: &&str| manager.plugin(name).is_some();
    assert!(eventually(SOON, || resources.iter().all(known)), "the resources are not registered");
    (node, manager)
}

/// The ids of all healthy devices.
fn healthy(manager: &DeviceManager, resource: &str) -> Vec<String> {
    let devices = manager.devices(resource).expect("the plugin answers");
    devices.into_iter().filter(|(_, health)| health == "Healthy").map(|(id, _)| id).collect()
}

/// A container of a pod with what was allocated to it.
fn bundle(given: &[&Allocated]) -> Bundle {
    let mut bundle = in_pod(Bundle::with_probe(), "pod", "team");
    // Of two resources that say the same, kubelet takes either.
    let annotations: BTreeSet<_> = given.iter().flat_map(|given| &given.annotations).collect();
    for (key, value) in annotations {
        bundle = bundle.annotation(key, value);
    }
    for (key, value) in given.iter().flat_map(|given| &given.envs) {
        bundle = bundle.env(key, value);
    }
    bundle
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_container_gets_the_memory_and_compute_that_kubelet_counted_of_one_gpu() {
    if !met(CONTAINERS) {
        return;
    }
    let (node, manager) = node(&OWN, "");
    let runtime = Runtime::with_config(LowLevel::Runc, node.config()).in_view(LowLevel::Runc.view());
    let (memory, cores) = (healthy(&manager, OWN[0]), healthy(&manager, OWN[1]));
    assert_eq!((memory.len(), cores.len()), (2 * 320, 200));
    let memory = manager.allocate(OWN[0], &memory, 80).expect("it fits");
    let cores = manager.allocate(OWN[1], &cores, 30).expect("it fits");
    let gpu = &memory.annotations["alloc.gpushare.io/devices"];
    assert_eq!(gpu, &cores.annotations["alloc.gpushare.io/cores-devices"]);
    let bundle = bundle(&[&memory, &cores]);
    let container = runtime.run(&bundle);
    let report = Report::of(&container, &["21GiB", "19GiB"]);
    report.assert_size(20 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    // Where kubelet chose another GPU for the compute, nothing is granted, whatever the settings.
    let other = node.gpus().into_iter().find(|other| other != gpu).expect("there are two");
    let mut elsewhere = cores.clone();
    elsewhere.annotations.insert("alloc.gpushare.io/cores-devices".to_owned(), other);
    let refused = runtime.create(&self::bundle(&[&memory, &elsewhere])).expect_err("they are of two GPUs");
    assert!(refused.line().contains("cores-devices"), "{}", refused.line());
    // Compute alone gets the default of memory.
    let alone = self::bundle(&[&cores]);
    Report::of(&runtime.run(&alone), &[]).assert_size(8 * GIB);
    // The GPUs are given in one way: the scheduler sees no devices for claims.
    assert!(eventually(SOON, || node
        .api
        .slices()
        .iter()
        .all(|slice| slice["spec"]["devices"].as_array().is_none_or(Vec::is_empty))));
    // What no GPU has by itself is refused in the pod's event.
    let left =
        [healthy(&manager, OWN[0])[..100].to_vec(), healthy(&manager, OWN[0])[320..420].to_vec()].concat();
    let told = manager.allocate(OWN[0], &left, 150).expect_err("no GPU has so many");
    assert!(told.message().contains("but not on one GPU"), "{told}");
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn kubelet_that_starts_anew_learns_the_resources_again() {
    if !met(NEEDS) {
        return;
    }
    let (node, manager) = node(&OWN, "");
    manager.restart();
    assert!(eventually(SOON, || OWN.iter().all(|name| manager.plugin(name).is_some())));
    assert!(eventually(SOON, || manager.devices(OWN[0]).is_ok_and(|devices| devices.len() == 640)));
    drop(node);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn other_systems_names_count_in_their_units_and_tell_their_words() {
    if !met(CONTAINERS) {
        return;
    }
    let (node, manager) = node(&["aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage"], "");
    let runtime = Runtime::with_config(LowLevel::Runc, node.config()).in_view(LowLevel::Runc.view());
    let gpu_mem = healthy(&manager, "aliyun.com/gpu-mem");
    assert_eq!(gpu_mem.len(), 160);
    let given = manager.allocate("aliyun.com/gpu-mem", &gpu_mem, 8).expect("it fits");
    assert_eq!(given.ids.len(), 8);
    Report::of(&runtime.run(&bundle(&[&given])), &[]).assert_size(8 * GIB);
    let tencents = ["tencent.com/vcuda-memory", "tencent.com/vcuda-core"];
    let (node, manager) = self::node(&tencents, "");
    let runtime = Runtime::with_config(LowLevel::Runc, node.config()).in_view(LowLevel::Runc.view());
    let [memory, cores] =
        tencents.map(|name| manager.allocate(name, &healthy(&manager, name), 40).expect("it fits"));
    Report::of(&runtime.run(&bundle(&[&memory, &cores])), &[]).assert_size(10 * GIB);
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_gpu_that_is_lost_is_unhealthy_and_a_name_that_another_plugin_serves_is_left_to_it() {
    if !met(NEEDS) {
        return;
    }
    let (mut node, manager) = node(&OWN[..1], "");
    let mut folders: Vec<_> = std::fs::read_dir(node.node.proc_driver().join("gpus"))
        .expect("it can be read")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    folders.sort();
    std::fs::write(folders[0].join("information"), "").expect("it can fall off");
    assert!(eventually(SOON, || healthy(&manager, OWN[0]).len() == 320));
    assert_eq!(manager.devices(OWN[0]).expect("the plugin answers").len(), 640, "kubelet hears of it");
    // Another plugin has registered the name of a resource.
    node.kubelet.devices.set_allocatable("aliyun.com/gpu-mem", &["theirs-_-0".to_owned()]);
    let settings = "[kubernetes]\nresources = [\"aliyun.com/gpu-mem\", \"gpushare.io/gpu-core\"]\n[request]\ndefault_memory = \"10%\"";
    let config = node.node.config_with("both", &format!("{}\n{settings}", LowLevel::Runc.settings()));
    node.configure(&config);
    assert!(eventually(SOON, || manager.plugin("gpushare.io/gpu-core").is_some()));
    let is_taken = || manager.plugin("aliyun.com/gpu-mem").is_some();
    assert!(!eventually(Duration::from_secs(2), is_taken), "it is left to the other");
}
