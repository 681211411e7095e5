//! A handle of a host process that is never taken for a later process with the same pid.

use std::fs::File;
use std::io::Read;

use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{AccessFlags, faccessat};
use procfs::FromRead;
use procfs::process::Stat;

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

    /// When it began, in clock ticks after boot; `None` once it has ended.
    pub fn start_time(&self) -> Option<u64> {
        let file = openat(&self.0, "stat", OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()).ok()?;
        let mut text = Vec::new();
        File::from(file).read_to_end(&mut text).ok()?;
        Some(Stat::from_read(text.as_slice()).ok()?.starttime)
    }
}
