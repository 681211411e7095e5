//! Pods that a real kubelet runs: from the scheduler to the container's own view, and back.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use gpushare_tests::artifacts::{cli, helm};
use gpushare_tests::cluster::kubelet::NODE;
use gpushare_tests::cluster::programs;
use gpushare_tests::command::{self, eventually};
use gpushare_tests::image::IMAGE;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use serde_json::{Value, json};

use crate::control_plane::ControlPlane;
use crate::worker::{DEVICE_PLUGINS, Worker, shows, states};
use crate::{CLAIMS, PODS, claim, example, uid, why};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::Kubelet];
/// How long a pod may take until its containers run or have ended.
const SOON: Duration = Duration::from_secs(60);

/// A cluster of one node with `gpus` GPUs of 80 GiB; `None` where no programs are named.
fn cluster(gpus: usize, settings: &str) -> Option<(ControlPlane, Worker)> {
    if !met(NEEDS) {
        return None;
    }
    let folder = programs()?;
    let cluster = crate::control_plane(&folder);
    let class = include_str!("../../../packaging/runtimeclass.yaml");
    let class: Value = serde_saphyr::from_str(class).expect("it is YAML");
    cluster.post("/apis/node.k8s.io/v1/runtimeclasses", &class);
    let worker = Worker::start(&cluster, &folder, gpus, settings);
    Some((cluster, worker))
}

/// Changes a pod so that this machine can run it: on the node's network, from the image that is there, with
/// containers that print what they see of the GPU, allocate `sizes`, and stay.
fn on_this_machine(pod: &Value, sizes: &[&str]) -> Value {
    let mut pod = pod.clone();
    pod["spec"]["hostNetwork"] = json!(true);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(1);
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    let sizes: String = sizes.iter().map(|size| format!(" --allocate {size}")).collect();
    let script = format!("/bin/gpushare-simulator probe --json{sizes}; exec sleep 1000");
    for container in pod["spec"]["containers"].as_array_mut().expect("a pod has containers") {
        container["image"] = json!(IMAGE);
        container["imagePullPolicy"] = json!("Never");
        container["command"] = json!(["/bin/sh", "-c", script]);
    }
    pod
}

fn object(cluster: &ControlPlane, pod: &str) -> Value {
    cluster.get(&format!("{PODS}/{pod}"))
}

/// Waits until all containers of the pod run.
fn assert_runs(cluster: &ControlPlane, worker: &Worker, pod: &str) {
    let runs = || {
        let states = states(&object(cluster, pod));
        !states.is_empty() && states.iter().all(|(_, state)| !state["running"].is_null())
    };
    let said =
        || format!("{pod}: {} {}\n{}", why(cluster, pod), object(cluster, pod)["status"], worker.logs());
    assert!(eventually(SOON, runs), "{}", said());
}

/// What the container saw.
fn report(cluster: &ControlPlane, worker: &Worker, pod: &str, container: &str) -> Report {
    let uid = uid(cluster, &format!("{PODS}/{pod}"));
    let printed = || worker.printed(&uid, pod, container);
    assert!(eventually(SOON, || printed().contains('}')), "{pod}: {:?}\n{}", printed(), worker.logs());
    Report::parse(&printed())
}

