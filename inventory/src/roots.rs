//! The root folders below which a node's files are looked up, and the unusable memory of the node's GPUs.

use std::path::PathBuf;

use crate::memory::DeviceMemory;

/// The root folders of the driver's files, of device nodes and of `/proc`. All are `/` on an ordinary node. A
/// driver container, NixOS or a simulated node has others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// Absolute path below which the driver's libraries and programs are.
    pub driver: PathBuf,
    /// Absolute path of the folder with `dev`.
    pub dev: PathBuf,
    /// Absolute path of the folder with `proc`, and `sys` for DRM nodes.
    pub proc: PathBuf,
    /// Folders below the driver root that are searched for libraries before all others.
    pub library_folders: Vec<PathBuf>,
    /// Memory of each GPU that programs cannot allocate although the driver does not report it as reserved.
    pub unusable_memory: DeviceMemory,
}

impl Default for Roots {
    fn default() -> Self {
        Self {
            driver: "/".into(),
            dev: "/".into(),
            proc: "/".into(),
            library_folders: Vec::new(),
            unusable_memory: DeviceMemory::ZERO,
        }
    }
}
