//! Measures how long it takes to turn a parsed config.json into the request on this node, for bundles of
//! several systems.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use gpushare_inventory::Gpu;
use gpushare_request::{Container, Policy};
use serde_json::{Value, json};

use crate::measure::{Sample, nanoseconds};
use crate::quota::gpus;
use crate::table::{Row, Table};

const RUNS: usize = 5000;
/// Target in nanoseconds.
const TARGET: i64 = 50_000;

/// Measures the section.
///
/// # Errors
/// If a bundle is refused.
pub fn section() -> Result<Table> {
    let node = gpus(4, 80);
    let mut table = Table::default();
    for (what, bundle, asks) in bundles() {
        let sample = reading(&bundle, &node, asks).with_context(|| what.to_owned())?;
        table.push(Row::duration(what, &sample).target("<= 0.05 ms", sample.median() <= TARGET));
    }
    Ok(table)
}

fn reading(bundle: &Value, node: &[Gpu], asks: bool) -> Result<Sample> {
    let policy = Policy::default();
    let mut times = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let start = Instant::now();
        let container = Container::from_json(black_box(bundle));
        let request = gpushare_request::read(&container, &policy, node)?;
        times.push(nanoseconds(start.elapsed()));
        anyhow::ensure!(black_box(request).is_some() == asks, "another outcome than expected");
    }
    Sample::new(times)
}

/// Lists the bundles: the name, the bundle, and whether it requests a share.
fn bundles() -> Vec<(&'static str, Value, bool)> {
    let env = |more: &[&str]| {
        let usual = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "CUDA_VERSION=12.4.1"];
        let all: Vec<&str> = usual.iter().chain(more).copied().collect();
        json!({"process": {"env": all}, "annotations": {}})
    };
    let koordinator = r#"{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-core":"50","koordinator.sh/gpu-memory":"8Gi","koordinator.sh/gpu-memory-ratio":"50"}}]}"#;
    let mut of_pod = env(&["NVIDIA_VISIBLE_DEVICES=0"]);
    of_pod["annotations"] = json!({
        "io.kubernetes.cri.container-type": "container",
        "scheduling.koordinator.sh/device-allocated": koordinator,
    });
    let many: Vec<String> =
        (0..200).map(|number| format!("SERVICE_{number}_PORT=tcp://10.0.0.1:80")).collect();
    let mut services = env(&[
        "NVIDIA_VISIBLE_DEVICES=0,1",
        "CUDA_DEVICE_MEMORY_LIMIT_0=3000m",
        "CUDA_DEVICE_MEMORY_LIMIT_1=3000m",
    ]);
    if let Some(list) = services["process"]["env"].as_array_mut() {
        list.extend(many.into_iter().map(Value::from));
    }
    let node = |minor: u32| json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor});
    let mount = |file: usize| json!({"destination": format!("/usr/lib/driver.so.{file}"), "source": "/x", "type": "bind"});
    let mut by_cdi = env(&["NVIDIA_VISIBLE_DEVICES=void"]);
    by_cdi["annotations"] = json!({
        "io.kubernetes.cri.container-type": "container",
        "cdi.k8s.io/nvidia-device-plugin_0b5c": "nvidia.com/gpu=0,nvidia.com/gpu=1",
        "gpushare.io/memory": "4GiB",
    });
    by_cdi["linux"] = json!({"devices": [node(0), node(1), node(255), node(254)]});
    by_cdi["mounts"] = (0..40).map(mount).collect();
    let mut handed = env(&["NVIDIA_VISIBLE_DEVICES=all", "CUDA_DEVICE_MEMORY_LIMIT_0=3000m"]);
    handed["annotations"] = by_cdi["annotations"].clone();
    if let Some(annotations) = handed["annotations"].as_object_mut() {
        annotations.retain(|key, _| key.starts_with("io."));
    }
    handed["linux"] = json!({"devices": [node(0), node(255)]});
    vec![
        ("a bundle without a request", env(&[]), false),
        ("gpushare's own keys", env(&["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=30"]), true),
        ("HAMi's, two GPUs, 200 variables of services", services, true),
        (
            "Alibaba's, with a unit to find out",
            env(&["NVIDIA_VISIBLE_DEVICES=0", "ALIYUN_COM_GPU_MEM_DEV=80", "ALIYUN_COM_GPU_MEM_CONTAINER=8"]),
            true,
        ),
        ("Koordinator's JSON", of_pod, true),
        ("two GPUs by CDI, and an amount of our own", by_cdi, true),
        ("a node of HAMi's, and a CUDA image", handed, true),
    ]
}
