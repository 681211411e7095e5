//! `gpushare-kube node` under Kubernetes' own API server and scheduler, on a simulated node. `KUBE_BIN` names
//! the folder of their programs; few machines have them.

mod chart;
mod control_plane;
mod extender;
mod pages;
mod real_node;
mod worker;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use gpushare_tests::artifacts::{checkout, kubectl};
use gpushare_tests::bundle::Bundle;
use gpushare_tests::cluster::kubelet::{NODE, in_pod};
use gpushare_tests::cluster::{ClusterNode, Settings, programs};
use gpushare_tests::command::{self, eventually};
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};
use serde_json::{Value, json};

use control_plane::{ControlPlane, GROUP};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::Kubernetes];
const SOON: Duration = Duration::from_secs(20);
const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims";
const PODS: &str = "/api/v1/namespaces/team/pods";

/// A cluster with one node of `gpus` GPUs of 80 GiB, and the node's runtime; `None` where no programs are
/// named.
fn cluster(gpus: usize, is_strict: bool) -> Option<(ControlPlane, ClusterNode, Runtime)> {
    if !met(NEEDS) {
        return None;
    }
    let cluster = control_plane(&programs()?);
    cluster.add_node();
    let settings = Settings { kubeconfig: Some(cluster.kubeconfig_of_agent()), ..Settings::default() };
    let mut node = ClusterNode::start(Path::new(env!("CARGO_BIN_EXE_gpushare-kube")), gpus, settings);
    let policy = format!("[request]\nstrict = {is_strict}\nenv_ceiling = \"100%\"\nkubelet = \"refuse\"\n");
    let config = node.node.config_with("cluster", &format!("{}\n{policy}", LowLevel::Runc.settings()));
    node.configure(&config);
    let slices = format!("{GROUP}/resourceslices");
    let shown = || {
        let slices = cluster.get(&slices);
        slices["items"][0]["spec"]["devices"].as_array().is_some_and(|devices| devices.len() == gpus)
    };
    assert!(eventually(SOON, shown), "{}", cluster.get(&slices));
    let runtime = Runtime::with_config(LowLevel::Runc, &config).in_view(LowLevel::Runc.view());
    Some((cluster, node, runtime))
}

/// A cluster with what is applied once, and a namespace of a team.
fn control_plane(programs: &Path) -> ControlPlane {
    let cluster = ControlPlane::start(programs);
    for file in ["namespace", "rbac", "policy", "device-class"] {
        apply(&cluster, &format!("{file}.yaml"));
    }
    cluster.post("/api/v1/namespaces", &json!({"metadata": {"name": "team"}}));
    cluster
}

/// Makes the objects of one of the manifests, as `kubectl apply` does.
fn apply(cluster: &ControlPlane, file: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests").join(file);
    let text = fs::read_to_string(&path).expect("it can be read");
    for document in text.split("\n---\n") {
        let object: Value = serde_saphyr::from_str(document).expect("it is YAML");
        cluster.post(&collection(&object), &object);
    }
}

/// The path of the collection that an object belongs to.
fn collection(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]).to_lowercase());
    let root = if version == "v1" { "/api/v1".to_owned() } else { format!("/apis/{version}") };
    let plural = match kind.strip_suffix('y') {
        Some(stem) => format!("{stem}ies"),
        None if kind.ends_with('s') => format!("{kind}es"),
        None => format!("{kind}s"),
    };
    match object["metadata"]["namespace"].as_str() {
        Some(namespace) => format!("{root}/namespaces/{namespace}/{plural}"),
        None => format!("{root}/{plural}"),
    }
}

/// A claim for `memory` on one GPU.
fn claim(name: &str, memory: &str) -> Value {
    let capacity = json!({"requests": {"memory": memory}});
    let exactly = json!({"deviceClassName": "gpu.gpushare.io", "capacity": capacity});
    json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}})
}

/// A pod of the claim of its own name.
fn pod(name: &str) -> Value {
    let container = json!({"name": "main", "image": "none", "resources": {"claims": [{"name": "share"}]}});
    let claims = json!([{"name": "share", "resourceClaimName": name}]);
    json!({"metadata": {"name": name}, "spec": {"containers": [container], "resourceClaims": claims}})
}

