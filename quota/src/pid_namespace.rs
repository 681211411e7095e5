//! Pid namespaces, identified by device and inode.

use std::fmt;
use std::path::Path;

use gpushare_inventory::FileIdentity;

/// A pid namespace of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PidNamespace(FileIdentity);

impl PidNamespace {
    /// The namespace of a file such as `/proc/PID/ns/pid`; `None` if there is no such file.
    pub fn at(path: &Path) -> Option<Self> {
        FileIdentity::of(path).ok().map(Self)
    }

    /// The namespace of this process; `None` if /proc is not mounted.
    pub fn own() -> Option<Self> {
        Self::at(Path::new("/proc/self/ns/pid"))
    }
}

impl fmt::Display for PidNamespace {
    /// Formats it like `ls -l /proc/PID/ns/pid`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid:[{}]", self.0.inode)
    }
}
