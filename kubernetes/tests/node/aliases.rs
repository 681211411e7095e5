//! Pods of other systems' documents, by their resources and amounts: chosen by our extender, counted by our
//! plugin, and held by our runtime. A container sees a GPU of the size that the document tells, and its
//! programs read that system's words.
//!
//! The amounts are those of the documents; the nodes have GPUs of 80 GiB. docs/kubernetes.md has the table.

use std::path::Path;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::cluster::device_manager::{Allocated, DeviceManager};
use gpushare_tests::cluster::extender::Extender;
use gpushare_tests::cluster::kubelet::{NODE, in_pod};
use gpushare_tests::cluster::{ClusterNode, SOON};
use gpushare_tests::command::eventually;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS, UNUSABLE};
use gpushare_tests::runtime::{LowLevel, Runtime};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

/// A node that serves a system's names, and what runs beside it.
struct Cluster {
    node: ClusterNode,
    manager: DeviceManager,
    extender: Extender,
    runtime: Runtime,
}

/// What a container got.
struct Got {
    gpus: u64,
    /// Bytes of the first GPU.
    size: u64,
    /// Whether a GiB less than that can be allocated, and a GiB more not.
    is_held: bool,
    env: Vec<String>,
    /// Of the pod.
    annotations: Value,
}

impl Cluster {
    fn of(resources: &[&str], gpus: usize) -> Self {
        let mut node = crate::node(gpus);
        let manager = DeviceManager::start(&node.kubelet.root);
        let settings = format!(
            "[request]\nstrict = true\ndefault_memory = \"10%\"\nkubelet = \"refuse\"\n[kubernetes]\nresources = {resources:?}\n"
        );
        let config = node.node.config_with("alias", &format!("{}\n{settings}", LowLevel::Runc.settings()));
        node.configure(&config);
        // What is counted in MiB has no devices.
        let has_devices = |name: &&&str| {
            !["gpumem", "cores", "percentage", "vgpu-memory", "elasticgpu.io/gpu-memory"]
                .iter()
                .any(|end| name.ends_with(end) && !name.starts_with("aliyun"))
        };
        let registered = || resources.iter().filter(has_devices).all(|name| manager.plugin(name).is_some());
        assert!(eventually(SOON, registered), "{resources:?} are not registered");
        let cluster_node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "uid": "uid-of-node"},
            "status": {"allocatable": {"cpu": "64"}}});
        node.api.put(&format!("/api/v1/nodes/{NODE}"), cluster_node);
        let map = format!("/api/v1/namespaces/gpushare/configmaps/gpus.{NODE}");
        assert!(eventually(SOON, || node.api.get(&map).is_some()), "the node's GPUs are not told");
        let extender =
            Extender::start(Path::new(env!("CARGO_BIN_EXE_gpushare-kube")), &node.api.kubeconfig(), &[]);
        extender.wait();
        let runtime = Runtime::with_config(LowLevel::Runc, node.config()).in_view(LowLevel::Runc.view());
        Self { node, manager, extender, runtime }
    }

    /// Has the extender choose GPUs for a pod that has these limits in its container. Returns the pod's path.
    fn place(&self, name: &str, limits: &Value, metadata: &Value) -> Result<String, String> {
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "team", "uid": format!("uid-of-{name}"),
                "annotations": metadata["annotations"], "labels": metadata["labels"]},
            "spec": {"containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}]}});
        let path = format!("/api/v1/namespaces/team/pods/{name}");
        self.node.api.put(&path, pod.clone());
        let ready = || !self.extender.filter(&pod, &[NODE]).0.is_empty();
        if !eventually(std::time::Duration::from_secs(2), ready) {
            return Err(self.extender.filter(&pod, &[NODE]).1.to_string());
        }
        self.extender.schedule(&pod, &[NODE])?;
        Ok(path)
    }

    /// Has kubelet allocate devices to a pod.
    fn allocate(&self, name: &str, limits: &Value) -> Result<Vec<Allocated>, String> {
        let mut given: Vec<Allocated> = Vec::new();
        for (resource, count) in limits.as_object().expect("limits") {
            let count = count.as_u64().or_else(|| count.as_str()?.parse().ok()).expect("a number");
            if self.manager.plugin(resource).is_none() {
                continue;
            }
            let devices = self.manager.devices(resource).expect("the plugin answers");
            let taken = self.node.kubelet.devices.given(resource);
            let free: Vec<String> =
                devices.into_iter().map(|(id, _)| id).filter(|id| !taken.contains(id)).collect();
            let count = usize::try_from(count).expect("it fits");
            let its =
                self.manager.allocate(resource, &free, count).map_err(|told| told.message().to_owned())?;
            let ids: Vec<&str> = its.ids.iter().map(String::as_str).collect();
            self.node.kubelet.devices.give(name, "main", resource, &ids);
            given.push(its);
        }
        Ok(given)
    }

    /// Has the extender, kubelet and the runtime bring a pod up that has these limits in its container.
    fn run(&self, name: &str, limits: &Value, metadata: &Value) -> Result<Got, String> {
        let path = self.place(name, limits, metadata)?;
        let given = self.allocate(name, limits)?;
        // kubelet has admitted it.
        let mut pod = self.node.api.get(&path).expect("it is there");
        pod["status"] = json!({"startTime": "2026-11-25T00:00:00Z"});
        self.node.api.put(&path, pod.clone());
        let mut bundle = in_pod(Bundle::with_probe(), name, "team");
        for (key, value) in given.iter().flat_map(|its| &its.annotations) {
            bundle = bundle.annotation(key, value);
        }
        // Those that the containerd of README's set-up passes on.
        let annotations = pod["metadata"]["annotations"].clone();
        for (key, value) in annotations.as_object().into_iter().flatten() {
            if key.starts_with("hami.io/vgpu-devices-")
                || key == "tencent.com/vcuda-core-limit"
                || key.starts_with("elasticgpu.io/")
            {
                bundle = bundle.annotation(key, value.as_str().expect("text"));
            }
        }
        println!(
            "{name}: {} {:?}",
            annotations["scheduler.gpushare.io/gpus"],
            given.iter().map(|its| &its.annotations).collect::<Vec<_>>()
        );
        let container = self.runtime.create(&bundle).map_err(|refused| refused.line())?;
        container.start();
        let size = Report::of(&container, &[]).number("device_total");
        let sizes = [format!("{}MiB", (size >> 20) + 1024), format!("{}MiB", (size >> 20) - 1024)];
        let report = Report::of(&container, &[&sizes[0], &sizes[1]]);
        let edited: Value = serde_json::from_slice(&bundle.config_bytes()).expect("it is JSON");
        let env = edited["process"]["env"].as_array().expect("a list").iter();
        Ok(Got {
            gpus: report.number("nvml_devices"),
            size: report.number("nvml_total"),
            is_held: report.allocations() == [OUT_OF_MEMORY, SUCCESS],
            env: env.map(|entry| entry.as_str().expect("text").to_owned()).collect(),
            annotations,
        })
    }
}