/// Whether the scheduler has bound the pod to the node.
fn is_bound(cluster: &ControlPlane, name: &str) -> bool {
    cluster.get(&format!("{PODS}/{name}"))["spec"]["nodeName"] == NODE
}

/// What `kubectl gpushare` prints to the administrator.
fn plugin(cluster: &ControlPlane, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpushare-kube"));
    command.arg0("kubectl-gpushare").args(arguments).env("KUBECONFIG", cluster.kubeconfig());
    command::run(&mut command).expect_success("kubectl gpushare").stdout
}

/// What the scheduler says of a pod.
fn why(cluster: &ControlPlane, name: &str) -> String {
    let pod = cluster.get(&format!("{PODS}/{name}"));
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().filter_map(|it| it["message"].as_str()).collect::<Vec<_>>().join("; ")
}

/// The UID of an object.
fn uid(cluster: &ControlPlane, path: &str) -> String {
    cluster.get(path)["metadata"]["uid"].as_str().expect("it has one").to_owned()
}

/// The container `main` of a pod, as the engine writes its bundle.
fn container_of(cluster: &ControlPlane, pod: &str) -> Bundle {
    let uid = uid(cluster, &format!("{PODS}/{pod}"));
    in_pod(Bundle::with_probe(), pod, "team").annotation("io.kubernetes.cri.sandbox-uid", &uid)
}

/// Has kubelet prepare a claim, and returns its UID.
fn prepare(cluster: &ControlPlane, node: &ClusterNode, claim: &str) -> String {
    let uid = uid(cluster, &format!("{CLAIMS}/{claim}"));
    node.kubelet.prepare(claim, &uid).unwrap_or_else(|why| panic!("{claim}: {why}"));
    uid
}

/// The devices that the scheduler allotted to a claim.
fn allotted(cluster: &ControlPlane, claim: &str) -> Vec<String> {
    let claim = cluster.get(&format!("{CLAIMS}/{claim}"));
    let results = claim["status"]["allocation"]["devices"]["results"].as_array().cloned().unwrap_or_default();
    results.iter().map(|result| result["device"].as_str().expect("it has one").to_owned()).collect()
}

#[test]
#[ignore = "needs root, and Kubernetes' programs in KUBE_BIN"]
fn what_does_not_fit_stays_pending_until_there_is_room() {
    let Some((cluster, node, _)) = cluster(2, true) else { return };
    // More than there are bytes to count: the scheduler must not take it for less than nothing.
    cluster.post(CLAIMS, &claim("huge", "8Ei"));
    cluster.post(PODS, &pod("huge"));
    let names = ["a", "b", "c", "d", "e"];
    for name in names {
        cluster.post(CLAIMS, &claim(name, "30Gi"));
        cluster.post(PODS, &pod(name));
        let placed = || is_bound(&cluster, name);
        assert!(name == "e" || eventually(SOON, placed), "{name}: {}", why(&cluster, name));
    }
    let uids: Vec<String> = names[..4].iter().map(|name| prepare(&cluster, &node, name)).collect();
    let mut devices: Vec<String> = names[..4].iter().flat_map(|name| allotted(&cluster, name)).collect();
    devices.sort();
    assert_eq!(
        (devices[0] == devices[1], devices[2] == devices[3]),
        (true, true),
        "two on each: {devices:?}"
    );
    assert_eq!(leases(node.config()).len(), 4);
    assert!(
        eventually(SOON, || why(&cluster, "e").contains("cannot allocate all claims")),
        "{}",
        why(&cluster, "e")
    );
    println!("the fifth: {}", why(&cluster, "e"));
    assert!(!is_bound(&cluster, "e") && !is_bound(&cluster, "huge"));
    let told = plugin(&cluster, &["why", "e", "--namespace", "team"]);
    assert!(told.contains("30 GiB of a GPU, and no GPU has that free: the freest has 20 GiB"), "{told}");
    let gpus: Value = serde_json::from_str(&plugin(&cluster, &["gpus", "--json"])).expect("it is JSON");
    let given: Vec<_> =
        gpus.as_array().expect("a list").iter().map(|gpu| &gpu["memory_given_bytes"]).collect();
    assert_eq!(given, [60 * GIB, 60 * GIB]);
    let shares = plugin(&cluster, &["shares", "--namespace", "team"]);
    assert_eq!(shares.lines().count(), 5, "{shares}");
    // One ends.
    node.kubelet.unprepare("b", &uids[1]).expect("it is given back");
    cluster.delete(&format!("{PODS}/b"));
    cluster.delete(&format!("{CLAIMS}/b"));
    let ended = Instant::now();
    assert!(eventually(Duration::from_secs(5), || is_bound(&cluster, "e")), "{}", why(&cluster, "e"));
    println!("bound after {:?}", ended.elapsed());
    prepare(&cluster, &node, "e");
    let held: u64 = leases(node.config()).iter().flat_map(|lease| lease.memory.clone()).sum();
    assert_eq!(held, 120 * GIB);
}

