//! GPUs counted by resources under Kubernetes' own API server and scheduler, with our extender and webhook.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gpushare_tests::cluster::extender::Extender;
use gpushare_tests::cluster::{OPENSSL, programs};
use gpushare_tests::command::eventually;
use gpushare_tests::needs::{Need, met};
use serde_json::{Value, json};

use crate::control_plane::ControlPlane;
use crate::{PODS, why};

const GIB: u64 = 1 << 30;
const PROGRAM: &str = env!("CARGO_BIN_EXE_gpushare-kube");
const SOON: Duration = Duration::from_secs(30);

/// A cluster with our extender, whose kube-scheduler is called `gpushare-scheduler`.
fn cluster(arguments: &[&str]) -> Option<(ControlPlane, Extender)> {
    if !met(&[Need::Kubernetes]) {
        return None;
    }
    let folder = programs()?;
    let mut cluster = crate::control_plane(&folder);
    let extender = extend(&mut cluster, &folder, arguments);
    Some((cluster, extender))
}

/// Gives the cluster our extender, whose kube-scheduler is called `gpushare-scheduler`.
pub fn extend(cluster: &mut ControlPlane, folder: &Path, arguments: &[&str]) -> Extender {
    for file in ["extender/rbac.yaml", "extender/roles/roles.yaml"] {
        crate::apply(cluster, file);
    }
    // Both have the rights of their pod and no others.
    let kubeconfig = cluster.kubeconfig_of("gpushare", "gpushare-scheduler", &Value::Null);
    let extender = Extender::start(Path::new(PROGRAM), &kubeconfig, arguments);
    extender.wait();
    let map = include_str!("../../manifests/extender/configuration.yaml");
    let map: Value = serde_saphyr::from_str(map).expect("it is YAML");
    let configuration = map["data"]["config.yaml"].as_str().expect("text");
    let mut configuration: Value = serde_saphyr::from_str(configuration).expect("it is YAML");
    configuration["extenders"][0]["urlPrefix"] = json!(format!("http://{}", extender.address()));
    configuration["podInitialBackoffSeconds"] = json!(1);
    configuration["podMaxBackoffSeconds"] = json!(2);
    cluster.add_scheduler(folder, &kubeconfig, configuration);
    extender
}