#[test]
#[ignore = "needs root, and Kubernetes' programs with kubelet in KUBE_BIN"]
fn a_real_kubelet_runs_what_fits_and_the_fifth_pod_when_one_has_ended() {
    let Some((cluster, mut worker)) = cluster(2, "[request]\nstrict = true\n") else { return };
    let names = ["a", "b", "c", "d", "e"];
    for name in names {
        cluster.post(CLAIMS, &claim(name, "30Gi"));
        let mut pod = on_this_machine(&crate::pod(name), &["31GiB", "29GiB"]);
        // With the runtime, and without it by the hooks of the claim's CDI file.
        if matches!(name, "a" | "c" | "e") {
            pod["spec"]["runtimeClassName"] = json!("gpushare");
        }
        cluster.post(PODS, &pod);
        if name != "e" {
            assert_runs(&cluster, &worker, name);
        }
    }
    for name in &names[..4] {
        let report = report(&cluster, &worker, name, "main");
        report.assert_size(30 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{name}");
    }
    assert_eq!(worker.held(), [30 * GIB; 4]);
    let waits = || why(&cluster, "e").contains("cannot allocate all claims");
    assert!(eventually(SOON, waits), "{}", why(&cluster, "e"));
    // Neither kubelet's death nor its return takes or gives anything.
    worker.kill_kubelet();
    assert_eq!(worker.held(), [30 * GIB; 4]);
    worker.start_kubelet(&cluster);
    assert_runs(&cluster, &worker, "a");
    assert_eq!(worker.held(), [30 * GIB; 4]);
    cluster.end(&format!("{PODS}/b"));
    cluster.end(&format!("{CLAIMS}/b"));
    let is_gone = || cluster.try_call("GET", &format!("{PODS}/b"), None).is_err();
    assert!(eventually(SOON, is_gone), "{}", object(&cluster, "b"));
    let ended = Instant::now();
    assert_runs(&cluster, &worker, "e");
    println!("the fifth pod runs {:?} after another one ended", ended.elapsed());
    report(&cluster, &worker, "e", "main").assert_size(30 * GIB);
    for name in ["a", "c", "d", "e"] {
        cluster.delete(&format!("{PODS}/{name}"));
    }
    worker.assert_empty();
}

#[test]
#[ignore = "needs root, and Kubernetes' programs with kubelet in KUBE_BIN"]
fn a_real_kubelet_runs_the_examples_and_tells_of_a_gpu_that_fails() {
    let Some((cluster, worker)) = cluster(3, "") else { return };
    for file in ["claim-template", "shared-claim", "two-gpus", "extended-resource"] {
        example(&cluster, file, |pod| on_this_machine(pod, &[]));
    }
    for (pod, containers, memory, devices) in [
        ("training", &["main"][..], 30, &[1][..]),
        ("pair", &["server", "worker"], 30, &[1, 1]),
        ("two-gpus", &["both", "one"], 20, &[2, 1]),
        ("default-share", &["main"], 20, &[1]),
    ] {
        assert_runs(&cluster, &worker, pod);
        for (container, devices) in containers.iter().zip(devices) {
            let report = report(&cluster, &worker, pod, container);
            report.assert_size(memory * GIB);
            assert_eq!(report.number("devices"), *devices, "{pod} {container}");
        }
    }
    assert_eq!(worker.left().0, 4, "the pair holds one");
    // kubelet says in the pod's status that its GPU works, and why it does not any more.
    let health = || {
        let pod = object(&cluster, "training");
        pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0]["resources"][0].clone()
    };
    assert!(eventually(SOON, || health()["health"] == "Healthy"), "{}\n{}", health(), worker.logs());
    fall_off(&worker.node.proc_driver());
    assert!(eventually(SOON, || health()["health"] == "Unhealthy"), "{}\n{}", health(), worker.logs());
    println!("in the pod's status: {}", health());
}

