//! Where a node's trees begin.

use std::path::PathBuf;

/// Where the driver's files, device nodes and `/proc` tree begin. All are `/` on an ordinary node; a driver
/// container, NixOS or a simulated node has its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// Root of the driver's libraries and programs.
    pub driver: PathBuf,
    /// Root of the `/dev` tree.
    pub dev: PathBuf,
    /// Root of the `/proc` tree.
    pub proc: PathBuf,
    /// Folders below the driver root to look for libraries in before all others.
    pub library_folders: Vec<PathBuf>,
}

impl Default for Roots {
    fn default() -> Self {
        Self { driver: "/".into(), dev: "/".into(), proc: "/".into(), library_folders: Vec::new() }
    }
}
