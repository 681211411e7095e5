//! A handle of a host process that is never taken for a later process with the same pid.

use std::fs::File;

use nix::fcntl::AtFlags;
use nix::unistd::{AccessFlags, faccessat};

/// How many of these each owner keeps open at most, since a container may have any number of processes.
pub const MOST_KEPT: usize = 512;

/// The process's folder in /proc. It is empty for good once the process has ended.
#[derive(Debug)]
pub struct Process(File);

impl Process {
    /// Opens the process that has the pid `pid` now.
    pub fn open(pid: u32) -> Option<Self> {
        File::open(format!("/proc/{pid}")).ok().map(Self)
    }

    /// Whether the process exists; a zombie does.
    pub fn lives(&self) -> bool {
        faccessat(&self.0, "stat", AccessFlags::F_OK, AtFlags::empty()).is_ok()
    }
}
