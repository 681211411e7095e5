//! Whole GPUs that a request of another kind would bring beside a share: never left standing.
//!
//! Nodes and mounts that an engine has already put into the bundle, and NVIDIA's own hook, are found where the bundle is
//! edited; here are the requests that somebody behind gpushare would still act on.

use crate::cdi;
use crate::container::Container;
use crate::device_list;
use crate::error::{RequestError, shortened};
use crate::reading::Reading;

/// Mounts below this folder name GPUs, one each: NVIDIA's toolkit and device plugin know the convention.
pub(crate) const VOLUMES: &str = "/var/run/nvidia-container-devices";

/// Refuses a whole GPU beside what `asked` asks for. Mounts that are the list of GPUs themselves stand beside nothing.
pub(crate) fn refuse_beside(asked: &str, reading: &Reading) -> Result<(), RequestError> {
    let container = reading.container;
    let device = cdi::annotated(container).find(|(_, name)| is_whole_gpu(name));
    let device =
        device.map(|(key, name)| format!("CDI device {} of annotation {}", escaped(name), escaped(key)));
    let mut mounts = container.mounts().iter().map(|mount| mount.target.as_str());
    let are_list = device_list::is_in_mounts(reading);
    let mount = mounts.find(|target| below(target).is_some()).filter(|_| !are_list);
    let second =
        device.or_else(|| mount.map(|target| format!("the GPU that mount {} names", escaped(target))));
    match second {
        Some(second) => Err(RequestError::Conflict { first: asked.to_owned(), second }),
        None => Ok(()),
    }
}

/// A GPU or a MIG instance of NVIDIA's, by whichever of its vendor names. What a GPU is used with beside it (gds, mofed,
/// gdrcopy, nvswitch, imex-channel) is none.
fn is_whole_gpu(name: &str) -> bool {
    let Some((vendor, device)) = name.split_once('/') else { return false };
    let class = device.split('=').next().unwrap_or_default();
    let nvidias = vendor == "nvidia.com" || vendor.ends_with(".nvidia.com");
    nvidias && (class == "gpu" || class.starts_with("mig") || class.starts_with("pgpu"))
}

/// The names of GPUs that mounts below the folder give.
pub(crate) fn below_volumes(container: &Container) -> impl Iterator<Item = &str> {
    container.mounts().iter().filter_map(|mount| below(&mount.target))
}

/// The path below the folder, which itself is mounted by nobody; `/run` is where `/var/run` leads.
fn below(target: &str) -> Option<&str> {
    let tail = VOLUMES.trim_start_matches("/var");
    let folder = target.strip_prefix("/var").unwrap_or(target);
    folder.strip_prefix(tail)?.strip_prefix('/').filter(|rest| !rest.is_empty())
}

fn escaped(text: &str) -> String {
    shortened(text).escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{NvidiaPolicy, Policy};

    #[test]
    fn a_whole_gpu_by_cdi_or_by_a_mount_beside_a_share_is_a_conflict_naming_both() {
        for (key, name) in [
            ("cdi.k8s.io/nvidia-device-plugin_1", "nvidia.com/gpu=0"),
            ("cdi.k8s.io/x", "other.org/nic=0,nvidia.com/gpu=all"),
            ("cdi.k8s.io/x", "k8s.device-plugin.nvidia.com/gpu=GPU-a"),
            ("cdi.k8s.io/x", "management.nvidia.com/gpu=all"),
            ("cdi.k8s.io/x", "nvidia.com/mig-1g.10gb=0"),
        ] {
            for asked in ["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=0"] {
                let json = json!({"annotations": {key: name}, "process": {"env": [asked]}});
                let told = crate::read(&Container::from_json(&json), &Policy::default(), &[]).unwrap_err();
                let told = told.to_string();
                let (variable, _) = asked.split_once('=').unwrap();
                let (_, device) = name.rsplit_once(',').unwrap_or(("", name));
                assert!(told.contains(variable) && told.contains(device) && told.contains(key), "{told}");
            }
        }
        for target in ["/var/run/nvidia-container-devices/GPU-a", "/run/nvidia-container-devices/cdi/x/y/0"] {
            let json = json!({
                "mounts": [{"destination": target, "source": "/dev/null"}],
                "process": {"env": ["GPUSHARE_MEMORY=4GiB"]}
            });
            let told =
                crate::read(&Container::from_json(&json), &Policy::default(), &[]).unwrap_err().to_string();
            assert!(told.contains("GPUSHARE_MEMORY") && told.contains(target), "{told}");
        }
    }

    #[test]
    fn what_is_no_whole_gpu_stands_beside_a_share() {
        let json = json!({
            "annotations": {"cdi.k8s.io/x": "nvidia.com/gds=all,nvidia.com/imex-channel=0,xnvidia.com/gpu=0,gpu=0"},
            "mounts": [{"destination": "/var/run/nvidia-container-devicesX"}, {"destination": "/run"}, {}],
            "process": {"env": ["GPUSHARE_MEMORY=4GiB"]}
        });
        assert!(crate::read(&Container::from_json(&json), &Policy::default(), &[]).unwrap().is_some());
    }

    #[test]
    fn a_container_that_asks_for_nothing_of_ours_keeps_its_whole_gpu() {
        let json = json!({"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=0"}, "process": {"env": []}});
        assert_eq!(crate::read(&Container::from_json(&json), &Policy::default(), &[]), Ok(None));
        let json = json!({
            "annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=0"}, "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}
        });
        let ignore = Policy { nvidia: NvidiaPolicy::Ignore, ..Policy::default() };
        assert_eq!(crate::read(&Container::from_json(&json), &ignore, &[]), Ok(None));
    }

    #[test]
    fn gpus_by_volume_mounts_alone_are_refused_with_the_remedy() {
        let json = json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices"]}});
        let told =
            crate::read(&Container::from_json(&json), &Policy::default(), &[]).unwrap_err().to_string();
        assert!(told.contains("volume mounts") && told.contains("envvar"), "{told}");
    }
}
