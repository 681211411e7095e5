//! How much of a GPU a word states.

use gpushare_inventory::DeviceMemory;

use crate::grammar::{Cores, MemoryRequest};

/// A limit on compute as it was stated. Its order is that of what may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cap {
    /// This much of a GPU.
    Percent(Cores),
    /// Stated in so many words that there is none.
    Unlimited,
}

impl Cap {
    /// `percent` of a GPU, of which 100 are no limit; `None` outside 1 to 100.
    pub fn of(percent: u64) -> Option<Self> {
        u8::try_from(percent).ok().and_then(Cores::new).map(Self::from)
    }
}

impl From<Cores> for Cap {
    fn from(cores: Cores) -> Self {
        if cores == Cores::ALL { Self::Unlimited } else { Self::Percent(cores) }
    }
}

/// What is said of one GPU; `None` is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Of its memory.
    pub memory: Option<MemoryRequest>,
    /// Of its compute.
    pub cores: Option<Cap>,
}

impl Amount {
    /// This much memory.
    pub fn memory(memory: DeviceMemory) -> Self {
        Self { memory: Some(MemoryRequest::Bytes(memory)), cores: None }
    }

    /// This much compute.
    pub fn cores(cap: Cap) -> Self {
        Self { memory: None, cores: Some(cap) }
    }
}