#[test]
#[ignore = "needs root, and Kubernetes' programs with kubelet in KUBE_BIN"]
fn a_real_kubelet_counts_the_device_plugins_resources_of_one_gpu() {
    // What variables and annotations say counts for nothing here: only what kubelet allocated.
    let settings = "[request]\nstrict = true\nenv_ceiling = \"100%\"\nkubelet = \"refuse\"\ndefault_memory = \"10%\"\n\
                    [kubernetes]\nresources = [\"gpushare.io/gpu-memory\", \"gpushare.io/gpu-core\"]\n";
    if !met(NEEDS) {
        return;
    }
    let Some(folder) = programs() else { return };
    let other = UnixStream::connect(Path::new(DEVICE_PLUGINS).join("kubelet.sock"));
    assert!(other.is_err(), "this machine has a kubelet of its own");
    let cluster = crate::control_plane(&folder);
    let class = include_str!("../../../packaging/runtimeclass.yaml");
    let class: Value = serde_saphyr::from_str(class).expect("it is YAML");
    cluster.post("/apis/node.k8s.io/v1/runtimeclasses", &class);
    let mut worker = Worker::without_agent(&cluster, &folder, 2, settings);
    worker.start_agent(&cluster, &|| {
        let room = cluster.get(&format!("/api/v1/nodes/{NODE}"))["status"]["allocatable"].clone();
        room["gpushare.io/gpu-memory"] == "640" && room["gpushare.io/gpu-core"] == "200"
    });
    let counted = |name: &str, limits: Value| {
        let container = json!({"name": "main", "image": "none", "resources": {"limits": limits}});
        let pod = json!({"metadata": {"name": name}, "spec": {"containers": [container], "runtimeClassName": "gpushare"}});
        on_this_machine(&pod, &["21GiB", "19GiB"])
    };
    let share = json!({"gpushare.io/gpu-memory": "80", "gpushare.io/gpu-core": "30"});
    for name in ["a", "b", "c"] {
        cluster.post(PODS, &counted(name, share.clone()));
        assert_runs(&cluster, &worker, name);
        let report = report(&cluster, &worker, name, "main");
        report.assert_size(20 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{name}");
    }
    // What all GPUs together do not have stays with the scheduler.
    cluster.post(PODS, &counted("large", json!({"gpushare.io/gpu-memory": "600"})));
    assert!(eventually(SOON, || why(&cluster, "large").contains("Insufficient gpushare.io/gpu-memory")));
    println!("the large one: {}", why(&cluster, "large"));
    // kubelet starts anew. The first GPU has the memory of the next pod, and not its compute.
    worker.kill_kubelet();
    worker.start_kubelet(&cluster);
    // Until a plugin has registered again, kubelet rejects pods that ask for its resource.
    assert!(eventually(SOON, || worker.logged("kubelet counts the resource") == 4), "{}", worker.logs());
    cluster.post(PODS, &counted("d", share));
    assert_runs(&cluster, &worker, "d");
    report(&cluster, &worker, "d", "main").assert_size(20 * GIB);
    for name in ["a", "b", "c", "d", "large"] {
        cluster.end(&format!("{PODS}/{name}"));
    }
    worker.assert_empty();
}

/// Changes a pod of the manifests so that this machine can run it: from the image that is there, with the
/// programs as they were built, the worker's paths, `arguments` besides, and a settings file.
fn on_this_node(spec: &mut Value, worker: &Worker, arguments: &[String], config: &Path) {
    spec["nodeName"] = json!(NODE);
    let container = &mut spec["containers"][0];
    container["image"] = json!(IMAGE);
    let root = worker.folder().display().to_string();
    let words = container["command"].as_array().expect("it is a list").iter().filter_map(Value::as_str);
    let words = words.map(|word| match word {
        "/usr/local/bin/gpushare-kube" => worker.agent_program().display().to_string(),
        "/usr/local/bin/gpushare" => cli().display().to_string(),
        // Not every test machine lets root look at its first process.
        other => {
            other.replace("/var/lib/kubelet", &root).replace("/proc/1/", &format!("/proc/{}/", worker.pid()))
        }
    });
    let busybox = std::iter::once("/bin/busybox".to_owned());
    container["command"] = busybox.chain(words).chain(arguments.iter().cloned()).collect();
    let entry = json!({"name": "GPUSHARE_CONFIG", "value": config});
    container["env"].as_array_mut().expect("it is a list").push(entry);
}

/// Makes a pod for the node's label. kubelet sees the label a moment later, and rejects the pod before.
fn is_taken(cluster: &ControlPlane, name: &str, spec: &Value) -> bool {
    let label = json!({"metadata": {"labels": {"gpushare.node-restriction.kubernetes.io/node": "true"}}});
    cluster.try_call("PATCH", &format!("/api/v1/nodes/{NODE}"), Some(&label)).expect("it can be labelled");
    let pods = "/api/v1/namespaces/gpushare/pods";
    let _ = cluster.try_call("DELETE", &format!("{pods}/{name}?gracePeriodSeconds=0"), None);
    let pod = json!({"metadata": {"name": name}, "spec": spec});
    let made = cluster.try_call("POST", pods, Some(&pod)).is_ok();
    let is_rejected = || cluster.get(&format!("{pods}/{name}"))["status"]["phase"] == "Failed";
    made && !eventually(Duration::from_secs(2), is_rejected)
}

#[test]
#[ignore = "needs root, and Kubernetes' programs with kubelet in KUBE_BIN"]
fn the_agents_own_pod_serves_its_node() {
    if !met(NEEDS) {
        return;
    }
    let Some(folder) = programs() else { return };
    let cluster = crate::control_plane(&folder);
    let worker = Worker::without_agent(&cluster, &folder, 1, "");
    let (port, certificate) = cluster.endpoint();
    let account = json!({"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": certificate}});
    cluster.post("/api/v1/namespaces/gpushare/configmaps", &account);
    let manifest = include_str!("../../manifests/node.yaml");
    let manifest: Value = serde_saphyr::from_str(manifest).expect("it is YAML");
    // The pod of the DaemonSet as it is, but for this machine's image and paths.
    let mut spec = manifest["spec"]["template"]["spec"].clone();
    spec["nodeName"] = json!(NODE);
    let (arguments, config) = worker.agent_arguments();
    on_this_node(&mut spec, &worker, &arguments, &config);
    for (name, value) in [("KUBERNETES_SERVICE_HOST", "127.0.0.1"), ("KUBERNETES_SERVICE_PORT", &*port)] {
        let entry = json!({"name": name, "value": value});
        spec["containers"][0]["env"].as_array_mut().expect("it is a list").push(entry);
    }
    let pods = "/api/v1/namespaces/gpushare/pods";
    assert!(
        eventually(SOON, || is_taken(&cluster, "agent", &spec)),
        "kubelet takes no pod of the node's label"
    );
    let said = || {
        let uid = cluster.get(&format!("{pods}/agent"))["metadata"]["uid"].as_str().map(str::to_owned);
        let printed = worker.printed_in("gpushare", &uid.unwrap_or_default(), "agent", "node");
        format!("{}\n{printed}\n{}", cluster.get(&format!("{pods}/agent"))["status"], worker.logs())
    };
    assert!(eventually(SOON, || shows(&cluster, 1)), "{}", said());
    cluster.post(CLAIMS, &claim("a", "30Gi"));
    cluster.post(PODS, &on_this_machine(&crate::pod("a"), &["31GiB", "29GiB"]));
    assert_runs(&cluster, &worker, "a");
    let report = report(&cluster, &worker, "a", "main");
    report.assert_size(30 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    cluster.end(&format!("{PODS}/a"));
    worker.assert_empty();
}

/// Status of the answer to a caller who tells this token.
fn asked(port: u16, token: &str) -> Option<String> {
    let mut caller = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let question = format!(
        "GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
    );
    caller.write_all(question.as_bytes()).ok()?;
    let mut answer = String::new();
    caller.read_to_string(&mut answer).ok()?;
    answer.split(' ').nth(1).map(str::to_owned)
}

#[test]
#[ignore = "needs root, and Kubernetes' programs with kubelet in KUBE_BIN"]
fn the_meters_own_pod_answers_who_knows_the_token_of_its_secret() {
    if !met(NEEDS) || !met(&[Need::Helm]) {
        return;
    }
    let Some(folder) = programs() else { return };
    let cluster = crate::control_plane(&folder);
    let worker = Worker::without_agent(&cluster, &folder, 1, "");
    let token = "of-sixteen-letters-or-more";
    let secret = json!({"metadata": {"name": "figures"}, "stringData": {"token": token}});
    cluster.post("/api/v1/namespaces/gpushare/secrets", &secret);
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = port.expect("a port is free").port();
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("chart");
    let mut run = Command::new(helm());
    run.args(["template", "gpushare"]).arg(chart).args(["--show-only", "templates/meter.yaml"]);
    run.args(["--set", "installer.enabled=false,meter.tokenSecret=figures"]);
    let made = command::run(run.arg("--set").arg(format!("meter.listen=0.0.0.0:{port}")));
    let made = made.expect_success("helm template").stdout;
    let made: Value = serde_saphyr::from_str(made.trim_start_matches("---\n")).expect("it is YAML");
    let mut spec = made["spec"]["template"]["spec"].clone();
    // There is no other network here.
    spec["hostNetwork"] = json!(true);
    on_this_node(&mut spec, &worker, &[], &worker.agent_arguments().1);
    assert!(
        eventually(SOON, || is_taken(&cluster, "meter", &spec)),
        "kubelet takes no pod of the node's label"
    );
    let said = || {
        let pod = cluster.get("/api/v1/namespaces/gpushare/pods/meter");
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
        let printed = worker.printed_in("gpushare", uid, "meter", "meter");
        format!("{}\n{printed}\n{}", pod["status"], worker.logs())
    };
    assert!(eventually(SOON, || asked(port, token).as_deref() == Some("200")), "{}", said());
    assert_eq!(asked(port, "of-other-sixteen-letters").as_deref(), Some("401"));
}

/// All GPUs fall off the bus.
fn fall_off(driver: &Path) {
    for gpu in fs::read_dir(driver.join("gpus")).expect("the driver shows its GPUs") {
        fs::write(gpu.expect("an entry").path().join("information"), "").expect("it can be written");
    }
}

#[test]
#[ignore = "needs root, and Kubernetes' programs with kubelet in KUBE_BIN"]
fn a_real_kubelets_word_stops_who_asks_by_variables_alone() {
    let settings = "[request]\nstrict = true\nenv_ceiling = \"100%\"\nkubelet = \"refuse\"\n";
    let Some((cluster, worker)) = cluster(1, settings) else { return };
    let mut thief = on_this_machine(&crate::pod("thief"), &[]);
    thief["spec"]["resourceClaims"] = Value::Null;
    thief["spec"]["runtimeClassName"] = json!("gpushare");
    thief["spec"]["restartPolicy"] = json!("Never");
    thief["spec"]["containers"][0]["resources"] = Value::Null;
    thief["spec"]["containers"][0]["env"] = json!([
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "GPUSHARE_MEMORY", "value": "60GiB"}]);
    cluster.post(PODS, &thief);
    let message = || {
        let states = states(&object(&cluster, "thief"));
        states.first().map(|(_, state)| state["terminated"]["message"].clone()).unwrap_or_default()
    };
    assert!(eventually(SOON, || message().is_string()), "{}\n{}", object(&cluster, "thief"), worker.logs());
    println!("the thief: {}", message());
    assert!(message().as_str().is_some_and(|text| text.contains("kubelet")), "{}", message());
    assert_eq!(worker.left().0, 0);
    // The pod beside it, with a claim, gets what the scheduler allotted.
    cluster.post(CLAIMS, &claim("honest", "30Gi"));
    let mut honest = on_this_machine(&crate::pod("honest"), &[]);
    honest["spec"]["runtimeClassName"] = json!("gpushare");
    cluster.post(PODS, &honest);
    assert_runs(&cluster, &worker, "honest");
    report(&cluster, &worker, "honest", "main").assert_size(30 * GIB);
}

