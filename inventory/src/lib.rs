//! What this node has: its GPUs, their device nodes and the driver's files, read from `/proc` and the file system.
//!
//! NVML is never loaded here: starting it costs a tenth of a second or more without persistence mode, and a static
//! program cannot load it at all. The one thing `/proc` does not tell, the size of a GPU's memory, comes from
//! [`Totals`], a cache that `gpushare inventory refresh` fills from NVML once per boot and driver version.
#![forbid(unsafe_code)]

mod capability;
mod cdi;
mod device_files;
mod driver;
pub mod elf;
mod file_lease;
mod memory;
mod node;
mod proc;
mod root;
mod totals;
mod uuid;
mod yaml;

pub use capability::{Capabilities, Capability, CapabilityError};
pub use cdi::{CdiDevice, cdi_devices};
pub use device_files::{DeviceFile, DeviceFiles, FileState, Unregistered};
pub use driver::{Driver, DriverError, DriverFile, DriverLibrary, Extent};
pub use file_lease::{FileIdentity, NOBODYS, file_leases, flock_holder, open_now, read_now};
pub use memory::DeviceMemory;
pub use node::{DeviceNode, Gpu, Node, NodeError, Roots, SickGpu};
pub use proc::{Information, ProcError, boot_id, driver_version, information, pci_address};
pub use totals::{GpuTotals, Totals, TotalsError};
pub use uuid::{GpuUuid, GpuUuidError};
