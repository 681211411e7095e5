//! The inventory of this node: its GPUs, their device nodes and the driver's files, read from `/proc` and the
//! file system.
//!
//! NVML is never loaded here. Without persistence mode it takes a tenth of a second or more to start, and a
//! static program cannot load it. `/proc` has everything except the size of a GPU's memory. The size comes
//! from [`Totals`], a cache that `gpushare inventory refresh` fills from NVML once per boot and driver
//! version.
#![forbid(unsafe_code)]

mod capability;
mod cdi;
mod device_files;
mod device_node;
mod driver;
pub mod elf;
mod error;
mod fault;
mod file_lease;
mod folder;
mod gpu;
#[cfg(test)]
mod h200;
mod memory;
mod mig;
mod node;
mod place;
mod proc;
mod root;
mod roots;
mod totals;
mod uuid;
mod yaml;

pub use capability::{Capabilities, Capability, CapabilityError};
pub use cdi::{CdiDevice, cdi_devices};
pub use device_files::{DeviceFile, DeviceFiles, FileState, Unregistered};
pub use device_node::{DeviceNode, nvidias_majors};
pub use driver::{Driver, DriverError, DriverFile, DriverLibrary, Extent, LeftOut};
pub use error::{NodeError, SickGpu};
pub use fault::{Faults, Xid, record_number};
pub use file_lease::{FileIdentity, NOBODYS, lease_setter, open_now, read_now};
pub use gpu::Gpu;
pub use memory::DeviceMemory;
pub use mig::{Instance, InstanceId, Profile, ProfileError};
pub use node::{Node, SharedNodes, loaded_driver};
pub use place::{Place, Way};
pub use proc::{Information, ProcError, boot_id, driver_version, information, pci_address};
pub use roots::Roots;
pub use totals::{GpuTotals, InstanceTotals, Totals, TotalsError};
pub use uuid::{GpuUuid, GpuUuidError};
