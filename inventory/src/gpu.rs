//! One GPU of the inventory, and the folders in which the driver lists all GPUs.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::device_node::DeviceNode;
use crate::error::NodeError;
use crate::memory::DeviceMemory;
use crate::mig::Instance;
use crate::place::Place;
use crate::proc;
use crate::uuid::GpuUuid;

/// One GPU as the driver's `/proc` files describe it, or a MIG instance. A container can have a share of
/// either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Index in NVML, in the order of PCI addresses; an instance has that of its GPU.
    pub index: u32,
    /// UUID, the identity of the GPU or instance.
    pub uuid: GpuUuid,
    /// The N of `/dev/nvidiaN`; it may differ from the index, and is the same for all instances of one GPU.
    pub minor: u32,
    /// Model name from the driver, with the profile for an instance; `unknown` if there is none.
    pub model: String,
    /// The memory that programs can allocate; `None` if it is not in [`Totals`](crate::Totals) yet.
    pub memory: Option<DeviceMemory>,
    /// The GPU's device node.
    pub node: DeviceNode,
    /// Its location in the machine.
    pub place: Place,
    /// The data of an instance; `None` for a whole GPU.
    pub instance: Option<Instance>,
}

impl Gpu {
    /// UUID of the physical GPU: its own, or that of the GPU that contains the instance.
    pub fn card(&self) -> GpuUuid {
        self.instance.as_ref().map_or(self.uuid, |instance| instance.card)
    }

    /// Every device node that opens it: `/dev/nvidiaN`, and those of an instance.
    pub fn nodes(&self) -> impl Iterator<Item = &DeviceNode> {
        [&self.node].into_iter().chain(self.instance.iter().flat_map(|instance| &instance.nodes))
    }

    /// The number that users write: `0`, or `0:1` for an instance.
    pub fn number(&self) -> String {
        match &self.instance {
            Some(instance) => format!("{}:{}", self.index, instance.position),
            None => self.index.to_string(),
        }
    }
}

impl fmt::Display for Gpu {
    /// Formats it for messages: `GPU 0 (GPU-…)`, `MIG 0:1 1g.10gb (MIG-…)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.instance {
            Some(instance) => write!(f, "MIG {} {} ({})", self.number(), instance.profile, self.uuid),
            None => write!(f, "GPU {} ({})", self.index, self.uuid),
        }
    }
}

/// PCI domain, bus, device and function.
pub(crate) type PciAddress = (u32, u8, u8, u8);
pub(crate) type PciFolder = (PciAddress, PathBuf);

/// The folder of each GPU below `folder`, unsorted.
pub(crate) fn pci_folders(folder: &Path) -> Result<Vec<PciFolder>, NodeError> {
    let entries = fs::read_dir(folder).map_err(|_| NodeError::NoGpu { path: folder.into() })?;
    let named = entries.filter_map(Result::ok).filter_map(|entry| {
        let address = entry.file_name().to_str().and_then(proc::pci_address)?;
        Some((address, entry.path()))
    });
    Ok(named.collect())
}
