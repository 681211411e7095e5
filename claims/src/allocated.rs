//! What kubelet allocated to a container, as the node's agent noted it.

use gpushare_inventory::{DeviceMemory, GpuUuid};
use serde::{Deserialize, Serialize};

use crate::grammar::Cores;

/// All that kubelet allocated to one container; empty where it allocated no GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Allocated(pub Vec<AllocatedPart>);

/// What one resource or claim of the pod gives the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllocatedPart {
    /// The resource's or the claim's name, for messages.
    pub by: String,
    /// The GPU; `None` where kubelet counts amounts and another scheduler chooses the GPU.
    pub gpu: Option<GpuUuid>,
    /// The number of GPUs, at least 1; 1 where `gpu` names one.
    pub count: usize,
    /// Memory on each of them; `None` where only GPUs are counted.
    pub memory: Option<DeviceMemory>,
    /// Compute on each of them in percent; `None` where it is not counted.
    pub cores: Option<Cores>,
    /// Whether all containers of the pod that have it hold it together.
    pub is_pods: bool,
}

impl Allocated {
    /// Whether kubelet allocated no GPU, nor a part of one.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
