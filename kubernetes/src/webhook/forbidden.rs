//! Finds keys by which a pod would grant itself something: annotations that only plugins and schedulers
//! write, and variables by which containers ask for GPUs or turn limits off. Pure.

use std::path::{Component, Path, PathBuf};

use gpushare_request::is_request_variable;
use serde_json::Value;

/// Annotations that plugins and schedulers write, by what they begin with.
const TRUSTED: [&str; 13] = [
    "alloc.gpushare.io/",
    "scheduler.gpushare.io/",
    "cdi.k8s.io/",
    "nvidia.cdi.k8s.io/",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-memory",
    "tencent.com/vcuda-device",
    "hami.io/vgpu-devices-",
    "elasticgpu.io/container-",
    "ALIYUN_COM_GPU_MEM_",
    "scheduling.koordinator.sh/device-allocated",
    "volcano.sh/vgpu-ids",
    "tencent.com/predicate-",
];
/// Where mounts name GPUs to NVIDIA's runtime. `/var/run` is `/run` in most images.
const DEVICE_MOUNTS: [&str; 2] = ["/var/run/nvidia-container-devices", "/run/nvidia-container-devices"];
/// One that users write although it begins like one of those.
const OF_USERS: &str = "tencent.com/vcuda-core-limit";

/// Why the pod may not be made, or changed from `before`; `None` where it may. What it had before it may
/// keep.
pub fn first(pod: &Value, before: &Value) -> Option<String> {
    let annotations = pod["metadata"]["annotations"].as_object().into_iter().flatten();
    let is_new =
        |(key, value): &(&String, &Value)| before["metadata"]["annotations"][key.as_str()] != **value;
    for (key, _) in annotations.filter(is_new) {
        let is_trusted = TRUSTED.iter().any(|trusted| key.starts_with(trusted)) && key != OF_USERS;
        if is_trusted {
            return Some(format!(
                "annotation {key:?} is written by plugins and schedulers alone in this namespace: remove it; what the pod asks \
                 for stands in its resources"
            ));
        }
    }
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for container in pod["spec"][list].as_array().into_iter().flatten() {
            let old = before["spec"][list].as_array().into_iter().flatten();
            if old.clone().any(|old| {
                old["name"] == container["name"]
                    && old["env"] == container["env"]
                    && old["volumeMounts"] == container["volumeMounts"]
            }) {
                continue;
            }
            let mounts = container["volumeMounts"].as_array().into_iter().flatten();
            let mut paths = mounts.filter_map(|mount| mount["mountPath"].as_str());
            if paths.any(|path| DEVICE_MOUNTS.iter().any(|folder| plain(path).starts_with(folder))) {
                return Some(format!("a volume below {} would name GPUs: remove it", DEVICE_MOUNTS[0]));
            }
            let names =
                container["env"].as_array().into_iter().flatten().filter_map(|entry| entry["name"].as_str());
            if let Some(name) = names.into_iter().find(|name| is_request_variable(name)) {
                let container = container["name"].as_str().unwrap_or_default();
                return Some(format!(
                    "container {container}: variable {name:?} would say what it gets of a GPU, which in this namespace its \
                     resources alone say: remove it"
                ));
            }
        }
    }
    None
}

/// A path in the container as kubelet and the runtime take it: from its root, without `.`, `..` and what is
/// between two slashes.
fn plain(path: &str) -> PathBuf {
    let mut plain = PathBuf::from("/");
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => drop(plain.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(annotations: Value, env: &[&str]) -> Value {
        let env: Vec<Value> = env.iter().map(|name| json!({"name": name, "value": "x"})).collect();
        json!({"metadata": {"annotations": annotations}, "spec": {"containers": [{"name": "main", "env": env}]}})
    }

    #[test]
    fn keys_that_grant_something_are_refused_and_others_are_not() {
        for (annotations, env, want) in [
            (json!({"alloc.gpushare.io/memory": "80GiB"}), &[][..], Some("alloc.gpushare.io/memory")),
            (json!({"scheduler.gpushare.io/gpus": "{}"}), &[], Some("scheduler.gpushare.io/gpus")),
            (json!({"tencent.com/vcuda-memory": "1"}), &[], Some("tencent.com/vcuda-memory")),
            (json!({"tencent.com/vcuda-core-limit": "50"}), &[], None),
            (json!({"gpushare.io/memory": "4GiB", "team": "x"}), &["PATH", "HOME"], None),
            (json!({}), &["PATH", "GPUSHARE_MEMORY"], Some("GPUSHARE_MEMORY")),
            (json!({}), &["gpushare_cores"], Some("gpushare_cores")),
            (json!({}), &["NVIDIA_VISIBLE_DEVICES"], Some("NVIDIA_VISIBLE_DEVICES")),
            (json!({}), &["CUDA_DEVICE_MEMORY_LIMIT_0"], Some("CUDA_DEVICE_MEMORY_LIMIT_0")),
            (json!({}), &["ALIYUN_COM_GPU_MEM_CONTAINER"], Some("ALIYUN_COM_GPU_MEM_CONTAINER")),
            (json!({}), &["CUDA_DISABLE_CONTROL"], Some("CUDA_DISABLE_CONTROL")),
            (json!({}), &["CGPU_DISABLE"], Some("CGPU_DISABLE")),
            (json!({}), &["GPUSHARE_CDI_X"], Some("GPUSHARE_CDI_X")),
            (json!({"ALIYUN_COM_GPU_MEM_IDX": "1"}), &[], Some("ALIYUN_COM_GPU_MEM_IDX")),
        ] {
            let told = first(&pod(annotations.clone(), env), &Value::Null);
            assert_eq!(told.is_some(), want.is_some(), "{annotations} {env:?}: {told:?}");
            assert!(
                want.is_none_or(|want| told.as_ref().is_some_and(|told| told.contains(want))),
                "{told:?}"
            );
        }
    }

    #[test]
    fn volumes_that_name_gpus_are_refused_however_their_path_is_written() {
        for (path, is_refused) in [
            ("/var/run/nvidia-container-devices/GPU-1", true),
            ("/run/nvidia-container-devices", true),
            ("var/run/nvidia-container-devices/all", true),
            ("//var//run///nvidia-container-devices/./0", true),
            ("/run/x/../nvidia-container-devices/0", true),
            ("/../run/nvidia-container-devices/0", true),
            ("/run/nvidia-container-devices-of-mine", false),
            ("/data/run/nvidia-container-devices", false),
            ("/run/nvidia-container-devices/..", false),
        ] {
            let mut pod = pod(json!({}), &[]);
            pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": path}]);
            assert_eq!(first(&pod, &Value::Null).is_some(), is_refused, "{path}");
        }
    }

    #[test]
    fn what_a_pod_has_it_keeps_and_an_ephemeral_container_is_one() {
        let bound = pod(json!({"scheduler.gpushare.io/gpus": "{}"}), &["GPUSHARE_MEMORY"]);
        assert_eq!(first(&bound, &bound), None);
        let mut debug = bound.clone();
        debug["spec"]["ephemeralContainers"] =
            json!([{"name": "debug", "env": [{"name": "GPUSHARE_MEMORY"}]}]);
        assert!(first(&debug, &bound).is_some_and(|told| told.contains("debug")));
        let mut forged = bound.clone();
        forged["metadata"]["annotations"]["scheduler.gpushare.io/gpus"] = json!("{\"main\":[1]}");
        assert!(first(&forged, &bound).is_some());
    }
}
