//! Completes pods that ask for GPUs: their runtime class, and resources that kubelet needs beside those that
//! they name. Pure.

use gpushare_inventory::DeviceMemory;
use gpushare_request::{Cores, MemoryRequest};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Map, Value, json};

use super::Options;
use crate::asks::asking;
use crate::resource::{companion, is_ambiguous};

/// The label by which a pod is left as it is.
const LABEL: &str = "gpushare.io/webhook";
/// The scheduler that a pod has which names none.
const DEFAULT_SCHEDULER: &str = "default-scheduler";
/// What a pod's annotations begin with by which it asks.
const ANNOTATION: &str = "gpushare.io/";
const MEMORY: &str = "gpushare.io/gpu-memory";
const CORES: &str = "gpushare.io/gpu-core";

/// The pod as it is to be made.
///
/// # Errors
/// When its annotations ask for what cannot be counted.
pub fn completed(options: &Options, pod: &Value) -> Result<Value, String> {
    if pod["metadata"]["labels"][LABEL] == "ignore" {
        return Ok(pod.clone());
    }
    let mut completed = pod.clone();
    if options.count_annotations {
        count_annotations(options, pod, &mut completed)?;
    }
    let Ok(typed) = serde_json::from_value::<Pod>(completed.clone()) else { return Ok(pod.clone()) };
    let serves = |name: &str| !is_ambiguous(name) || options.resources.iter().any(|known| known == name);
    let mut is_counted = false;
    let mut has_share = pod["metadata"]["annotations"].as_object().is_some_and(asks_by_annotation);
    for asking in asking(&typed) {
        is_counted |= asking.amounts.keys().any(|name| serves(name));
        // Amounts without anything that kubelet counts.
        let names: Vec<&str> = asking.amounts.keys().map(String::as_str).collect();
        if let Some(missing) = companion(&names) {
            is_counted = true;
            add(&mut completed, &asking.container, missing, 1);
        }
    }
    has_share |= is_counted;
    if has_share && completed["spec"]["runtimeClassName"].is_null() {
        completed["spec"]["runtimeClassName"] = json!(options.runtime_class);
    }
    let scheduler = &completed["spec"]["schedulerName"];
    if let Some(name) = options.scheduler_name.as_ref().filter(|_| is_counted)
        && (scheduler.is_null() || scheduler == DEFAULT_SCHEDULER)
    {
        completed["spec"]["schedulerName"] = json!(name);
    }
    Ok(completed)
}

fn asks_by_annotation(annotations: &Map<String, Value>) -> bool {
    annotations.keys().any(|key| key.starts_with(ANNOTATION))
}

/// Adds a resource to a container's requests and limits, unless it has it.
fn add(pod: &mut Value, container: &str, name: &str, count: u64) {
    for list in ["containers", "initContainers"] {
        let all = pod["spec"][list].as_array_mut();
        for its in all.into_iter().flatten().filter(|its| its["name"] == container) {
            for kind in ["limits", "requests"] {
                if its["resources"][kind][name].is_null() {
                    its["resources"][kind][name] = json!(count.to_string());
                }
            }
        }
    }
}

/// Has every container count what annotations ask for it.
fn count_annotations(options: &Options, pod: &Value, completed: &mut Value) -> Result<(), String> {
    let Some(annotations) = pod["metadata"]["annotations"].as_object() else { return Ok(()) };
    let text = |key: &str| annotations.get(key).and_then(Value::as_str);
    let listed = text("gpushare.io/containers");
    let of = |list: &str| pod["spec"][list].as_array().into_iter().flatten();
    let containers = of("initContainers").chain(of("containers"));
    for container in containers.filter_map(|container| container["name"].as_str()) {
        let is_meant = listed.is_none_or(|list| list.split(',').any(|name| name.trim() == container));
        let said = |name: &str| {
            let own = text(&format!("{ANNOTATION}{container}.{name}"));
            own.or_else(|| text(&format!("{ANNOTATION}{name}")).filter(|_| is_meant))
        };
        for whole in ["count", "devices", "mode", "pod-memory", "scope"] {
            if said(whole)
                .is_some_and(|value| (whole, value) != ("count", "1") && (whole, value) != ("mode", "share"))
            {
                return Err(format!(
                    "annotation {ANNOTATION}{whole} cannot be counted by {MEMORY}: ask by a claim, or leave it out"
                ));
            }
        }
        if let Some(memory) = said("memory") {
            add(completed, container, MEMORY, granules(memory, options.memory_granule)?);
        }
        if let Some(cores) = said("cores") {
            let cores: Cores =
                cores.parse().map_err(|error| format!("annotation {ANNOTATION}cores: {error}"))?;
            add(completed, container, CORES, cores.percent().into());
        }
    }
    Ok(())
}

