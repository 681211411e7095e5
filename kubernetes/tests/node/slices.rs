//! What the scheduler sees of a node's GPUs, and Prometheus of its agent.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use gpushare_tests::cluster::{ClusterNode, NEEDS, SOON, Settings};
use gpushare_tests::command::eventually;
use gpushare_tests::leases::cli;
use gpushare_tests::needs::met;
use gpushare_tests::node::{MODEL, SimulatedNode};
use serde_json::{Value, json};

/// The one slice of the node, once there is one.
fn slice(node: &ClusterNode) -> Value {
    assert!(eventually(SOON, || node.api.slices().len() == 1), "{:?}", node.api.slices());
    node.api.slices().remove(0)
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn the_scheduler_sees_each_gpu_with_memory_and_compute_to_hand_out_in_parts() {
    if !met(NEEDS) {
        return;
    }
    let node = crate::node(2);
    let slice = slice(&node);
    assert_eq!(slice["metadata"]["name"], "node-a-gpu.gpushare.io");
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "uid-of-node");
    let spec = &slice["spec"];
    assert_eq!((&spec["driver"], &spec["nodeName"]), (&json!("gpu.gpushare.io"), &json!("node-a")));
    assert_eq!(spec["pool"], json!({"name": "node-a", "generation": 0, "resourceSliceCount": 1}));
    let devices = spec["devices"].as_array().expect("it is a list");
    for (index, (device, uuid)) in devices.iter().zip(node.gpus()).enumerate() {
        assert_eq!(device["name"], uuid.to_lowercase());
        assert_eq!(device["allowMultipleAllocations"], true);
        assert_eq!(device["attributes"]["uuid"]["string"], uuid);
        assert_eq!(device["attributes"]["index"]["int"], index);
        assert_eq!(device["attributes"]["model"]["string"], "NVIDIA H100 80GB HBM3");
        assert!(device["attributes"]["supervisor"]["bool"].is_boolean());
        let memory = json!({"value": "80Gi", "requestPolicy": {
            "default": "20Gi", "validRange": {"min": "1Mi", "max": "80Gi"}}});
        let cores = json!({"value": "100", "requestPolicy": {
            "default": "0", "validRange": {"min": "0", "max": "100", "step": "1"}}});
        assert_eq!(device["capacity"], json!({"memory": memory, "cores": cores}));
    }
    assert_eq!(devices.len(), 2);
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_gpus_cuda_version_and_place_can_be_selected_by() {
    if !met(NEEDS) {
        return;
    }
    let node = crate::node(2);
    let attributes = |device: usize| slice(&node)["spec"]["devices"][device]["attributes"].clone();
    let driver = node.node.proc_driver();
    let mut addresses: Vec<String> = std::fs::read_dir(driver.join("gpus"))
        .expect("the driver shows its GPUs")
        .map(|entry| entry.expect("it can be read").file_name().to_string_lossy().to_lowercase())
        .collect();
    addresses.sort();
    // The kernel writes -1 where the machine tells no NUMA node.
    let root = driver.ancestors().nth(3).expect("it ends with proc/driver/nvidia");
    for (address, numa) in addresses.iter().zip(["1\n", "-1\n"]) {
        let folder = root.join("sys/bus/pci/devices").join(address);
        std::fs::create_dir_all(&folder).expect("it can be made");
        std::fs::write(folder.join("numa_node"), numa).expect("it can be written");
    }
    assert!(eventually(SOON, || attributes(0)["numaNode"] == json!({"int": 1})), "{}", attributes(0));
    assert_eq!(attributes(1)["numaNode"], Value::Null);
    for (device, address) in addresses.iter().enumerate() {
        assert_eq!(attributes(device)["resource.kubernetes.io/pciBusID"], json!({"string": address}));
        let cuda = attributes(device)["cudaVersion"]["version"].as_str().map(str::to_owned);
        assert!(cuda.is_some_and(|cuda| cuda.split('.').count() == 3), "{}", attributes(device));
    }
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_slice_of_another_node_that_has_this_nodes_name_hides_nothing() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(1);
    slice(&node);
    node.kill_agent();
    // kubelet removes the slice of a driver that is away, and then the name is free.
    node.api.forget_slice("node-a-gpu.gpushare.io");
    let pool = json!({"name": "node-b", "generation": 1, "resourceSliceCount": 1});
    let spec = json!({"driver": "gpu.gpushare.io", "nodeName": "node-b", "pool": pool, "devices": []});
    node.api.slice("node-a-gpu.gpushare.io", &spec);
    node.start_agent();
    let own = || node.api.slices().into_iter().find(|slice| slice["spec"]["nodeName"] == "node-a");
    assert!(eventually(SOON, || own().is_some()), "{:?}", node.api.slices());
    let name = own().expect("it was there")["metadata"]["name"].clone();
    assert!(name.as_str().is_some_and(|name| name.starts_with("node-a-gpu.gpushare.io-")), "{name}");
    let asked = node.api.asked("resourceslices");
    assert!(eventually(SOON, || node.api.asked("resourceslices") > asked + 2));
    assert_eq!(node.api.slices().len(), 2, "it is made once: {:?}", node.api.slices());
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn gpus_that_nvlink_connects_have_one_group() {
    if !met(NEEDS) {
        return;
    }
    let linked = SimulatedNode::with(4, MODEL, "80GiB", &["--nvlink", "0,2", "--nvlink", "2,3"]);
    let node = ClusterNode::on(linked, crate::program(), Settings::default());
    let slice = slice(&node);
    let group = |device: usize| slice["spec"]["devices"][device]["attributes"]["nvlinkGroup"].clone();
    let first = json!({"string": "0000:07:00.0"});
    assert_eq!([0, 1, 2, 3].map(group), [first.clone(), Value::Null, first.clone(), first]);
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_slice_changes_its_generation_with_its_content_and_not_without() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(1);
    let first = slice(&node);
    node.start_agent();
    let settings = "[request]\ndefault_memory = \"10%\"\ndefault_cores = \"30%\"\n[quota]\nreserve = \"1GiB\"\nmemory_percent = 150";
    let other = node.node.config_with("other", settings);
    let asked = node.api.asked("resourceslices");
    assert!(eventually(SOON, || node.api.asked("resourceslices") > asked + 1));
    assert_eq!(slice(&node), first, "nothing has changed");
    node.configure(&other);
    let generation = |slice: &Value| slice["spec"]["pool"]["generation"].clone();
    assert!(eventually(SOON, || generation(&slice(&node)) == 1), "{}", slice(&node));
    let memory = slice(&node)["spec"]["devices"][0]["capacity"]["memory"].clone();
    // 79 GiB half over-committed, of which one share has at most what is on the GPU.
    let range = json!({"min": "1Mi", "max": "79Gi"});
    assert_eq!(
        memory,
        json!({"value": "121344Mi", "requestPolicy": {"default": "8Gi", "validRange": range}})
    );
    // Nobody asks to be without the limit that is the node's default.
    let cores = slice(&node)["spec"]["devices"][0]["capacity"]["cores"]["requestPolicy"].clone();
    let range = json!({"min": "1", "max": "100", "step": "1"});
    assert_eq!(cores, json!({"default": "30", "validRange": range}));
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn kubelet_learns_the_drivers_name_and_socket_also_while_the_api_server_is_away() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(1);
    node.api.set_away(true);
    node.start_agent();
    let info = node.kubelet.driver().expect("it answers");
    assert_eq!((info.kind.as_str(), info.name.as_str()), ("DRAPlugin", "gpu.gpushare.io"));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin"]);
    assert_eq!(info.endpoint, node.kubelet.root.join("plugins/gpu.gpushare.io/dra.sock").to_string_lossy());
    node.api.set_away(false);
    let _ = slice(&node);
    assert!(node.end_agent(), "it ends in order");
}

/// The devices that a slice has, each with the keys of its taints.
fn tainted(node: &ClusterNode) -> Vec<(String, Vec<String>)> {
    let slice = slice(node);
    let text = |value: &Value| value.as_str().expect("it is text").to_owned();
    let keys = |device: &Value| {
        let taints = device["taints"].as_array().into_iter().flatten();
        taints
            .inspect(|taint| assert_eq!(taint["effect"], "NoSchedule"))
            .map(|taint| text(&taint["key"]))
            .collect()
    };
    let devices = slice["spec"]["devices"].as_array().into_iter().flatten();
    devices.map(|device| (text(&device["name"]), keys(device))).collect()
}

const LOST: &str = "gpu.gpushare.io/out-of-service";

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_gpu_that_is_lost_stays_in_the_slice_with_a_taint_until_it_is_back() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(2);
    let before = slice(&node)["spec"]["devices"].clone();
    let all = |taints: &[&str]| -> Vec<(String, Vec<String>)> {
        let taints: Vec<String> = taints.iter().map(|key| (*key).to_owned()).collect();
        let devices = before.as_array().expect("it is a list").iter();
        devices.map(|device| (device["name"].as_str().expect("a name").to_owned(), taints.clone())).collect()
    };
    let driver = node.node.proc_driver();
    std::fs::rename(&driver, driver.with_extension("gone")).expect("the module can be unloaded");
    assert!(eventually(SOON, || tainted(&node) == all(&[LOST])), "{}", slice(&node));
    let lost = slice(&node);
    assert_eq!(lost["spec"]["devices"][0]["attributes"], before[0]["attributes"]);
    // A new agent keeps to it, and writes nothing anew.
    node.kill_agent();
    node.start_agent();
    let asked = node.api.asked("resourceslices");
    assert!(eventually(SOON, || node.api.asked("resourceslices") > asked + 1));
    assert_eq!(slice(&node), lost);
    std::fs::rename(driver.with_extension("gone"), &driver).expect("the module can be loaded");
    assert!(eventually(SOON, || slice(&node)["spec"]["devices"] == before), "{}", slice(&node));
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_gpu_that_is_lost_leaves_the_slice_where_the_api_server_drops_taints() {
    if !met(NEEDS) {
        return;
    }
    let node = crate::node(2);
    node.api.drop_taints();
    let both = tainted(&node);
    let folders = std::fs::read_dir(node.node.proc_driver().join("gpus")).expect("it can be read");
    let mut folders: Vec<_> = folders.map(|entry| entry.expect("an entry").path()).collect();
    folders.sort();
    let information = folders[1].join("information");
    let whole = std::fs::read(&information).expect("it can be read");
    std::fs::write(&information, "").expect("the GPU can fall off the bus");
    assert!(eventually(SOON, || tainted(&node) == both[..1]), "{}", slice(&node));
    let asked = node.api.asked("resourceslices");
    let settled = slice(&node);
    assert!(eventually(SOON, || node.api.asked("resourceslices") > asked + 2));
    assert_eq!(slice(&node), settled, "nothing is written again and again");
    std::fs::write(&information, whole).expect("it comes back");
    assert!(eventually(SOON, || tainted(&node) == both), "{}", slice(&node));
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn a_gpu_that_the_changed_settings_cordon_gets_a_taint_and_no_container() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(2);
    let gpus = node.gpus();
    let (open, pid) = (tainted(&node), node.pid());
    let settings = std::fs::read_to_string(node.config()).expect("it can be read");
    let write =
        |node: &ClusterNode, text: &str| std::fs::write(node.config(), text).expect("it can be written");
    // Mistaken settings change nothing.
    write(&node, &format!("{settings}\n[quota]\ncordoned = [\"GPU-1\"]\n"));
    let asked = node.api.asked("resourceslices");
    assert!(eventually(SOON, || node.api.asked("resourceslices") > asked + 2));
    assert_eq!(tainted(&node), open);
    write(&node, &format!("{settings}\n[quota]\ncordoned = [{:?}]\n", gpus[0]));
    let wanted = || {
        let mut wanted = open.clone();
        wanted[0].1 = vec!["gpu.gpushare.io/cordoned".to_owned()];
        tainted(&node) == wanted
    };
    assert!(eventually(SOON, wanted), "{}", slice(&node));
    assert!(eventually(SOON, || node.kubelet.driver().is_ok()), "kubelet finds the driver again");
    // Whom the scheduler placed there all the same tolerates the taint.
    let uid = "0b5c1f6e-8e0f-4c7d-9a51-3f6f2b8f1a10";
    node.api.claim("tolerant", uid, &[node.share("gpu", 0, "30Gi", "0")], &[]);
    node.kubelet.prepare("tolerant", uid).expect("it fits");
    let told = cli(node.config(), &["devices"]).expect_success("gpushare devices").stdout;
    assert!(told.lines().any(|line| line.contains("cordoned") && line.contains(&gpus[0])), "{told}");
    assert_eq!(node.pid(), pid);
    assert!(node.end_agent(), "it ends in order");
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn prometheus_reads_what_the_agent_did() {
    if !met(NEEDS) {
        return;
    }
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port is free");
    let mut node = crate::node(2);
    node.settings.metrics = Some(port);
    node.start_agent();
    let uid = "0b5c1f6e-8e0f-4c7d-9a51-3f6f2b8f1a10";
    node.api.claim("training", uid, &[node.share("gpu", 0, "30Gi", "0")], &[]);
    node.kubelet.prepare("training", uid).expect("it fits");
    node.kubelet.prepare("missing", "another").expect_err("there is no such claim");
    let answer = |path: &str| {
        let mut stream = TcpStream::connect(port).expect("the agent listens");
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: it\r\n\r\n").as_bytes()).expect("it is sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it is answered, and closed");
        text
    };
    let has = |line: &str| answer("/metrics").lines().any(|told| told == line);
    for line in [
        "gpushare_agent_claims_prepared_total{result=\"done\"} 1",
        "gpushare_agent_claims_prepared_total{result=\"refused\"} 1",
        "gpushare_agent_prepare_seconds_count 2",
        "gpushare_agent_gpus 2",
        "gpushare_agent_claims 1",
    ] {
        assert!(eventually(SOON, || has(line)), "{line}: {}", answer("/metrics"));
    }
    assert!(answer("/").starts_with("HTTP/1.1 404"), "{}", answer("/"));
}

#[test]
#[ignore = "needs root: keeps a quota store"]
fn kubelet_hears_which_gpus_work_until_the_agent_ends() {
    if !met(NEEDS) {
        return;
    }
    let mut node = crate::node(2);
    let _ = slice(&node);
    let names: Vec<String> = node.gpus().iter().map(|uuid| uuid.to_lowercase()).collect();
    let gpus = node.node.proc_driver().join("gpus");
    let mut folders: Vec<_> = std::fs::read_dir(&gpus)
        .expect("it can be read")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    folders.sort();
    let information = folders[1].join("information");
    let whole = std::fs::read(&information).expect("it can be read");
    let mut seen = Vec::new();
    let hears = |node: &ClusterNode, seen: &mut Vec<Vec<(String, i32, String)>>, want: [i32; 2]| {
        node.kubelet.watch_health(|report| {
            let states: Vec<i32> = names
                .iter()
                .filter_map(|name| report.iter().find(|(its, ..)| its == name).map(|(_, state, _)| *state))
                .collect();
            seen.push(report);
            states == want || seen.len() > 50
        })
    };
    hears(&node, &mut seen, [1, 1]).expect("the driver tells");
    assert!(seen.iter().flatten().all(|(_, _, why)| why.is_empty()), "{seen:?}");
    std::fs::write(&information, "").expect("the GPU can fall off the bus");
    hears(&node, &mut seen, [1, 2]).expect("the driver tells");
    let last = seen.last().expect("there is one");
    assert!(last.iter().any(|(_, state, why)| *state == 2 && why.contains("Device Minor")), "{last:?}");
    std::fs::write(&information, whole).expect("it comes back");
    hears(&node, &mut seen, [1, 1]).expect("the driver tells");
    assert!(seen.len() < 50, "{seen:?}");

    // A stream that is open does not keep the agent from its end.
    let kubelet = node.kubelet.clone();
    std::thread::scope(|scope| {
        let (first, came) = std::sync::mpsc::channel();
        let watching = scope.spawn(move || kubelet.watch_health(|_| first.send(()).is_err()));
        came.recv().expect("the driver tells");
        assert!(node.end_agent(), "it ends in order");
        let _ = watching.join().expect("the stream ends");
    });
}