impl Got {
    fn assert(&self, gpus: u64, mebibytes: u64, env: &[&str]) {
        assert_eq!((self.gpus, self.size), (gpus, mebibytes << 20));
        assert!(self.is_held, "it is held to its size");
        for entry in env {
            assert!(self.env.iter().any(|known| known == entry), "{entry}: {:?}", self.env);
        }
    }
}

const MIB: u64 = GIB >> 20;
/// What NVML shows of a whole GPU on which 80 GiB can be allocated: also what the driver keeps.
const WHOLE: u64 = 80 * GIB + UNUSABLE + (616 << 20);

#[test]
#[ignore = "needs root and runc: runs containers"]
fn pods_of_alibabas_documents_get_what_those_tell() {
    if !met(NEEDS) {
        return;
    }
    let cluster =
        Cluster::of(&["aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage", "aliyun.com/gpu-count"], 4);
    assert_eq!(cluster.manager.devices("aliyun.com/gpu-count").expect("it is told").len(), 4);
    for (name, amount) in [("binpack-1", 3), ("sample", 2)] {
        let got = cluster.run(name, &json!({"aliyun.com/gpu-mem": amount}), &json!({})).expect("it runs");
        let part = format!("ALIYUN_COM_GPU_MEM_CONTAINER={amount}");
        got.assert(1, amount * MIB, &[&part, "ALIYUN_COM_GPU_MEM_DEV=80", &part.replace("CONTAINER", "POD")]);
        let index = got.annotations["ALIYUN_COM_GPU_MEM_IDX"].as_str().expect("it is told").to_owned();
        assert!(got.env.contains(&format!("ALIYUN_COM_GPU_MEM_IDX={index}")));
        assert_eq!(got.annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"], "true");
        let allocation = json!({"0": {index: amount}}).to_string();
        assert_eq!(got.annotations["scheduler.framework.gpushare.allocation"], allocation);
    }
    let limits = json!({"aliyun.com/gpu-mem": 2, "aliyun.com/gpu-core.percentage": 30});
    let got = cluster.run("core-mem", &limits, &json!({})).expect("it runs");
    got.assert(1, 2 * MIB, &["ALIYUN_COM_GPU_MEM_CONTAINER=2"]);
    let label = json!({"labels": {"aliyun.com/gpu-count": "4"}});
    let got = cluster.run("multi-gpu", &json!({"aliyun.com/gpu-mem": 8}), &label).expect("it runs");
    got.assert(4, 2 * MIB, &["ALIYUN_COM_GPU_MEM_CONTAINER=2", "ALIYUN_COM_GPU_MEM_DEV=80"]);
    let told = cluster
        .run("count", &json!({"aliyun.com/gpu-count": 1}), &json!({}))
        .err()
        .expect("it is none to ask for");
    assert!(told.contains("not to be asked for"), "{told}");
    // 16276 of a node that counts MiB; of one that counts GiB it is too much.
    let told =
        cluster.run("sample-4", &json!({"aliyun.com/gpu-mem": 16276}), &json!({})).err().expect("too much");
    assert!(told.contains("of which one is 1 GiB: that is more than any GPU has"), "{told}");
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn pods_of_tencents_documents_get_what_those_tell() {
    if !met(NEEDS) {
        return;
    }
    let cluster = Cluster::of(&["tencent.com/vcuda-core", "tencent.com/vcuda-memory"], 4);
    let vcuda =
        |core: u64, memory: u64| json!({"tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": memory});
    let limit = json!({"annotations": {"tencent.com/vcuda-core-limit": "50"}});
    let got = cluster.run("vcuda", &vcuda(50, 30), &limit).expect("it runs");
    got.assert(1, 7680, &[]);
    assert_eq!(got.annotations["tencent.com/predicate-node"], NODE);
    assert!(got.annotations["tencent.com/predicate-gpu-idx-0"].is_string());
    let got = cluster.run("third", &vcuda(30, 20), &json!({})).expect("it runs");
    got.assert(1, 5 * MIB, &[]);
    let got = cluster.run("two-cards", &vcuda(200, 60), &json!({})).expect("it runs");
    assert_eq!((got.gpus, got.size), (2, WHOLE), "two whole GPUs");
    assert_eq!(
        got.annotations["tencent.com/predicate-gpu-idx-0"].as_str().map(|list| list.split(',').count()),
        Some(2)
    );
    let got = cluster.run("one-card", &json!({"tencent.com/vcuda-core": 100}), &json!({})).expect("it runs");
    assert_eq!((got.gpus, got.size), (1, WHOLE), "one whole GPU");
    let told = cluster.run("no-cards", &vcuda(150, 60), &json!({})).err().expect("it is none");
    assert!(told.contains("100, 200"), "{told}");
    drop(cluster);
    let cluster = Cluster::of(&["tke.cloud.tencent.com/qgpu-core", "tke.cloud.tencent.com/qgpu-memory"], 4);
    let qgpu = |core: u64, memory: u64| json!({"tke.cloud.tencent.com/qgpu-core": core, "tke.cloud.tencent.com/qgpu-memory": memory});
    cluster.run("fragment", &qgpu(30, 5), &json!({})).expect("it runs").assert(1, 5 * MIB, &[]);
    cluster.run("two", &qgpu(160, 60), &json!({})).expect("it runs").assert(2, 30 * MIB, &[]);
    // Of 31 units over two GPUs each has 15 and a half.
    cluster.run("odd", &qgpu(120, 31), &json!({})).expect("it runs").assert(2, 15 * MIB + 512, &[]);
}

#[test]
#[ignore = "needs root: runs the agent"]
fn of_two_pods_with_as_much_memory_each_has_its_own() {
    if !met(&[Need::Root]) {
        return;
    }
    let cluster = Cluster::of(&["tencent.com/vcuda-core", "tencent.com/vcuda-memory"], 4);
    let limits =
        [200, 30].map(|core: u64| json!({"tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": 60}));
    // kubelet takes the first up when both are bound to the node already.
    for (name, limits) in ["wide", "narrow"].iter().zip(&limits) {
        cluster.place(name, limits, &json!({})).expect("it fits");
    }
    cluster.allocate("wide", &limits[0]).expect("two whole GPUs");
    let given = cluster.allocate("narrow", &limits[1]).expect("a part of one");
    let told =
        |key: &str| given.iter().find_map(|its| its.annotations.get(&format!("alloc.gpushare.io/{key}")));
    assert_eq!(
        (told("memory").map(String::as_str), told("cores").map(String::as_str)),
        (Some("15360MiB"), Some("30"))
    );
    assert_eq!(told("devices"), told("cores-devices"), "of one GPU");
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn pods_of_hamis_documents_get_what_those_tell() {
    if !met(NEEDS) {
        return;
    }
    let names =
        ["nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"];
    let cluster = Cluster::of(&names, 4);
    let hami = |gpus: u64, more: &[(&str, u64)]| {
        let mut limits = json!({"nvidia.com/gpu": gpus});
        more.iter().for_each(|(name, count)| limits[format!("nvidia.com/{name}")] = json!(count));
        limits
    };
    let got = cluster
        .run("default-use", &hami(1, &[("gpumem", 3000), ("gpucores", 30)]), &json!({}))
        .expect("it runs");
    got.assert(1, 3000, &["CUDA_DEVICE_MEMORY_LIMIT_0=3000m", "CUDA_DEVICE_SM_LIMIT=30"]);
    let devices = got.annotations["hami.io/vgpu-devices-allocated"].as_str().expect("it is told");
    assert!(devices.starts_with("GPU-") && devices.ends_with(",NVIDIA,3000,30:;"), "{devices}");
    let got = cluster.run("deployed", &hami(1, &[("gpumem", 10240)]), &json!({})).expect("it runs");
    got.assert(1, 10240, &["CUDA_DEVICE_MEMORY_LIMIT_0=10240m", "CUDA_DEVICE_SM_LIMIT=0"]);
    let half = hami(2, &[("gpumem-percentage", 50), ("gpucores", 30)]);
    let got = cluster.run("memory-fraction", &half, &json!({})).expect("it runs");
    got.assert(2, 40 * MIB, &["CUDA_DEVICE_MEMORY_LIMIT_1=40960m", "CUDA_DEVICE_SM_LIMIT=30"]);
    let sharing =
        [[("gpumem-percentage", 40), ("gpucores", 60)], [("gpumem-percentage", 60), ("gpucores", 40)]];
    for (name, amounts) in ["sharing-1", "sharing-2"].into_iter().zip(&sharing) {
        let got = cluster.run(name, &hami(1, amounts), &json!({})).expect("it runs");
        got.assert(1, amounts[0].1 * 80 * MIB / 100, &[]);
    }
    // Two that name nothing share no GPU, and a third finds none.
    let got = cluster.run("as-normal", &hami(1, &[]), &json!({})).expect("it runs");
    assert_eq!((got.gpus, got.size), (1, 80 * GIB));
    let exclusive = hami(2, &[("gpumem-percentage", 100), ("gpucores", 100)]);
    let told = cluster.run("exclusive", &exclusive, &json!({})).err().expect("there are no two left");
    assert!(told.contains("2 GPUs (all memory and 100 % of compute each) are not free"), "{told}");
    let told = cluster
        .run("alone", &json!({"nvidia.com/gpumem": 3000}), &json!({}))
        .err()
        .expect("no GPU is asked for");
    assert!(told.contains("ask for nvidia.com/gpu: 1, too"), "{told}");
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn pods_of_volcanos_elastic_gpus_and_nvidias_documents_get_what_those_tell() {
    if !met(NEEDS) {
        return;
    }
    let cluster =
        Cluster::of(&["volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"], 2);
    let limits =
        json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 3000, "volcano.sh/vgpu-cores": 50});
    let got = cluster.run("vgpu", &limits, &json!({})).expect("it runs");
    got.assert(1, 3000, &["CUDA_DEVICE_MEMORY_LIMIT_0=3000m", "CUDA_DEVICE_SM_LIMIT=50"]);
    drop(cluster);
    let names = ["elasticgpu.io/gpu-core", "elasticgpu.io/gpu-memory", "gpushare.io/gpu-slot"];
    let cluster = Cluster::of(&names, 2);
    // Memory alone has no devices: the webhook adds what kubelet gives for it.
    let told =
        cluster.run("bare", &json!({"elasticgpu.io/gpu-memory": 256}), &json!({})).err().expect("no devices");
    assert!(told.contains("ask for gpushare.io/gpu-slot: 1, too"), "{told}");
    let limits = json!({"elasticgpu.io/gpu-memory": 2560, "gpushare.io/gpu-slot": 1});
    let got = cluster.run("memory", &limits, &json!({})).expect("it runs");
    got.assert(1, 2560, &[]);
    assert_eq!(got.annotations["elasticgpu.io/assumed"], "true");
    assert!(got.annotations["elasticgpu.io/container-main"].is_string());
    let limits = json!({"elasticgpu.io/gpu-memory": 4096, "elasticgpu.io/gpu-core": 10});
    cluster.run("both", &limits, &json!({})).expect("it runs").assert(1, 4 * MIB, &[]);
    drop(cluster);
    let cluster = Cluster::of(&["elasticgpu.io/gpu-core"], 2);
    let got =
        cluster.run("two-cards", &json!({"elasticgpu.io/gpu-core": "200"}), &json!({})).expect("it runs");
    assert_eq!((got.gpus, got.size), (2, WHOLE), "two whole GPUs");
    assert_eq!(got.annotations["elasticgpu.io/container-main"], "0,1");
    drop(cluster);
    let cluster = Cluster::of(&["nvidia.com/gpu.shared"], 2);
    let got = cluster.run("replica", &json!({"nvidia.com/gpu.shared": 1}), &json!({})).expect("it runs");
    got.assert(1, 8 * MIB, &[]);
}
