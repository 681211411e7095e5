//! `gpushare-kube scheduler`, called as kube-scheduler calls it, over real HTTP and beside a simulated API
//! server.

mod binding;
mod messages;
mod quota;
mod tls;

use std::path::Path;
use std::time::Duration;

use gpushare_tests::cluster::api::Api;
use gpushare_tests::cluster::extender::Extender;
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;
/// How long the extender may take to hear of a change.
const SOON: Duration = Duration::from_secs(20);
const PROGRAM: &str = env!("CARGO_BIN_EXE_gpushare-kube");
/// The resources of a node that serves Alibaba's names.
const ALIYUN: [(&str, &str); 2] =
    [("aliyun.com/gpu-mem", r#"{"Memory":1073741824}"#), ("aliyun.com/gpu-core.percentage", "\"Percent\"")];

/// A cluster of nodes with so many GPUs of 80 GiB each, whose agents serve Alibaba's names.
fn cluster(nodes: &[(&str, usize)]) -> Api {
    let api = Api::start("node-of-nothing");
    for (name, gpus) in nodes {
        node(&api, name, *gpus, &ALIYUN, "Aliyun");
    }
    api
}

/// Makes a node with so many GPUs, which serves these resources of a system.
fn node(api: &Api, name: &str, gpus: usize, resources: &[(&str, &str)], system: &str) {
    let metadata =
        json!({"name": name, "uid": format!("uid-of-{name}"), "labels": {"tkestack.io/gpu-model": "M40"}});
    let status = json!({"allocatable": {"cpu": "64", "memory": "256Gi"}});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status});
    api.put(&format!("/api/v1/nodes/{name}"), node);
    let gpu = |index: usize| {
        json!({"uuid": format!("GPU-{index:08}-0000-0000-0000-000000000000"), "index": index, "minor": index,
            "model": "NVIDIA H100", "memory": 80 * GIB, "per_share": 80 * GIB, "default_memory": 8 * GIB,
            "cores": 100, "is_open": true})
    };
    let resource = |(name, unit): &(&str, &str)| {
        let unit: Value = serde_json::from_str(unit).expect("it is JSON");
        json!({"name": name, "unit": unit, "system": system})
    };
    let resources: Vec<Value> = resources.iter().map(resource).collect();
    let gpus =
        json!({"gpus": (0..gpus).map(gpu).collect::<Vec<_>>(), "resources": resources, "default_cores": 0});
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": format!("gpus.{name}"), "namespace": "gpushare", "labels": {"gpushare.io/node-gpus": "true"}},
        "data": {"gpus": gpus.to_string(), "placed": "{}"}});
    api.put(&format!("/api/v1/namespaces/gpushare/configmaps/gpus.{name}"), map);
}

/// A pod of one container with these limits, as the API server has it.
fn pod(api: &Api, name: &str, limits: &Value) -> Value {
    pod_of(api, name, &json!([{"name": "main", "image": "none", "resources": {"limits": limits}}]))
}

/// A pod of these containers.
fn pod_of(api: &Api, name: &str, containers: &Value) -> Value {
    let metadata = json!({"name": name, "namespace": "team", "uid": format!("uid-of-{name}"),
        "creationTimestamp": "2026-11-25T00:00:00Z"});
    let pod =
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}});
    api.put(&path(name), pod.clone());
    pod
}

fn path(pod: &str) -> String {
    format!("/api/v1/namespaces/team/pods/{pod}")
}

fn extender(api: &Api) -> Extender {
    let extender = Extender::start(Path::new(PROGRAM), &api.kubeconfig(), &["--policy=binpack"]);
    extender.wait();
    extender
}

/// Where a pod is: node, and GPUs of its container `main`.
fn placed(api: &Api, name: &str) -> Option<(String, Vec<u64>)> {
    let pod = api.get(&path(name))?;
    let node = pod["spec"]["nodeName"].as_str()?.to_owned();
    let gpus: Value =
        serde_json::from_str(pod["metadata"]["annotations"]["scheduler.gpushare.io/gpus"].as_str()?).ok()?;
    let gpus = gpus["main"].as_array()?.iter().filter_map(Value::as_u64).collect();
    Some((node, gpus))
}

/// GiB that pods have of each GPU, by node and index.
fn given(api: &Api) -> std::collections::BTreeMap<(String, u64), u64> {
    let mut given = std::collections::BTreeMap::new();
    for pod in api.pods() {
        let name = pod["metadata"]["name"].as_str().expect("it has one").to_owned();
        let Some((node, gpus)) = placed(api, &name) else { continue };
        let limits = &pod["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-mem"];
        for gpu in gpus {
            *given.entry((node.clone(), gpu)).or_default() += limits.as_u64().expect("a number");
        }
    }
    given
}