#[test]
#[ignore = "needs root, and Kubernetes' programs in KUBE_BIN"]
fn nothing_new_is_placed_on_a_gpu_that_is_cordoned_or_out_of_service() {
    let Some((cluster, node, _)) = cluster(2, true) else { return };
    let gpus: Vec<String> = node.gpus().iter().map(|uuid| uuid.to_lowercase()).collect();
    let settings = fs::read_to_string(node.config()).expect("it can be read");
    let cordon = |list: &str| {
        let text = format!("{settings}\n[quota]\ncordoned = [{list}]\n");
        fs::write(node.config(), text).expect("it can be written");
    };
    let shows = |want: [&str; 2]| {
        let gpus: Value = serde_json::from_str(&plugin(&cluster, &["gpus", "--json"])).expect("it is JSON");
        let taints: Vec<&str> = gpus
            .as_array()
            .expect("a list")
            .iter()
            .map(|gpu| gpu["taints"][0].as_str().unwrap_or_default())
            .collect();
        taints == want
    };
    cordon(&format!("{:?}", node.gpus()[0]));
    assert!(eventually(SOON, || shows(["gpu.gpushare.io/cordoned", ""])), "{}", plugin(&cluster, &["gpus"]));
    for name in ["a", "b"] {
        cluster.post(CLAIMS, &claim(name, "50Gi"));
        cluster.post(PODS, &pod(name));
    }
    let bound = || ["a", "b"].into_iter().filter(|name| is_bound(&cluster, name)).collect::<Vec<_>>();
    assert!(eventually(SOON, || bound().len() == 1), "{}", why(&cluster, "a"));
    let (first, waits) = if bound() == ["a"] { ("a", "b") } else { ("b", "a") };
    assert_eq!(allotted(&cluster, first), [gpus[1].clone()]);
    prepare(&cluster, &node, first);
    assert!(eventually(SOON, || why(&cluster, waits).contains("cannot allocate all claims")));
    println!("beside a cordoned GPU: {}", why(&cluster, waits));
    let told = plugin(&cluster, &["why", waits, "--namespace", "team"]);
    assert!(told.contains("1 more are not open for new shares"), "{told}");
    // The GPU with the share falls off the bus; the other one is opened.
    let mut folders: Vec<_> = fs::read_dir(node.node.proc_driver().join("gpus"))
        .expect("it can be read")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    folders.sort();
    fs::write(folders[1].join("information"), "").expect("it can fall off");
    assert!(
        eventually(SOON, || shows(["gpu.gpushare.io/cordoned", "gpu.gpushare.io/out-of-service"])),
        "{}",
        plugin(&cluster, &["gpus"])
    );
    assert!(!is_bound(&cluster, waits));
    cordon("");
    assert!(eventually(SOON, || is_bound(&cluster, waits)), "{}", why(&cluster, waits));
    assert_eq!(allotted(&cluster, waits), [gpus[0].clone()]);
    prepare(&cluster, &node, waits);
    assert!(shows(["", "gpu.gpushare.io/out-of-service"]), "{}", plugin(&cluster, &["gpus"]));
}

