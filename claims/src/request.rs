//! The request of one container in gpushare's own terms, independent of the dialect that it came from.

use gpushare_inventory::{Capabilities, DeviceMemory, GpuUuid};

use crate::devices::{DeviceSelector, Devices};
use crate::grammar::{ComputePolicy, Cores, MemoryRequest, Mode, Priority, Scope};
use crate::library::Interceptor;
use crate::model::ModelFilter;
use crate::policy::InterceptorPolicy;

/// The request of one container after all claims are merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Memory on each GPU that `particular` does not list.
    pub memory: MemoryRequest,
    /// Compute on each GPU that `particular` does not list; `None` means no limit.
    pub cores: Option<Cores>,
    /// GPUs whose share differs from `memory` and `cores`.
    pub particular: Vec<(GpuUuid, Share)>,
    /// The GPUs, or their number.
    pub devices: Devices,
    /// The GPU models that the container accepts.
    pub model: ModelFilter,
    /// Whether it gets a share of each GPU or whole GPUs.
    pub mode: Mode,
    /// How the compute share is enforced.
    pub compute_policy: ComputePolicy,
    /// The most compute that [`ComputePolicy::Burst`] may use; `None` allows all idle time.
    pub burst: Option<Cores>,
    /// The memory to which the container may grow on each GPU, above `memory`, which is then in bytes and the
    /// same on all GPUs; `None` means that it does not grow.
    pub memory_limit: Option<DeviceMemory>,
    /// Total host memory, over all GPUs, that may stand in for GPU memory once the share is full.
    pub host_memory: DeviceMemory,
    /// The parts of the driver (compute, video and so on) that the container gets.
    pub capabilities: Capabilities,
    /// The share's priority, 0 (low) to 9.
    pub priority: Priority,
    /// Whether the container or its whole pod holds the share.
    pub scope: Scope,
    /// The lease that the node reserved for the container's resource claim. The container joins it and gets
    /// no lease of its own.
    pub reserved: Option<i64>,
    /// Names of the dialects in which other systems wrote the request; empty for gpushare's own keys.
    pub dialects: Vec<&'static str>,
    /// Variables of other systems, with the value that each must have in the container to match the grant.
    pub variables: Vec<(String, String)>,
    /// Whether the granted GPUs differ from the container's list, or come in another order, while the bundle
    /// has limits that may count by position.
    pub moves_limits: bool,
    /// Minors of the GPUs whose nodes the engine was handed, or of those in CDI files if it was handed none.
    /// [`crate::HANDED`] keeps them, since a CDI file may be gone when the bundle runs again.
    pub handed: Vec<u32>,
    /// Minors of the nodes of MIG instances that the engine was handed with them.
    pub handed_capabilities: Vec<u32>,
    /// Another system's interception library in the bundle, and how to treat it.
    pub interceptor: Option<(Interceptor, InterceptorPolicy)>,
    /// Whether a supervisor must hold the share.
    pub needs_supervisor: bool,
    /// Whether a supervisor outside the container holds its memory. The node decides that, not the request.
    pub is_supervised: bool,
    /// Whether that supervisor also holds its compute.
    pub is_scheduled: bool,
    /// The system in whose words the container's programs read the grant.
    pub told: Option<Told>,
    /// Messages about decisions that the requesting user may not expect.
    pub notes: Vec<String>,
}

/// A system in whose words gpushare publishes the grant to programs in the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Alibaba's gpushare, with the number of bytes in one of its units.
    Aliyun {
        /// Bytes of one unit.
        unit: u64,
    },
    /// HAMi and Volcano's vgpu.
    Hami,
}

/// The request's amounts on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Memory in bytes, in percent of the GPU, or all that is left.
    pub memory: MemoryRequest,
    /// Percent of compute; `None` means no limit.
    pub cores: Option<Cores>,
}

/// The GPU list that the wrapper leaves in a granted bundle, for a later run of the same bundle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kept {
    /// The list as the engine wrote it.
    #[default]
    AsWritten,
    /// The granted GPUs. The old list alone could mean more than was granted, or another GPU: other sources
    /// also took part in the decision, and its numbers may have been minors because of a mark that is gone.
    Granted(Vec<GpuUuid>),
    /// No list: limits that count by position in the list would apply to the wrong GPU.
    Nothing,
}

impl Request {
    /// Asks for this memory on each of these GPUs, with defaults for everything else.
    pub fn new(devices: Devices, memory: MemoryRequest) -> Self {
        Self {
            memory,
            cores: None,
            particular: Vec::new(),
            devices,
            model: ModelFilter::default(),
            mode: Mode::Share,
            compute_policy: ComputePolicy::Fixed,
            burst: None,
            memory_limit: None,
            host_memory: DeviceMemory::ZERO,
            capabilities: Capabilities::default(),
            priority: Priority::default(),
            scope: Scope::Container,
            reserved: None,
            dialects: Vec::new(),
            variables: Vec::new(),
            moves_limits: false,
            handed: Vec::new(),
            handed_capabilities: Vec::new(),
            interceptor: None,
            needs_supervisor: false,
            is_supervised: false,
            is_scheduled: false,
            told: None,
            notes: Vec::new(),
        }
    }

    /// Asks for these GPUs as a whole; they are never shared with other containers.
    pub fn whole(devices: Devices) -> Self {
        Self { mode: Mode::Exclusive, ..Self::new(devices, MemoryRequest::Percent(100)) }
    }

    /// The GPU list that the bundle keeps for a later run.
    pub fn kept(&self) -> Kept {
        let Devices::These(list) = &self.devices else { return Kept::AsWritten };
        let uuid = |selector: &DeviceSelector| match selector {
            DeviceSelector::Uuid(uuid) => Some(*uuid),
            _ => None,
        };
        match list.iter().map(uuid).collect() {
            _ if self.moves_limits => Kept::Nothing,
            Some(gpus) => Kept::Granted(gpus),
            None => Kept::AsWritten,
        }
    }

    /// The request's share on this GPU.
    pub fn on(&self, gpu: GpuUuid) -> Share {
        let particular = self.particular.iter().find(|(other, _)| *other == gpu);
        particular.map_or(Share { memory: self.memory, cores: self.cores }, |(_, share)| *share)
    }
}
