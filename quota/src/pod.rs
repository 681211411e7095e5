//! The pod that a container belongs to. Containers of one pod can hold one lease together.

use std::fmt;

use gpushare_claims::{Devices, Mode, Request, Share, find_gpu};
use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};
use serde::{Deserialize, Serialize};

use crate::enforcement::Enforcement;
use crate::pid_namespace::PidNamespace;
use crate::place::Refusal;

/// A container's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// The sandbox id, as the engine wrote it. A lease below the same runtime root with the same id belongs
    /// to the pod.
    pub sandbox: String,
    /// The pid namespace that the container joins. A container that joins the namespace of another container
    /// of its pod, as an ephemeral container joins its target's, shares that container's lease and gets none
    /// of its own.
    pub joins: Option<PidNamespace>,
}

/// The names that Kubernetes gives a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodContainer {
    /// The pod's Kubernetes namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's UID.
    pub uid: String,
    /// The container's name in the pod.
    pub container: String,
}

/// Length limit of a Kubernetes name, in bytes.
const LONGEST_NAME: usize = 253;

impl PodContainer {
    /// Returns the container with these names, or `None` if one of them is not a valid Kubernetes name. An
    /// engine can be called with invalid names, and listings must be safe to print.
    pub fn new(namespace: &str, pod: &str, uid: &str, container: &str) -> Option<Self> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let is_name = |name: &&str| (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(is_plain);
        [namespace, pod, uid, container].iter().all(is_name).then(|| Self {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            uid: uid.to_owned(),
            container: container.to_owned(),
        })
    }
}

impl fmt::Display for PodContainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.pod, self.container)
    }
}

/// Describes a request for a pod's share in words. Equal requests give equal words, and the store compares
/// requests by them. A restarted container sends either the words of its first start, even if `gpushare
/// update` changed the lease since then, or those of the pod's current annotations, which are in
/// [`Change::pod_request`].
///
/// [`Change::pod_request`]: crate::Change::pod_request
///
/// # Errors
/// When the request names a GPU that is not there.
pub fn words(request: &Request, gpus: &[Gpu]) -> Result<String, Refusal> {
    let mut words = match request.mode {
        Mode::Exclusive => "whole GPUs".to_owned(),
        Mode::TimeSlice => format!("time slices with {}", request.memory),
        Mode::Share => share(&Share { memory: request.memory, cores: request.cores }),
        Mode::Mps => format!("mps, {}", share(&Share { memory: request.memory, cores: request.cores })),
    };
    words += &format!(" on {}", devices(&request.devices, gpus)?);
    let mut particular: Vec<&(GpuUuid, Share)> = request.particular.iter().collect();
    particular.sort_by_key(|(gpu, _)| gpu.bytes());
    for (gpu, of_it) in particular {
        words += &format!(", {} on {gpu}", share(of_it));
    }
    let model = request.model.to_string();
    if !model.is_empty() {
        words += &format!(", model {model}");
    }
    if let Some(most) = request.burst {
        words += &format!(", at most {most}");
    }
    if let Some(most) = request.memory_limit {
        words += &format!(", growing to {most}");
    }
    if request.host_memory != DeviceMemory::ZERO {
        words += &format!(", {} of host memory", request.host_memory);
    }
    if Enforcement::of(request) == Enforcement::Foreign {
        words += ", held by another system's library";
    }
    Ok(format!(
        "{words}, compute policy {}, priority {}",
        request.compute_policy.name(),
        request.priority.level()
    ))
}

fn share(share: &Share) -> String {
    match share.cores {
        Some(cores) => format!("{} and {cores} of compute", share.memory),
        None => share.memory.to_string(),
    }
}

/// Names GPUs by their UUIDs, regardless of how the request names them.
fn devices(devices: &Devices, gpus: &[Gpu]) -> Result<String, Refusal> {
    Ok(match devices {
        Devices::Any(1) => "1 GPU".to_owned(),
        Devices::Any(count) => format!("{count} GPUs"),
        Devices::All => "all GPUs".to_owned(),
        Devices::These(list) => {
            let uuids: Result<Vec<String>, Refusal> =
                list.iter().map(|selector| Ok(find_gpu(selector, gpus)?.uuid.to_string())).collect();
            uuids?.join(" and ")
        }
        Devices::Among(count, uuids) => {
            let mut uuids: Vec<String> = uuids.iter().map(ToString::to_string).collect();
            uuids.sort_unstable();
            format!("{count} of {}", uuids.join(" and "))
        }
    })
}

#[cfg(test)]
mod tests {
    use gpushare_claims::{Cores, MemoryRequest};

    use super::*;
    use crate::place::tests::{gpu, request_on};

    #[test]
    fn only_what_may_be_printed_is_a_name() {
        let named = PodContainer::new("team", "web-0", "0b5c-1f6e", "main.a_1").unwrap();
        assert_eq!(named.to_string(), "team/web-0/main.a_1");
        for strange in ["", "a b", "a/b", "a\n", "\u{1b}[2J", "\u{e9}", &"a".repeat(254)] {
            assert_eq!(PodContainer::new("team", strange, "uid", "main"), None, "{strange:?}");
            assert_eq!(PodContainer::new("team", "web", "uid", strange), None, "{strange:?}");
        }
    }

    #[test]
    fn a_gpu_has_one_name_in_the_words_of_a_pod() {
        let gpus = [gpu(0, 80), gpu(1, 80)];
        let by = |name: &str| {
            let env = ["GPUSHARE_MEMORY=4GiB", &format!("GPUSHARE_DEVICES={name}")];
            words(&request_on(&gpus, &env), &gpus)
        };
        let uuid = gpus[1].uuid.to_string();
        assert_eq!(by("1").unwrap(), by(&uuid).unwrap());
        assert!(by("1").unwrap().contains(&format!("4 GiB on {uuid}")), "{:?}", by("1"));
    }

    #[test]
    fn every_figure_of_a_request_is_in_the_words_of_a_pod() {
        let gpus = [gpu(0, 80), gpu(1, 80)];
        let request = |env: &[&str]| request_on(&gpus, env);
        let first = request(&["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=30"]);
        let particular = (gpu(1, 80).uuid, Share { memory: MemoryRequest::Rest, cores: None });
        let others = [
            request(&["GPUSHARE_MEMORY=5GiB", "GPUSHARE_CORES=30"]),
            request(&["GPUSHARE_MEMORY=5%", "GPUSHARE_CORES=30"]),
            request(&["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=31"]),
            request(&["GPUSHARE_MEMORY=4GiB"]),
            request(&["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=30", "GPUSHARE_COUNT=2"]),
            request(&["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=30", "GPUSHARE_DEVICES=0"]),
            request(&["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=30", "GPUSHARE_MODEL=H100"]),
            request(&["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=30", "GPUSHARE_PRIORITY=9"]),
            request(&["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=30", "GPUSHARE_COMPUTE_POLICY=burst"]),
            Request { burst: Cores::new(50), ..first.clone() },
            Request { particular: vec![particular], ..first.clone() },
            Request::whole(Devices::Any(1)),
        ];
        let said = |request: &Request| words(request, &gpus).unwrap();
        assert_eq!(said(&first), said(&request(&["GPUSHARE_MEMORY=4096MiB", "GPUSHARE_CORES=30%"])));
        for other in &others {
            assert_ne!(said(&first), said(other), "{other:?}");
        }
    }
}
