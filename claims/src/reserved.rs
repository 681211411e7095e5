//! What the node reserved for a container before it was created.

use gpushare_inventory::{DeviceMemory, GpuUuid};

use crate::grammar::Cores;

/// The part of a resource claim's lease that one container gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// The claim as `NAMESPACE/NAME`, for messages.
    pub claim: String,
    /// Number of its lease.
    pub lease: i64,
    /// One entry for each GPU, in the container's order.
    pub shares: Vec<ReservedShare>,
}

/// What is reserved on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedShare {
    /// UUID of the GPU.
    pub gpu: GpuUuid,
    /// Memory that all containers of the claim may use on it together.
    pub memory: DeviceMemory,
    /// Compute share in percent; `None` is no limit.
    pub cores: Option<Cores>,
}
