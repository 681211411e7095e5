//! The GPUs that kubelet allocated to a container, as recorded by the node's agent.

use gpushare_inventory::{DeviceMemory, GpuUuid};
use serde::{Deserialize, Serialize};

use crate::grammar::Cores;

/// Everything that kubelet allocated to one container; empty if it allocated no GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Allocated(pub Vec<AllocatedPart>);

/// The part that one resource or claim of the pod gives the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllocatedPart {
    /// The name of the resource or claim, for messages.
    pub by: String,
    /// The GPU; `None` if kubelet counts amounts and another scheduler chooses the GPU.
    pub gpu: Option<GpuUuid>,
    /// The number of GPUs, at least 1; 1 if `gpu` names one.
    pub count: usize,
    /// Memory on each of them; `None` if only GPUs are counted.
    pub memory: Option<DeviceMemory>,
    /// Compute on each of them in percent; `None` if it is not counted.
    pub cores: Option<Cores>,
    /// Whether all containers of the pod that have this part share it.
    pub is_pods: bool,
}

impl Allocated {
    /// Whether kubelet allocated neither a GPU nor a part of one.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
