//! A process of the host that is not taken for a later one of its number.

use std::fs::File;

use nix::fcntl::AtFlags;
use nix::unistd::{AccessFlags, faccessat};

/// So many are kept open by each of those who keep any: a container may have as many processes as it likes.
pub const MOST_KEPT: usize = 512;

/// Its folder of /proc, which is empty for good once the process has ended.
#[derive(Debug)]
pub struct Process(File);

impl Process {
    /// The process that is called `pid` now.
    pub fn open(pid: u32) -> Option<Self> {
        File::open(format!("/proc/{pid}")).ok().map(Self)
    }

    /// Whether it is there: a zombie is.
    pub fn lives(&self) -> bool {
        faccessat(&self.0, "stat", AccessFlags::F_OK, AtFlags::empty()).is_ok()
    }
}