/// A node with so many GPUs of 80 GiB, as kubelet and the agent tell of it. `amounts` are allocatable.
fn node(cluster: &ControlPlane, name: &str, gpus: usize, resources: &Value, amounts: &Value) {
    let metadata = json!({"name": name, "labels": {"tkestack.io/gpu-model": "M40", "gaia.tencent.com/gpu-pool": "public"}});
    let mut node =
        cluster.post("/api/v1/nodes", &json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
    let mut room = json!({"cpu": "64", "memory": "256Gi", "pods": "1000"});
    for (name, count) in amounts.as_object().expect("amounts") {
        room[name] = count.clone();
    }
    node["status"] =
        json!({"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]});
    cluster.try_call("PUT", &format!("/api/v1/nodes/{name}/status"), Some(&node)).expect("the node is ready");
    let gpu = |index: usize| {
        json!({"uuid": format!("GPU-{index:08}-0000-0000-0000-000000000000"), "index": index, "minor": index,
            "model": "NVIDIA H100", "memory": 80 * GIB, "per_share": 80 * GIB, "default_memory": 8 * GIB,
            "cores": 100, "is_open": true})
    };
    let gpus =
        json!({"gpus": (0..gpus).map(gpu).collect::<Vec<_>>(), "resources": resources, "default_cores": 0});
    let metadata = json!({"name": format!("gpus.{name}"), "labels": {"gpushare.io/node-gpus": "true"}});
    let map = json!({"metadata": metadata, "data": {"gpus": gpus.to_string(), "placed": "{}"}});
    cluster.post("/api/v1/namespaces/gpushare/configmaps", &map);
}

/// A pod with these limits for our scheduler.
fn pod(name: &str, limits: &Value) -> Value {
    let container = json!({"name": "main", "image": "none", "resources": {"limits": limits}});
    json!({"metadata": {"name": name}, "spec": {"schedulerName": "gpushare-scheduler", "containers": [container]}})
}

/// Where pods are: node and index of their GPU, and GiB; of one snapshot.
fn placed(cluster: &ControlPlane) -> Option<BTreeMap<String, (String, u64, u64)>> {
    let pods = cluster.try_call("GET", PODS, None).ok()?;
    let pods = pods["items"].as_array()?.iter().filter_map(|pod| {
        let name = pod["metadata"]["name"].as_str()?.to_owned();
        let node = pod["spec"]["nodeName"].as_str()?.to_owned();
        let text = pod["metadata"]["annotations"]["scheduler.gpushare.io/gpus"].as_str();
        let gpus: Value = serde_json::from_str(text.expect("a bound pod has its GPUs")).expect("JSON");
        let gib = pod["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-mem"].as_str()?;
        Some((name, (node, gpus["main"][0].as_u64().expect("one"), gib.parse().expect("a number"))))
    });
    Some(pods.collect())
}

#[test]
#[ignore = "needs Kubernetes' programs in KUBE_BIN"]
fn a_thousand_pods_are_bound_once_each_while_the_api_server_is_killed_ten_times() {
    let Some((mut cluster, mut extender)) = cluster(&[]) else { return };
    let resources = json!([{"name": "aliyun.com/gpu-mem", "unit": {"Memory": GIB}, "system": "Aliyun"}]);
    for number in 0..8 {
        node(&cluster, &format!("node-{number}"), 4, &resources, &json!({"aliyun.com/gpu-mem": "320"}));
    }
    let mut random = fastrand::Rng::with_seed(11);
    let began = Instant::now();
    let mut seen: BTreeMap<String, (String, u64, u64)> = BTreeMap::new();
    let (mut made, mut ended, mut kills) = (0, 0, 0);
    while ended < 1000 {
        assert!(
            began.elapsed() < Duration::from_secs(900),
            "{made} made, {} bound, {ended} ended",
            seen.len()
        );
        for _ in 0..20 {
            if made < 1000 && made - ended < 200 {
                let limits = json!({"aliyun.com/gpu-mem": random.u64(1..50).to_string()});
                let pod = pod(&format!("p{made}"), &limits);
                // Whether a call that failed was done is seen when it is tried again.
                let done = cluster.try_call("POST", PODS, Some(&pod));
                if done.as_ref().is_ok_and(|_| true) || done.is_err_and(|why| why.contains("already exists"))
                {
                    made += 1;
                }
            }
        }
        let Some(now) = placed(&cluster) else { continue };
        let mut sums: BTreeMap<(&str, u64), u64> = BTreeMap::new();
        for (name, at) in &now {
            *sums.entry((&at.0, at.1)).or_default() += at.2;
            let before = seen.entry(name.clone()).or_insert_with(|| at.clone());
            assert_eq!(before, at, "{name} was bound once");
        }
        assert!(sums.values().all(|gib| *gib <= 80), "{sums:?}");
        for name in now.keys() {
            if (made == 1000 || random.u8(..4) == 0)
                && cluster.try_call("DELETE", &format!("{PODS}/{name}?gracePeriodSeconds=0"), None).is_ok()
            {
                ended += 1;
            }
        }
        if kills < 10 && made > kills * 90 + 60 {
            kills += 1;
            cluster.kill("kube-apiserver");
            std::thread::sleep(Duration::from_millis(random.u64(0..1500)));
            cluster.revive("kube-apiserver");
            if kills == 5 {
                // And the extender once.
                extender.kill();
                extender.revive();
            }
            cluster.wait();
        }
    }
    assert_eq!((made, seen.len(), kills), (1000, 1000, 10));
    println!("1000 pods, 10 kills: {:?}", began.elapsed());
    let left = cluster.get(PODS)["items"].as_array().map_or(0, Vec::len);
    assert_eq!(left, 0, "none is forgotten");
}

#[test]
#[ignore = "needs Kubernetes' programs in KUBE_BIN"]
fn the_event_of_a_pod_tells_what_a_namespace_has_and_what_no_gpu_has_free() {
    let Some((cluster, _extender)) = cluster(&["--quota=kube-system/gpuquota"]) else { return };
    let resources = json!([{"name": "tencent.com/vcuda-core", "unit": "Percent", "system": "GpuManager"},
        {"name": "tencent.com/vcuda-memory", "unit": {"Memory": GIB / 4}, "system": "GpuManager"}]);
    let amounts = json!({"tencent.com/vcuda-core": "800", "tencent.com/vcuda-memory": "2560"});
    node(&cluster, "foo-node", 8, &resources, &amounts);
    let quota = json!({"team": {"quota": {"M40": 3}, "pool": ["public"]}}).to_string();
    cluster.post(
        "/api/v1/namespaces/kube-system/configmaps",
        &json!({"metadata": {"name": "gpuquota"}, "data": {"gpu_quota": quota}}),
    );
    let is_bound = |name: &str| cluster.get(&format!("{PODS}/{name}"))["spec"]["nodeName"].is_string();
    for number in 0..4 {
        cluster.post(PODS, &pod(&format!("p{number}"), &json!({"tencent.com/vcuda-core": "100"})));
        if number < 3 {
            assert!(
                eventually(SOON, || is_bound(&format!("p{number}"))),
                "{}",
                why(&cluster, &format!("p{number}"))
            );
        }
    }
    let told = || why(&cluster, "p3");
    assert!(
        eventually(SOON, || told().contains("namespace team has 3 of its quota of 3 GPUs of model M40")),
        "{}",
        told()
    );
    println!("the fourth: {}", told());
    cluster.post("/api/v1/namespaces", &json!({"metadata": {"name": "free"}}));
    let wide = pod("wide", &json!({"tencent.com/vcuda-core": "600"}));
    cluster.post("/api/v1/namespaces/free/pods", &wide);
    let told = || {
        let pod = cluster.get("/api/v1/namespaces/free/pods/wide");
        pod["status"]["conditions"][0]["message"].as_str().unwrap_or_default().to_owned()
    };
    assert!(
        eventually(SOON, || told().contains("6 GPUs (whole each) are not free on one node's GPUs")
            || told().contains("Insufficient tencent.com/vcuda-core")),
        "{}",
        told()
    );
    // When one of the team ends, its fourth goes in. The wide one would go first.
    cluster.delete("/api/v1/namespaces/free/pods/wide");
    cluster.delete(&format!("{PODS}/p1"));
    assert!(eventually(SOON, || is_bound("p3")), "{}", why(&cluster, "p3"));
}

/// The webhook behind a certificate, until it is dropped.
pub struct Webhook(Child);

impl Webhook {
    /// Starts it, and has the API server call it as the manifests say.
    pub fn start(cluster: &ControlPlane) -> Self {
        let folder = cluster.folder("webhook");
        let (key, certificate) = (folder.join("tls.key"), folder.join("tls.crt"));
        let mut command = Command::new(OPENSSL);
        command.args([
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=gpushare-webhook",
        ]);
        command
            .args(["-addext", "subjectAltName=IP:127.0.0.1", "-keyout"])
            .arg(&key)
            .arg("-out")
            .arg(&certificate);
        assert!(command.stderr(Stdio::null()).status().expect("openssl is there").success());
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a port")
            .port();
        let mut command = Command::new(PROGRAM);
        command.args([
            "webhook",
            &format!("--address=127.0.0.1:{port}"),
            "--scheduler-name=gpushare-scheduler",
        ]);
        command.arg("--tls-certificate").arg(&certificate).arg("--tls-key").arg(&key);
        let webhook = Self(command.stdin(Stdio::null()).spawn().expect("it can be started"));
        let bundle = std::fs::read(&certificate).expect("it can be read");
        for document in include_str!("../../manifests/webhook/configuration.yaml").split("\n---\n") {
            let mut configuration: Value = serde_saphyr::from_str(document).expect("it is YAML");
            let path = configuration["webhooks"][0]["clientConfig"]["service"]["path"]
                .as_str()
                .expect("text")
                .to_owned();
            configuration["webhooks"][0]["clientConfig"] =
                json!({"url": format!("https://127.0.0.1:{port}{path}"), "caBundle": base64(&bundle)});
            let kind = configuration["kind"].as_str().expect("text").to_lowercase();
            cluster.post(&format!("/apis/admissionregistration.k8s.io/v1/{kind}s"), &configuration);
        }
        webhook
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs Kubernetes' programs in KUBE_BIN"]
fn the_webhook_completes_pods_and_strict_namespaces_refuse_forged_keys() {
    let Some((cluster, _extender)) = cluster(&[]) else { return };
    let resources = json!([{"name": "nvidia.com/gpu", "unit": {"Slot": 10}, "system": "Hami"},
        {"name": "nvidia.com/gpumem", "unit": {"Memory": 1 << 20}, "system": "Hami"}]);
    node(&cluster, "hami-node", 2, &resources, &json!({"nvidia.com/gpu": "20"}));
    let _webhook = Webhook::start(&cluster);
    cluster.post(
        "/apis/node.k8s.io/v1/runtimeclasses",
        &json!({"metadata": {"name": "gpushare"}, "handler": "gpushare"}),
    );
    cluster.post(
        "/api/v1/namespaces",
        &json!({"metadata": {"name": "strict", "labels": {"gpushare.io/strict": "true"}}}),
    );
    // As HAMi's documents have it, without anything of ours.
    let container =
        json!({"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpumem": "3000"}}});
    let hami = |name: &str| json!({"metadata": {"name": name}, "spec": {"containers": [container]}});
    // Configurations take hold a moment after they are made.
    let completed = || {
        let name = format!("hami{}", fastrand::u32(..));
        let made = cluster.post(PODS, &hami(&name));
        (made["spec"]["runtimeClassName"] == "gpushare").then_some(name)
    };
    let mut name = None;
    assert!(
        eventually(SOON, || {
            name = completed();
            name.is_some()
        }),
        "no pod is completed: {}",
        cluster.log("kube-apiserver")
    );
    let path = format!("{PODS}/{}", name.expect("one is"));
    let made = cluster.get(&path);
    assert_eq!(made["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"], "1");
    assert_eq!(made["spec"]["schedulerName"], "gpushare-scheduler");
    assert!(
        eventually(SOON, || cluster.get(&path)["spec"]["nodeName"] == "hami-node"),
        "{}",
        cluster.get(&path)["status"]
    );
    let strict = "/api/v1/namespaces/strict/pods";
    let mut forged = hami("forged");
    forged["metadata"]["annotations"] = json!({"alloc.gpushare.io/memory": "80GiB"});
    let told = || cluster.try_call("POST", strict, Some(&forged)).err().unwrap_or_default();
    assert!(eventually(SOON, || told().contains("is written by plugins and schedulers alone")), "{}", told());
    let mut thief = hami("thief");
    thief["spec"]["containers"][0]["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    let told = cluster.try_call("POST", strict, Some(&thief)).expect_err("it is refused");
    assert!(told.contains("its resources alone say: remove it"), "{told}");
    // Elsewhere the same pods are made, and the scheduler binds those of the strict namespace too.
    cluster.post(PODS, &thief);
    cluster.post(strict, &hami("honest"));
    let honest = format!("{strict}/honest");
    assert!(
        eventually(SOON, || cluster.get(&honest)["spec"]["nodeName"] == "hami-node"),
        "{}",
        cluster.get(&honest)["status"]
    );
    let mut changed = cluster.get(&honest);
    changed["metadata"]["annotations"]["scheduler.gpushare.io/gpus"] = json!("{\"main\":[1]}");
    let told = cluster.try_call("PUT", &honest, Some(&changed)).expect_err("it is refused");
    assert!(told.contains("scheduler.gpushare.io/gpus"), "{told}");
}

/// Base64 (RFC 4648), by openssl.
fn base64(bytes: &[u8]) -> String {
    let path = std::env::temp_dir().join(format!("gpushare-base64-{}", std::process::id()));
    std::fs::write(&path, bytes).expect("it can be written");
    let told =
        Command::new(OPENSSL).args(["base64", "-A", "-in"]).arg(&path).output().expect("openssl is there");
    let _ = std::fs::remove_file(&path);
    String::from_utf8(told.stdout).expect("it is text")
}
