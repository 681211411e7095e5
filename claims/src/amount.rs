//! How much memory and compute of one GPU a word states.

use gpushare_inventory::DeviceMemory;

use crate::grammar::{Cores, MemoryRequest};

/// A stated limit on compute. Limits that allow more compute order higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cap {
    /// This percentage of a GPU's compute.
    Percent(Cores),
    /// An explicit statement that there is no limit. This differs from saying nothing.
    Unlimited,
}

impl Cap {
    /// `percent` of a GPU; 100 becomes [`Cap::Unlimited`]. `None` outside 1 to 100.
    pub fn of(percent: u64) -> Option<Self> {
        u8::try_from(percent).ok().and_then(Cores::new).map(Self::from)
    }
}

impl From<Cores> for Cap {
    fn from(cores: Cores) -> Self {
        if cores == Cores::ALL { Self::Unlimited } else { Self::Percent(cores) }
    }
}

/// The amounts that a claim states for one GPU; `None` means that it states nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// The share of the GPU's memory.
    pub memory: Option<MemoryRequest>,
    /// The share of the GPU's compute.
    pub cores: Option<Cap>,
}

impl Amount {
    /// States this much memory and no compute.
    pub fn memory(memory: DeviceMemory) -> Self {
        Self { memory: Some(MemoryRequest::Bytes(memory)), cores: None }
    }

    /// States this compute limit and no memory.
    pub fn cores(cap: Cap) -> Self {
        Self { memory: None, cores: Some(cap) }
    }
}