/// A pod of another system's document: its file below `PEER_MANIFESTS`, what it asks for, and what the
/// document says that its container gets: how many GPUs, and MiB of each.
struct Documented {
    file: &'static str,
    asks: Value,
    gpus: u64,
    mebibytes: u64,
}

fn documented(file: &'static str, asks: Value, gpus: u64, mebibytes: u64) -> Documented {
    Documented { file, asks, gpus, mebibytes }
}

impl Documented {
    /// The pods of the document where `PEER_MANIFESTS` names a folder with it, else one that asks for the
    /// same. They are unchanged but for what [`on_this_machine`] changes.
    fn pods(&self) -> Vec<Value> {
        let folder = std::env::var_os("PEER_MANIFESTS").map(std::path::PathBuf::from);
        let Some(text) = folder.and_then(|folder| fs::read_to_string(folder.join(self.file)).ok()) else {
            let container = json!({"name": "main", "image": "none", "resources": {"limits": self.asks}});
            return vec![json!({"metadata": {}, "spec": {"containers": [container]}})];
        };
        // Some are printed with remarks that no YAML has.
        let text: String = text
            .lines()
            .map(|line| line.split(" //").next().unwrap_or(line))
            .fold(String::new(), |all, line| all + line + "\n");
        let documents = text.split("\n---").map(|text| text.trim_start_matches('-'));
        let objects = documents.filter_map(|text| serde_saphyr::from_str::<Value>(text).ok());
        let pod = |object: Value| match object["kind"].as_str() {
            Some("Pod") => Some(object),
            Some("Deployment" | "StatefulSet" | "Job") => Some(object["spec"]["template"].clone()),
            _ => None,
        };
        let pods: Vec<Value> = objects.filter_map(pod).collect();
        assert!(!pods.is_empty(), "{} has no pod", self.file);
        pods
    }
}

