//! The share that the node reserved for a container before creation.

use gpushare_inventory::{DeviceMemory, GpuUuid};

use crate::grammar::Cores;

/// The part of a resource claim's lease that one container gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// The claim as `NAMESPACE/NAME`, for messages.
    pub claim: String,
    /// Number of the claim's lease.
    pub lease: i64,
    /// One entry for each GPU, in the container's order.
    pub shares: Vec<ReservedShare>,
}

/// The reserved share of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedShare {
    /// UUID of the GPU.
    pub gpu: GpuUuid,
    /// Memory that all containers of the claim may use together.
    pub memory: DeviceMemory,
    /// Compute share in percent; `None` means no limit.
    pub cores: Option<Cores>,
}
