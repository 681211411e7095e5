//! What one container asks for, in gpushare's own terms. From here on it does not matter which dialect said
//! it.

use gpushare_inventory::{Capabilities, DeviceMemory, GpuUuid};

use crate::devices::{DeviceSelector, Devices};
use crate::grammar::{ComputePolicy, Cores, MemoryRequest, Mode, Priority, Scope};
use crate::library::Interceptor;
use crate::model::ModelFilter;
use crate::policy::InterceptorPolicy;

/// What one container asks for, after all claims are merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Memory on each GPU that `particular` does not list.
    pub memory: MemoryRequest,
    /// Compute on each GPU that `particular` does not list; `None` is no limit.
    pub cores: Option<Cores>,
    /// GPUs whose share differs from `memory` and `cores`.
    pub particular: Vec<(GpuUuid, Share)>,
    /// Which GPUs, or how many.
    pub devices: Devices,
    /// The GPU models that the container accepts.
    pub model: ModelFilter,
    /// Whether it gets a share of each GPU or whole GPUs.
    pub mode: Mode,
    /// How the compute share is enforced.
    pub compute_policy: ComputePolicy,
    /// The most compute that [`ComputePolicy::Burst`] may use; `None` allows all idle time.
    pub burst: Option<Cores>,
    /// The most memory on each GPU that the container may grow to, above `memory`, which is in bytes and the
    /// same on all of them then; `None`: it does not grow.
    pub memory_limit: Option<DeviceMemory>,
    /// Host memory that may stand in for the GPU's where a share's own is full, over all its GPUs.
    pub host_memory: DeviceMemory,
    /// The parts of the driver (compute, video and so on) that the container gets.
    pub capabilities: Capabilities,
    /// The share's priority, 0 (low) to 9.
    pub priority: Priority,
    /// Whether the container or its whole pod holds the share.
    pub scope: Scope,
    /// The lease that the node reserved for the container's resource claim: the container joins it and gets
    /// none of its own.
    pub reserved: Option<i64>,
    /// Names of the dialects in which other systems wrote the request; empty for gpushare's own keys.
    pub dialects: Vec<&'static str>,
    /// Variables of other systems, with the value that each must have in the container so that it states what
    /// was granted.
    pub variables: Vec<(String, String)>,
    /// Whether the granted GPUs differ from the container's list, or are in another order, while the bundle
    /// has limits that may count by position.
    pub moves_limits: bool,
    /// Minors of the GPUs whose nodes the engine was handed, or of those in CDI files where it was handed
    /// none. [`crate::HANDED`] keeps them, since a CDI file may be gone when the bundle is run again.
    pub handed: Vec<u32>,
    /// Minors of the nodes of MIG instances that the engine was handed beside them.
    pub handed_capabilities: Vec<u32>,
    /// Another system's interception library in the bundle, and what happens to it.
    pub interceptor: Option<(Interceptor, InterceptorPolicy)>,
    /// Whether it must be held by a supervisor.
    pub needs_supervisor: bool,
    /// Whether a supervisor outside of the container holds its memory. The node decides that, not who asks.
    pub is_supervised: bool,
    /// Whether that supervisor is to hold its compute, too.
    pub is_scheduled: bool,
    /// Another system's words for the grant, for programs in the container that read them.
    pub told: Option<Told>,
    /// Messages about decisions that the person who asked may not expect.
    pub notes: Vec<String>,
}

/// A system in whose words the grant is told to programs in the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Alibaba's gpushare, with the bytes that its numbers count.
    Aliyun {
        /// Bytes of one unit.
        unit: u64,
    },
    /// HAMi and Volcano's vgpu.
    Hami,
}

/// What a request asks for on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Memory, in bytes, in percent of the GPU, or all that is left.
    pub memory: MemoryRequest,
    /// Percent of compute; `None` is no limit.
    pub cores: Option<Cores>,
}

/// What the wrapper leaves of the list of GPUs in a granted bundle, for a later run of the same bundle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kept {
    /// The list as the engine wrote it.
    #[default]
    AsWritten,
    /// The GPUs that were granted. The old list alone could mean more than was granted, or another GPU: other
    /// sources also decided, and its numbers may have been minors because of a mark that is gone.
    Granted(Vec<GpuUuid>),
    /// No list: limits that count by the list's positions would apply to the wrong GPU.
    Nothing,
}

impl Request {
    /// Asks for this memory on each of these GPUs, with the default for everything else.
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

    /// Asks for these GPUs whole, of which no other container gets a share.
    pub fn whole(devices: Devices) -> Self {
        Self { mode: Mode::Exclusive, ..Self::new(devices, MemoryRequest::Percent(100)) }
    }

    /// What the bundle keeps of its list of GPUs for a later run.
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

    /// What the request asks for on this GPU.
    pub fn on(&self, gpu: GpuUuid) -> Share {
        let particular = self.particular.iter().find(|(other, _)| *other == gpu);
        particular.map_or(Share { memory: self.memory, cores: self.cores }, |(_, share)| *share)
    }
}