#[test]
#[ignore = "needs root, and Kubernetes' programs in KUBE_BIN"]
fn an_agents_token_writes_nothing_of_another_node() {
    if !met(NEEDS) {
        return;
    }
    let Some(folder) = programs() else { return };
    let cluster = control_plane(&folder);
    cluster.add_node();
    let agent = cluster.as_agent();
    let slice = |name: &str, node: &str| {
        let pool = json!({"name": node, "generation": 1, "resourceSliceCount": 1});
        let spec = json!({"driver": "gpu.gpushare.io", "nodeName": node, "pool": pool, "devices": []});
        json!({"metadata": {"name": name}, "spec": spec})
    };
    let event = |name: &str, node: &str| {
        json!({"metadata": {"name": name, "namespace": "team"}, "reason": "GpuShareResized", "type": "Normal",
            "involvedObject": {"kind": "Pod", "namespace": "team", "name": "web"}, "reportingInstance": node,
            "reportingComponent": "gpushare-kube", "action": "Resize"})
    };
    let (slices, events) = (format!("{GROUP}/resourceslices"), "/api/v1/namespaces/team/events".to_owned());
    // Policies take hold a moment after they are made.
    let refused = |path: &str, object: &Value| {
        let told = || cluster.call_by(&agent, "POST", path, Some(object)).err().unwrap_or_default();
        eventually(SOON, || told().contains("this token writes"))
    };
    assert!(refused(&slices, &slice("node-b-gpu.gpushare.io", NODE)), "the name of another node's slice");
    assert!(refused(&slices, &slice("node-a-gpu.gpushare.io", "node-b")), "another node's slice");
    assert!(refused(&events, &event("theirs", "node-b")), "another node's event");
    let maps = "/api/v1/namespaces/gpushare/configmaps".to_owned();
    let map = |name: &str| json!({"metadata": {"name": name}, "data": {}});
    assert!(refused(&maps, &map("gpus.node-b")), "what another node tells of its GPUs");
    assert!(refused(&maps, &map("kube-root-ca.crt")), "any other ConfigMap");
    cluster.call_by(&agent, "POST", &maps, Some(&map("gpus.node-a"))).expect("its own is made");
    cluster.post(&maps, &map("gpus.node-c"));
    let told = cluster.call_by(&agent, "DELETE", &format!("{maps}/gpus.node-c"), None);
    assert!(told.expect_err("it is another's").contains("this token writes"));
    for (path, object) in [(&slices, slice("node-a-gpu.gpushare.io-1", NODE)), (&events, event("own", NODE))]
    {
        cluster.call_by(&agent, "POST", path, Some(&object)).unwrap_or_else(|why| panic!("{path}: {why}"));
    }
    cluster.post(&events, &event("kubelets", "node-b"));
    let change = json!({"metadata": {"name": "kubelets"}, "message": "forged", "reportingInstance": NODE});
    let told = cluster.call_by(&agent, "PATCH", &format!("{events}/kubelets"), Some(&change));
    assert!(told.expect_err("it is another's").contains("this token writes"));
}

#[test]
#[ignore = "needs root, and Kubernetes' programs in KUBE_BIN"]
fn kubectl_and_the_api_server_know_every_field_of_the_manifests() {
    if !met(&[Need::Kubernetes, Need::Kubectl]) {
        return;
    }
    let Some(folder) = programs() else { return };
    let cluster = ControlPlane::start(&folder);
    let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests");
    let apply = |arguments: &[&str]| {
        let mut command = Command::new(kubectl());
        command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(["apply", "--validate=strict"]);
        command::run(command.args(arguments)).expect_success("kubectl apply")
    };
    let manifests = manifests.to_string_lossy().into_owned();
    let applied = apply(&["-k", &manifests]);
    assert!(applied.stdout.contains("daemonset.apps/gpushare-node created"), "{}", applied.stdout);
    let class = format!("{}/packaging/runtimeclass.yaml", checkout().display());
    let _ = apply(&["-f", &class]);
    let examples = apply(&["--dry-run=server", "-f", &format!("{manifests}/examples")]);
    assert!(examples.stdout.lines().count() >= 17, "{}", examples.stdout);
    assert_eq!(examples.stderr, "", "no warning either");
    // The webhook last: nothing answers for it here.
    for (folder, made) in [
        ("image", "daemonset.apps/gpushare-installer created"),
        ("extender", "deployment.apps/gpushare-scheduler"),
        ("extender/own", "rolebinding.rbac.authorization.k8s.io/gpushare-scheduler-own "),
        ("webhook", "deployment.apps/gpushare-webhook"),
    ] {
        let applied = apply(&["-k", &format!("{manifests}/{folder}")]);
        assert!(applied.stdout.contains(made), "{}", applied.stdout);
        assert_eq!(applied.stderr, "", "no warning");
    }
}

