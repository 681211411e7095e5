//! Measures the cost of the extender's answers to kube-scheduler in a large cluster: filter and prioritize of
//! all nodes over HTTP, as JSON, and the program's memory.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use fastrand::Rng;
use gpushare_placement::Task;
use gpushare_tests::cluster::api::Api;
use gpushare_tests::cluster::extender::Extender;
use serde_json::{Value, json};

use super::trace::Trace;
use crate::claims::{program, resident};
use crate::measure::{Sample, nanoseconds};
use crate::table::{Row, Table};

const NODES: usize = 5000;
/// Pods that are bound before the measurement.
const BOUND: usize = 400;
/// Measured pods, each of which is bound too.
const PODS: usize = 600;
const GIB: u64 = 1 << 30;

/// Adds the rows.
///
/// # Errors
/// If the program is not built, or does not place a pod.
pub fn rows(trace: &Trace, table: &mut Table) -> Result<()> {
    let api = Api::start("node");
    let names: Vec<String> = (0..NODES).map(|number| format!("node-{number:04}")).collect();
    names.iter().for_each(|name| node(&api, name));
    let extender = Extender::start(&program()?, &api.kubeconfig(), &["--namespace=gpushare"]);
    extender.wait();
    let mut random = Rng::with_seed(42);
    let mut costs = Vec::new();
    for number in 0..BOUND + PODS {
        let task = loop {
            let task = trace.tasks[random.usize(..trace.tasks.len())].task;
            if task.gpus > 0 {
                break task;
            }
        };
        let pod = pod(&api, number, &task);
        let asked = json!({"Pod": pod, "Nodes": null, "NodeNames": names}).to_string();
        let start = Instant::now();
        let filtered = extender.send("POST", "/filter", &asked).context("filter is not answered")?;
        let mut spent = start.elapsed();
        let filtered: Value = serde_json::from_str(&filtered.1)?;
        let asked = json!({"Pod": pod, "NodeNames": filtered["NodeNames"]}).to_string();
        let start = Instant::now();
        let scores = extender.send("POST", "/prioritize", &asked).context("prioritize is not answered")?;
        spent += start.elapsed();
        let scores: Value = serde_json::from_str(&scores.1)?;
        let best = scores.as_array().into_iter().flatten().max_by_key(|score| score["Score"].as_i64());
        let best = best.and_then(|best| best["Host"].as_str()).context("no node has room")?;
        if let Err(why) = extender.bind(&pod, best) {
            bail!("pod {number} is not bound: {why}");
        }
        if number >= BOUND {
            costs.push(nanoseconds(spent));
        }
    }
    let sample = Sample::new(costs)?;
    let (p99, most) = (sample.percentile(99), sample.percentile(100));
    table.push(
        Row::slowest_of_hundred(
            &format!("filter and prioritize of {NODES} nodes over HTTP, 99 of 100"),
            &sample,
        )
        .target("<= 5 ms, most 20", p99 <= 5_000_000 && most <= 20_000_000),
    );
    let mebibytes = resident(extender.pid().try_into()?)? / 1024;
    table.push(
        Row::plain("the extender's memory then", format!("{mebibytes} MiB"))
            .target("<= 1 GiB", mebibytes <= 1024),
    );
    Ok(())
}

fn node(api: &Api, name: &str) {
    let status = json!({"allocatable": {"cpu": "128", "memory": "1Ti"}});
    let metadata = json!({"name": name, "uid": name});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status});
    api.put(&format!("/api/v1/nodes/{name}"), node);
    let gpu = |index: usize| {
        json!({"uuid": format!("GPU-{index}"), "index": index, "minor": index, "model": "A", "memory": 80 * GIB,
            "per_share": 80 * GIB, "default_memory": 8 * GIB, "cores": 100, "is_open": true})
    };
    let resources = json!([{"name": "nvidia.com/gpu", "unit": {"Slot": 10}, "system": "Hami"},
        {"name": "nvidia.com/gpumem", "unit": {"Memory": 1 << 20}, "system": "Hami"}]);
    let gpus =
        json!({"gpus": (0..8).map(gpu).collect::<Vec<_>>(), "resources": resources, "default_cores": 0});
    let metadata = json!({"name": format!("gpus.{name}"), "namespace": "gpushare", "labels": {"gpushare.io/node-gpus": "true"}});
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata,
        "data": {"gpus": gpus.to_string(), "placed": "{}"}});
    api.put(&format!("/api/v1/namespaces/gpushare/configmaps/gpus.{name}"), map);
}

/// Returns a pod for one of the trace's tasks.
fn pod(api: &Api, number: usize, task: &Task) -> Value {
    let mebibytes = u64::from(task.share) * 80 * 1024 / 1000;
    let limits = json!({"nvidia.com/gpu": task.gpus.to_string(), "nvidia.com/gpumem": mebibytes.to_string()});
    let requests = json!({"cpu": format!("{}m", task.cpu)});
    let container =
        json!({"name": "main", "image": "none", "resources": {"limits": limits, "requests": requests}});
    let metadata = json!({"name": format!("p{number}"), "namespace": "team", "uid": format!("uid-{number}")});
    let pod =
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}});
    api.put(&format!("/api/v1/namespaces/team/pods/p{number}"), pod.clone());
    pod
}
