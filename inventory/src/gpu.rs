//! One GPU of the inventory, and the folders in which the driver lists all GPUs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::device_node::DeviceNode;
use crate::error::NodeError;
use crate::memory::DeviceMemory;
use crate::place::Place;
use crate::proc;
use crate::uuid::GpuUuid;

/// One GPU as the driver's `/proc` files describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Index as NVML counts, in the order of PCI addresses.
    pub index: u32,
    /// UUID, the GPU's identity.
    pub uuid: GpuUuid,
    /// The N of `/dev/nvidiaN`; it may differ from the index.
    pub minor: u32,
    /// Model name as the driver states it; `unknown` if it does not.
    pub model: String,
    /// The whole memory; `None` if it is not in [`Totals`](crate::Totals) yet.
    pub memory: Option<DeviceMemory>,
    /// The GPU's device node.
    pub node: DeviceNode,
    /// Where it sits in the machine.
    pub place: Place,
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