#[test]
#[ignore = "needs root, and Kubernetes' programs with kubelet in KUBE_BIN"]
fn a_real_kubelet_runs_other_systems_pods_with_what_their_documents_say() {
    if !met(NEEDS) {
        return;
    }
    let Some(folder) = programs() else { return };
    if std::env::var_os("PEER_MANIFESTS").is_none() {
        println!(
            "PEER_MANIFESTS names no folder with the systems' own files: pods that ask for the same run"
        );
    }
    let mem = |count: u64| json!({"aliyun.com/gpu-mem": count.to_string()});
    let vcuda = |core: u64, memory: u64| json!({"tencent.com/vcuda-core": core.to_string(), "tencent.com/vcuda-memory": memory.to_string()});
    let hami = |gpus: u64, name: &str, count: u64| json!({"nvidia.com/gpu": gpus, (name): count});
    let systems = [
        (
            "\"aliyun.com/gpu-mem\", \"aliyun.com/gpu-core.percentage\", \"aliyun.com/gpu-count\"",
            vec![
                documented("gpushare/userguide-binpack-1.yaml", mem(3), 1, 3 << 10),
                documented("gpushare/samples-1.yaml", mem(2), 1, 2 << 10),
                documented("gpushare/demo-job.yaml", mem(2), 1, 2 << 10),
                documented("ack/run-sample-binpack.yaml", mem(3), 1, 3 << 10),
            ],
        ),
        (
            "\"tencent.com/vcuda-core\", \"tencent.com/vcuda-memory\"",
            vec![
                documented("gpu-manager/README-vcuda-half.yaml", vcuda(50, 30), 1, 7680),
                documented("gpu-manager/tke-example2.yaml", vcuda(30, 20), 1, 5 << 10),
                documented("gpu-manager/README-vcuda-2cards.yaml", vcuda(200, 60), 2, 80 << 10),
            ],
        ),
        (
            "\"nvidia.com/gpu\", \"nvidia.com/gpumem\", \"nvidia.com/gpumem-percentage\", \"nvidia.com/gpucores\"",
            vec![
                documented("hami/default_use.yaml", hami(1, "nvidia.com/gpumem", 3000), 1, 3000),
                documented("hami/example.yaml", hami(1, "nvidia.com/gpumem", 3000), 1, 3000),
                documented(
                    "hami/use_memory_fraction.yaml",
                    hami(2, "nvidia.com/gpumem-percentage", 50),
                    2,
                    40 << 10,
                ),
                documented(
                    "hami/bench-job-on-hami.yaml",
                    hami(1, "nvidia.com/gpumem-percentage", 50),
                    1,
                    40 << 10,
                ),
            ],
        ),
        (
            "\"elasticgpu.io/gpu-core\", \"elasticgpu.io/gpu-memory\", \"gpushare.io/gpu-slot\"",
            vec![
                documented(
                    "elastic-gpu/sched-pod-gpu-memory-256.yaml",
                    json!({"elasticgpu.io/gpu-memory": "256"}),
                    1,
                    256,
                ),
                documented(
                    "elastic-gpu/sched-pod-gpu-core-200.yaml",
                    json!({"elasticgpu.io/gpu-core": "200"}),
                    2,
                    80 << 10,
                ),
            ],
        ),
    ];
    for (resources, pods) in systems {
        let settings = format!(
            "[request]\nstrict = true\nkubelet = \"refuse\"\ndefault_memory = \"10%\"\n[kubernetes]\nresources = [{resources}]\n"
        );
        let mut cluster = crate::control_plane(&folder);
        let class = include_str!("../../../packaging/runtimeclass.yaml");
        let class: Value = serde_saphyr::from_str(class).expect("it is YAML");
        cluster.post("/apis/node.k8s.io/v1/runtimeclasses", &class);
        let _extender = crate::extender::extend(&mut cluster, &folder, &[]);
        let _webhook = crate::extender::Webhook::start(&cluster);
        let mut worker = Worker::without_agent(&cluster, &folder, 4, &settings);
        let names: Vec<&str> = resources.split(", ").map(|name| name.trim_matches('"')).collect();
        worker.start_agent(&cluster, &|| {
            let room = cluster.get(&format!("/api/v1/nodes/{NODE}"))["status"]["allocatable"].clone();
            let maps = "/api/v1/namespaces/gpushare/configmaps";
            room[names[0]].is_string()
                && cluster.try_call("GET", &format!("{maps}/gpus.{NODE}"), None).is_ok()
        });
        for (number, one) in pods.iter().enumerate() {
            for (part, pod) in one.pods().into_iter().enumerate() {
                let name = format!("p{number}-{part}");
                let mut pod = on_this_machine(&pod, &[]);
                pod["kind"] = json!("Pod");
                pod["apiVersion"] = json!("v1");
                pod["metadata"]["name"] = json!(name);
                // What the documents print without quotes is no text, and no annotation.
                for (_, value) in pod["metadata"]["annotations"].as_object_mut().into_iter().flatten() {
                    if !value.is_string() {
                        *value = json!(value.to_string());
                    }
                }
                for container in pod["spec"]["containers"].as_array_mut().expect("a pod has containers") {
                    container["volumeMounts"] = json!([]);
                    container["args"] = json!([]);
                }
                pod["spec"]["volumes"] = json!([]);
                pod["spec"]["nodeSelector"] = json!({});
                let main = pod["spec"]["containers"][0]["name"].as_str().expect("it has a name").to_owned();
                cluster.post(PODS, &pod);
                assert_runs(&cluster, &worker, &name);
                let report = report(&cluster, &worker, &name, &main);
                assert_eq!(
                    (report.number("nvml_devices"), report.number("nvml_total") >> 20),
                    (one.gpus, one.mebibytes),
                    "{}",
                    one.file
                );
                println!("{}: {} GPU(s), {} MiB each", one.file, one.gpus, one.mebibytes);
                let gone = format!("{PODS}/{name}");
                cluster.end(&gone);
                assert!(
                    eventually(SOON, || cluster.try_call("GET", &gone, None).is_err()),
                    "{name} does not end"
                );
            }
        }
        worker.assert_empty();
    }
}