#[test]
#[ignore = "needs root, and Kubernetes' programs in KUBE_BIN"]
fn the_examples_get_what_they_say() {
    // Three GPUs: the scheduler may fill one before it looks for two.
    let Some((cluster, node, runtime)) = cluster(3, false) else { return };
    let files = ["claim-template", "shared-claim", "two-gpus", "extended-resource"];
    for file in files {
        example(&cluster, file, without_class);
    }
    let pods = ["training", "pair", "two-gpus", "default-share"];
    for name in pods {
        assert!(eventually(SOON, || is_bound(&cluster, name)), "{name}: {}", why(&cluster, name));
    }
    let claims = cluster.get(CLAIMS)["items"].as_array().cloned().unwrap_or_default();
    assert_eq!(claims.len(), 4, "one for each");
    let name_of = |pod: &str| {
        let status = cluster.get(&format!("{PODS}/{pod}"))["status"].clone();
        let made = &status["resourceClaimStatuses"][0]["resourceClaimName"];
        let made =
            if made.is_null() { &status["extendedResourceClaimStatus"]["resourceClaimName"] } else { made };
        made.as_str().unwrap_or("together").to_owned()
    };
    for (pod, devices, memory) in
        [("training", 1, 30), ("pair", 1, 30), ("two-gpus", 2, 20), ("default-share", 1, 20)]
    {
        let claim = name_of(pod);
        let prepared = node.kubelet.prepare(&claim, &uid(&cluster, &format!("{CLAIMS}/{claim}")));
        let prepared = prepared.unwrap_or_else(|why| panic!("{pod}: {why}"));
        let mut on = allotted(&cluster, &claim);
        on.sort();
        on.dedup();
        assert_eq!((prepared.len(), on.len()), (devices, devices), "{pod}");
        let its_uid = uid(&cluster, &format!("{PODS}/{pod}"));
        let bundle = node.kubelet.bundle(Bundle::with_probe(), pod, &prepared, false);
        let bundle = bundle.annotation("io.kubernetes.cri.sandbox-uid", &its_uid);
        let container = runtime.run(&bundle);
        let report = Report::of(&container, &[&format!("{}GiB", memory + 1), &format!("{}GiB", memory - 1)]);
        report.assert_size(memory * GIB);
        assert_eq!(report.number("devices"), devices as u64, "{pod}");
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{pod}");
    }
}

#[test]
#[ignore = "needs root, and Kubernetes' programs in KUBE_BIN"]
fn living_shares_follow_annotations_and_events_say_so() {
    let Some((cluster, node, runtime)) = cluster(1, false) else { return };
    cluster.post(CLAIMS, &claim("a", "30Gi"));
    cluster.post(PODS, &pod("a"));
    assert!(eventually(SOON, || is_bound(&cluster, "a")), "{}", why(&cluster, "a"));
    prepare(&cluster, &node, "a");
    // Another one asks by its annotation alone.
    let mut plain = pod("plain");
    plain["metadata"]["annotations"] = json!({"gpushare.io/memory": "4GiB"});
    plain["spec"]["resourceClaims"] = Value::Null;
    plain["spec"]["containers"][0]["resources"] = Value::Null;
    cluster.post(PODS, &plain);
    assert!(eventually(SOON, || is_bound(&cluster, "plain")), "{}", why(&cluster, "plain"));
    let bundle = container_of(&cluster, "plain").annotation("gpushare.io/memory", "4GiB");
    let container = runtime.run(&bundle);
    Report::of(&container, &[]).assert_size(4 * GIB);
    let held = || -> Vec<u64> {
        leases(node.config()).iter().flat_map(|lease| lease.memory.iter().map(|bytes| bytes / GIB)).collect()
    };
    let told = |name: &str| -> Vec<(String, u64)> {
        let events = cluster.get("/api/v1/namespaces/team/events")["items"].as_array().cloned();
        let ours = events.unwrap_or_default().into_iter().filter(|it| {
            it["source"]["component"] == "gpushare-kube" && it["involvedObject"]["name"] == name
        });
        ours.map(|it| {
            let reason = it["reason"].as_str().unwrap_or_default().to_owned();
            (reason, it["count"].as_u64().unwrap_or(0))
        })
        .collect()
    };
    for (number, (of_claim, of_pod)) in (1..).zip([(20, 6), (25, 5)]) {
        let memory = |gib: u64| json!({"gpushare.io/memory": format!("{gib}GiB")});
        cluster.annotate(&format!("{CLAIMS}/a"), &memory(of_claim));
        cluster.annotate(&format!("{PODS}/plain"), &memory(of_pod));
        assert!(eventually(SOON, || held() == [of_claim, of_pod]), "{:?}", held());
        let resized = vec![("GpuShareResized".to_owned(), number)];
        for name in ["a", "plain"] {
            assert!(eventually(SOON, || told(name) == resized), "{name}: {:?}", told(name));
        }
    }
    Report::of(&container, &[]).assert_size(5 * GIB);
    cluster.annotate(&format!("{CLAIMS}/a"), &json!({"gpushare.io/memory": "31GiB"}));
    let is_refused = || told("a").contains(&("GpuShareNotResized".to_owned(), 1));
    assert!(eventually(SOON, is_refused), "{:?}", told("a"));
    assert_eq!(held(), [25, 5]);
}

