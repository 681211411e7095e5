//! What a node's agent tells the cluster of its GPUs where they are counted by resources: a ConfigMap for
//! each node, beside the agents. Schedulers of claims read ResourceSlices in place of it. And what the
//! scheduler extender tells agents: the GPUs that it chose for a pod.

use std::collections::BTreeMap;

use gpushare_placement::{Gpu, Machine};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use serde::{Deserialize, Serialize};

use crate::asks::Terms;
use crate::resource::{Resource, Unit};

/// The label of these ConfigMaps.
pub const LABEL: &str = "gpushare.io/node-gpus";
/// The key of the node's GPUs, as JSON.
const GPUS: &str = "gpus";
/// The key of the pods that have other GPUs than their annotations say, as JSON.
const PLACED: &str = "placed";
/// What the names of the ConfigMaps begin with; the node's name follows.
const PREFIX: &str = "gpus.";

/// The annotation with the GPUs' indexes by container, as JSON. It is advice for the node's agent: who forges
/// it gets no more than the pod's resources say.
pub const PLACEMENT: &str = "scheduler.gpushare.io/gpus";

/// Indexes of GPUs by container.
pub type Placement = BTreeMap<String, Vec<u32>>;

/// The GPUs that a pod's annotation names.
pub fn placement(pod: &Pod) -> Option<Placement> {
    serde_json::from_str(pod.metadata.annotations.as_ref()?.get(PLACEMENT)?).ok()
}

/// The GPUs of a node, and what is counted of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeGpus {
    /// By index.
    pub gpus: Vec<ShownGpu>,
    /// The resources that the node serves.
    pub resources: Vec<Resource>,
    /// Percent of compute of a container that names none; 0 is no limit.
    pub default_cores: u16,
    /// As [`Terms::gives_split`].
    #[serde(default)]
    pub gives_split: bool,
    /// Where kubelet has put containers, where it is not where their pods' annotations say: indexes of GPUs
    /// by the pod's UID and the container's name.
    #[serde(skip)]
    pub placed: Placed,
}

/// Indexes of GPUs by container, by the UID of the pod.
pub type Placed = BTreeMap<String, Placement>;

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownGpu {
    /// Its UUID.
    pub uuid: String,
    /// Its index on the node, in the order of the PCI bus.
    pub index: u32,
    /// The number in the name of its device node.
    pub minor: u32,
    /// Its model.
    pub model: String,
    /// Bytes that all shares together may have.
    pub memory: u64,
    /// Bytes that one share may have at most.
    pub per_share: u64,
    /// Bytes of a container that names none.
    pub default_memory: u64,
    /// Percent of its compute that all shares together may have.
    pub cores: u16,
    /// GPUs that reach each other by NVLink have the same text; empty where it is not known.
    #[serde(default)]
    pub nvlink_group: String,
    /// Whether new shares of it are given.
    pub is_open: bool,
}

impl ShownGpu {
    /// The GPU for the ledger, of no group and with any number of shares.
    pub fn gpu(&self) -> Gpu {
        Gpu {
            memory: self.memory,
            per_share: self.per_share,
            default_memory: self.default_memory,
            cores: self.cores,
            is_open: self.is_open,
            ..Gpu::default()
        }
    }
}

impl NodeGpus {
    /// The name of a node's ConfigMap.
    pub fn name_of(node: &str) -> String {
        format!("{PREFIX}{node}")
    }

    /// The node that a ConfigMap is of.
    pub fn node_of(name: &str) -> Option<&str> {
        name.strip_prefix(PREFIX)
    }

    /// As the ConfigMap's data.
    ///
    /// # Errors
    /// None that can happen: it is JSON of plain values.
    pub fn data(&self) -> serde_json::Result<BTreeMap<String, String>> {
        let (gpus, placed) = (serde_json::to_string(self)?, serde_json::to_string(&self.placed)?);
        Ok(BTreeMap::from([(GPUS.to_owned(), gpus), (PLACED.to_owned(), placed)]))
    }

    /// What a ConfigMap tells.
    ///
    /// # Errors
    /// When it is none of an agent of this version.
    pub fn read(map: &ConfigMap) -> serde_json::Result<Self> {
        let data = map.data.as_ref();
        let text = |key: &str| data.and_then(|data| data.get(key)).map_or("{}", String::as_str);
        Ok(Self { placed: serde_json::from_str(text(PLACED))?, ..serde_json::from_str(text(GPUS))? })
    }

    /// The node for the ledger.
    pub fn machine(&self, cpu: u64) -> Machine {
        let mut groups: Vec<&str> = Vec::new();
        let shares = self.resources.iter().find_map(|resource| match resource.unit {
            Unit::Slot(count) | Unit::Replica(count) => Some(count),
            _ => None,
        });
        let shares = shares.unwrap_or(0);
        let gpus = self.gpus.iter().map(|gpu| {
            let name = &*gpu.nvlink_group;
            if !name.is_empty() && !groups.contains(&name) {
                groups.push(name);
            }
            let group = groups.iter().position(|group| *group == name).map_or(0, |at| at + 1);
            Gpu { shares, group: u8::try_from(group).unwrap_or(0), ..gpu.gpu() }
        });
        Machine { cpu, memory: 0, model: 0, gpus: gpus.collect() }
    }

    /// What it makes of resources.
    pub fn terms(&self) -> Terms {
        Terms {
            resources: self.resources.clone(),
            default_cores: self.default_cores,
            gives_split: self.gives_split,
        }
    }

    /// The place in the list of the GPU with this index on the node.
    pub fn at(&self, index: u32) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.index == index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::System;

    #[test]
    fn a_config_map_tells_what_the_agent_wrote() {
        let gpu = |index: u32, group: &str| ShownGpu {
            uuid: format!("GPU-{index}"),
            index,
            memory: 80 << 30,
            per_share: 80 << 30,
            cores: 100,
            nvlink_group: group.into(),
            is_open: true,
            ..ShownGpu::default()
        };
        let placed = BTreeMap::from([("uid".to_owned(), BTreeMap::from([("main".to_owned(), vec![1])]))]);
        let gpus = vec![gpu(0, "a"), gpu(1, "b"), gpu(2, "a"), gpu(3, "")];
        let node = NodeGpus { gpus, placed, ..NodeGpus::default() };
        let map = ConfigMap { data: Some(node.data().unwrap()), ..ConfigMap::default() };
        assert_eq!(NodeGpus::read(&map).unwrap(), node);
        let groups: Vec<u8> = node.machine(0).gpus.iter().map(|gpu| gpu.group).collect();
        assert_eq!(groups, [1, 2, 1, 0]);
        let slot = Resource { name: "nvidia.com/gpu".into(), unit: Unit::Slot(10), system: System::Hami };
        let shares = |node: &NodeGpus| node.machine(0).gpus[0].shares;
        assert_eq!(shares(&NodeGpus { resources: vec![slot], ..node.clone() }), 10, "kubelet gives no more");
        assert_eq!(shares(&node), 0);
        assert_eq!(NodeGpus::node_of(&NodeGpus::name_of("node-a")), Some("node-a"));
        assert!(NodeGpus::read(&ConfigMap::default()).is_err());
    }
}