/// So much memory in granules, rounded up.
fn granules(text: &str, granule: DeviceMemory) -> Result<u64, String> {
    match text.parse() {
        Ok(MemoryRequest::Bytes(memory)) => Ok(memory.bytes().div_ceil(granule.bytes().max(1))),
        Ok(_) => Err(format!(
            "annotation {ANNOTATION}memory: {text:?} is a part of a GPU that is not chosen yet, and cannot be counted by {MEMORY}: \
             write an amount, as 4GiB"
        )),
        Err(error) => Err(format!("annotation {ANNOTATION}memory: {error}")),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::resource::SLOT;

    /// Options of a webhook.
    pub fn options(count_annotations: bool, resources: &[&str]) -> Options {
        Options {
            address: ([127, 0, 0, 1], 0).into(),
            tls: crate::serve::Certificates::default(),
            runtime_class: "gpushare".into(),
            scheduler_name: Some("ours".into()),
            resources: resources.iter().map(ToString::to_string).collect(),
            count_annotations,
            memory_granule: DeviceMemory::from_bytes(256 << 20),
        }
    }

    fn pod(metadata: Value, limits: Value) -> Value {
        json!({"metadata": metadata, "spec": {"unknown": 7,
            "containers": [{"name": "main", "resources": {"limits": limits}}, {"name": "other"}]}})
    }

    #[test]
    fn pods_that_ask_for_gpus_get_the_runtime_class_and_others_nothing() {
        let class = |options: &Options, pod: &Value| {
            let completed = completed(options, pod).unwrap();
            assert_eq!(completed["spec"]["unknown"], 7);
            let class = completed["spec"]["runtimeClassName"].as_str().map(str::to_owned);
            let is_ours = completed["spec"]["schedulerName"] == "ours";
            assert_eq!(is_ours, class.is_some() && pod["metadata"]["annotations"].is_null());
            class
        };
        let plain = options(false, &[]);
        for (metadata, limits, want) in [
            (json!({}), json!({"aliyun.com/gpu-mem": 3}), true),
            (json!({"annotations": {"gpushare.io/memory": "4GiB"}}), json!({}), true),
            (json!({}), json!({"cpu": 2}), false),
            (json!({}), json!({"nvidia.com/gpu": 1}), false),
            (json!({}), json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}), true),
            (json!({"labels": {"gpushare.io/webhook": "ignore"}}), json!({"aliyun.com/gpu-mem": 3}), false),
        ] {
            let pod = pod(metadata, limits);
            assert_eq!(class(&plain, &pod).is_some(), want, "{pod}");
        }
        let nvidias = pod(json!({}), json!({"nvidia.com/gpu": 1}));
        assert_eq!(class(&options(false, &["nvidia.com/gpu"]), &nvidias).as_deref(), Some("gpushare"));
        let mut own = pod(json!({}), json!({"aliyun.com/gpu-mem": 3}));
        own["spec"]["runtimeClassName"] = json!("other");
        assert_eq!(class(&plain, &own).as_deref(), Some("other"));
    }

    #[test]
    fn amounts_alone_get_what_kubelet_counts_for_them() {
        for (limits, name) in [
            (json!({"nvidia.com/gpumem": 3000}), "nvidia.com/gpu"),
            (json!({"nvidia.com/gpucores": 30}), "nvidia.com/gpu"),
            (json!({"volcano.sh/vgpu-memory": 3000}), "volcano.sh/vgpu-number"),
            (json!({"elasticgpu.io/gpu-memory": "256"}), SLOT),
        ] {
            let completed = completed(&options(false, &[]), &pod(json!({}), limits)).unwrap();
            let resources = &completed["spec"]["containers"][0]["resources"];
            assert_eq!(
                (&resources["limits"][name], &resources["requests"][name]),
                (&json!("1"), &json!("1"))
            );
            assert_eq!(completed["spec"]["containers"][1], json!({"name": "other"}));
        }
        let both = pod(json!({}), json!({"elasticgpu.io/gpu-memory": 256, "elasticgpu.io/gpu-core": 10}));
        let completed = completed(&options(false, &[]), &both).unwrap();
        assert_eq!(completed["spec"]["containers"], both["spec"]["containers"]);
    }

    #[test]
    fn annotations_become_resources_where_that_is_asked_for() {
        let annotated = |annotations: Value| pod(json!({"annotations": annotations}), json!({}));
        let limits = |annotations: Value| {
            let completed = completed(&options(true, &[]), &annotated(annotations))?;
            let of = |at: usize| completed["spec"]["containers"][at]["resources"]["limits"].clone();
            Ok::<_, String>((of(0), of(1)))
        };
        let told = limits(json!({"gpushare.io/memory": "4GiB", "gpushare.io/main.cores": "30"})).unwrap();
        assert_eq!(told, (json!({MEMORY: "16", CORES: "30"}), json!({MEMORY: "16"})));
        let told = limits(json!({"gpushare.io/memory": "4.1GiB", "gpushare.io/containers": "main"}));
        assert!(told.is_err() || told.unwrap().1 == Value::Null);
        for (annotations, want) in [
            (json!({"gpushare.io/memory": "25%"}), "write an amount"),
            (json!({"gpushare.io/memory": "4"}), "gpushare.io/memory"),
            (json!({"gpushare.io/cores": "200"}), "gpushare.io/cores"),
            (
                json!({"gpushare.io/memory": "4GiB", "gpushare.io/count": "2"}),
                "gpushare.io/count cannot be counted",
            ),
        ] {
            let told = limits(annotations.clone()).unwrap_err();
            assert!(told.contains(want), "{annotations}: {told}");
        }
    }
}