#[test]
#[ignore = "needs root, and Kubernetes' programs in KUBE_BIN"]
fn a_share_of_another_driver_is_held_and_a_pod_without_any_gets_nothing() {
    let Some((cluster, node, runtime)) = cluster(1, true) else { return };
    let class = json!({"metadata": {"name": "gpu.nvidia.com"},
        "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}]}});
    cluster.post(&format!("{GROUP}/deviceclasses"), &class);
    let memory = json!({"value": "80Gi", "requestPolicy": {"default": "1Mi", "validRange": {"min": "1Mi", "step": "1Mi"}}});
    let device = json!({"name": "gpu-0", "allowMultipleAllocations": true,
        "attributes": {"uuid": {"string": node.gpus()[0]}}, "capacity": {"memory": memory}});
    let pool = json!({"name": NODE, "generation": 1, "resourceSliceCount": 1});
    let spec = json!({"driver": "gpu.nvidia.com", "nodeName": NODE, "pool": pool, "devices": [device]});
    cluster.post(&format!("{GROUP}/resourceslices"), &json!({"metadata": {"name": "nvidias"}, "spec": spec}));
    example(&cluster, "nvidia-share", without_class);
    assert!(eventually(SOON, || is_bound(&cluster, "nvidia-share")), "{}", why(&cluster, "nvidia-share"));
    let bundle = container_of(&cluster, "nvidia-share")
        .env("NVIDIA_VISIBLE_DEVICES", "void")
        .set("/linux/devices", json!([{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]));
    let container = runtime.run(&bundle);
    let report = Report::of(&container, &["31GiB", "29GiB"]);
    report.assert_size(30 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    // A pod that the scheduler gave nothing, and that asks by variables alone.
    let thief =
        json!({"metadata": {"name": "thief"}, "spec": {"containers": [{"name": "main", "image": "none"}]}});
    cluster.post(PODS, &thief);
    assert!(eventually(SOON, || is_bound(&cluster, "thief")));
    let bundle = container_of(&cluster, "thief");
    let bundle = bundle.env("NVIDIA_VISIBLE_DEVICES", "all").env("GPUSHARE_MEMORY", "60GiB");
    let refused = runtime.create(&bundle).expect_err("it has no GPU");
    assert!(refused.line().contains("kubelet allocated none"), "{}", refused.line());
}

/// Makes the objects of an example in the namespace `team`, and its pod with this change.
fn example(cluster: &ControlPlane, file: &str, change: impl Fn(&Value) -> Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/examples").join(format!("{file}.yaml"));
    let text = fs::read_to_string(&path).expect("it can be read");
    for document in text.split("\n---\n") {
        let mut object: Value = serde_saphyr::from_str(document).expect("it is YAML");
        object["metadata"]["namespace"] = json!("team");
        if object["kind"] == "Pod" {
            object = change(&object);
        }
        cluster.post(&collection(&object), &object);
    }
}

/// A pod under the default runtime. The class is a matter of the node, of which a simulated one has none.
fn without_class(pod: &Value) -> Value {
    let mut pod = pod.clone();
    pod["spec"]["runtimeClassName"] = Value::Null;
    pod
}
