//! One GPU, and the folders in which the driver shows all of them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::device_node::DeviceNode;
use crate::error::NodeError;
use crate::memory::DeviceMemory;
use crate::proc;
use crate::uuid::GpuUuid;

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The index that users and NVML count by: PCI order.
    pub index: u32,
    /// The identity.
    pub uuid: GpuUuid,
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    /// The model's name.
    pub model: String,
    /// The whole memory; `None` while nobody asked NVML.
    pub memory: Option<DeviceMemory>,
    /// The device node.
    pub node: DeviceNode,
}

/// Domain, bus, device and function.
pub(crate) type PciAddress = (u32, u8, u8, u8);
pub(crate) type PciFolder = (PciAddress, PathBuf);

/// The folders of the GPUs below `folder`, in no order.
pub(crate) fn pci_folders(folder: &Path) -> Result<Vec<PciFolder>, NodeError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(_) => return Err(NodeError::NoGpu { path: folder.into() }),
    };
    let named = entries.filter_map(Result::ok).filter_map(|entry| {
        let address = entry.file_name().to_str().and_then(proc::pci_address)?;
        Some((address, entry.path()))
    });
    Ok(named.collect())
}
