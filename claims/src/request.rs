//! What one container asks for, dialect forgotten.

use gpushare_inventory::{Capabilities, GpuUuid};

use crate::grammar::{ComputePolicy, Cores, DeviceSelector, Devices, MemoryRequest, Mode, Priority, Scope};
use crate::library::Interceptor;
use crate::model::ModelFilter;
use crate::policy::InterceptorPolicy;

/// What one container asks for, dialect forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Memory on each GPU.
    pub memory: MemoryRequest,
    /// Compute on each GPU; `None` is no limit.
    pub cores: Option<Cores>,
    /// What differs from these two, by GPU.
    pub particular: Vec<(GpuUuid, Share)>,
    /// Which GPUs, or how many.
    pub devices: Devices,
    /// Which models will do.
    pub model: ModelFilter,
    /// How GPUs are given.
    pub mode: Mode,
    /// How the compute share is held.
    pub compute_policy: ComputePolicy,
    /// The most compute that [`ComputePolicy::Burst`] may use; `None` is all that is idle.
    pub burst: Option<Cores>,
    /// Parts of the driver.
    pub capabilities: Capabilities,
    /// 0 (low) to 9.
    pub priority: Priority,
    /// Whose the share is.
    pub scope: Scope,
    /// The other systems whose words these are, by the names of their dialects.
    pub dialects: Vec<&'static str>,
    /// Variables of theirs, each as it shall stand once in the container: with what was granted.
    pub variables: Vec<(String, String)>,
    /// Whether its GPUs are others than the list names, or in another order, beside limits that may count by position.
    pub moves_limits: bool,
    /// The minor numbers of the GPUs whose nodes the engine was handed, or that CDI specifications told where it was handed
    /// none: [`crate::HANDED`] keeps them, since a specification may be gone when the bundle is run again.
    pub handed: Vec<u32>,
    /// Another system's interception library in the bundle, and what becomes of it.
    pub interceptor: Option<(Interceptor, InterceptorPolicy)>,
    /// What was decided on the way that whoever asked may not expect, in words.
    pub notes: Vec<String>,
}

/// What a request wants of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Memory.
    pub memory: MemoryRequest,
    /// Compute; `None` is no limit.
    pub cores: Option<Cores>,
}

/// What a granted bundle keeps of its list of GPUs, for when it is run again without being written anew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kept {
    /// The list as it was written.
    #[default]
    AsWritten,
    /// The GPUs that were granted. Other sources had a say in it, and the numbers may have been minors by a mark that is
    /// gone: alone the list could mean more than was granted, or another GPU.
    Granted(Vec<GpuUuid>),
    /// Nothing: limits that count by the list's positions would be another GPU's.
    Nothing,
}

impl Request {
    /// This much memory on each of these GPUs, and everything else as it is when nobody says anything.
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
            capabilities: Capabilities::default(),
            priority: Priority::default(),
            scope: Scope::Container,
            dialects: Vec::new(),
            variables: Vec::new(),
            moves_limits: false,
            handed: Vec::new(),
            interceptor: None,
            notes: Vec::new(),
        }
    }

    /// These GPUs whole, which nobody else gets a share of.
    pub fn whole(devices: Devices) -> Self {
        Self { mode: Mode::Exclusive, ..Self::new(devices, MemoryRequest::Percent(100)) }
    }

    /// What a bundle that is run again has for its list of GPUs.
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

    /// What is wanted of this GPU.
    pub fn on(&self, gpu: GpuUuid) -> Share {
        let particular = self.particular.iter().find(|(other, _)| *other == gpu);
        particular.map_or(Share { memory: self.memory, cores: self.cores }, |(_, share)| *share)
    }
}
