//! Memory limits by cgroup, as the driver keeps them from 615 on (nvmlDeviceSetMemoryLimits_v1).
//!
//! A cgroup is identified by the inode of its directory: a directory recreated under the same path has no
//! limit (nvml.h: "Removing the cgroup will also clear any limits"). A process counts to the cgroup that it
//! was in when it opened the driver. The simulation does not apply a cgroup's limit to the cgroups below it.

use std::fs::File;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::session::Session;
use crate::state::{CGROUPS, Gpu, State};

/// NVML_DEVICE_MEMORY_LIMIT_MAX: no limit.
pub const NO_LIMIT: u64 = u64::MAX;

/// One cgroup's limit on one GPU.
#[repr(C)]
pub struct CgroupLimit {
    /// Id of the cgroup; 0 in a free entry.
    pub cgroup: AtomicU64,
    /// Soft limit in bytes. It is stored and has no effect.
    pub soft: AtomicU64,
    /// Hard limit in bytes: the most memory of all the cgroup's processes together.
    pub hard: AtomicU64,
}

/// `struct pidfd_info` of linux/pidfd.h in its first version (Linux 6.13).
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    others: [u32; 12],
}

/// PIDFD_INFO_CGROUPID of linux/pidfd.h.
const CGROUP_ID: u64 = 4;
/// PIDFD_GET_INFO: `_IOWR(0xff, 11, struct pidfd_info)`.
const GET_INFO: libc::c_ulong = 0xc000_ff0b | (size_of::<PidfdInfo>() as libc::c_ulong) << 16;

/// Returns the id of this process's own cgroup of version 2; 0 if the kernel does not report it.
#[must_use]
pub fn own() -> u64 {
    // SAFETY: the call takes two numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) };
    let Ok(fd) = i32::try_from(fd) else { return 0 };
    if fd < 0 {
        return 0;
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    let process = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut info = PidfdInfo { mask: CGROUP_ID, ..PidfdInfo::default() };
    // SAFETY: the kernel writes at most the size that is part of the command number.
    let told = unsafe { libc::ioctl(process.as_raw_fd(), GET_INFO, &raw mut info) };
    if told == 0 && info.mask & CGROUP_ID != 0 { info.cgroup } else { 0 }
}

/// Returns the id of the cgroup with directory `path`; `None` if it is not a directory of cgroup v2.
#[must_use]
pub fn at(path: &Path) -> Option<u64> {
    let folder = File::open(path).ok()?;
    let kind = nix::sys::statfs::fstatfs(&folder).ok()?.filesystem_type();
    let data = folder.metadata().ok()?;
    (data.is_dir() && kind == nix::sys::statfs::CGROUP2_SUPER_MAGIC).then(|| data.ino())
}

impl Gpu {
    /// Returns the limit of this cgroup.
    #[must_use]
    pub fn cgroup_limit(&self, cgroup: u64) -> Option<&CgroupLimit> {
        let of = |limit: &&CgroupLimit| limit.cgroup.load(Ordering::Acquire) == cgroup;
        self.limits.iter().find(of).filter(|_| cgroup != 0)
    }

    /// Sets a cgroup's limit; false if [`CGROUPS`] others have one.
    #[must_use]
    pub fn set_cgroup_limit(&self, session: &Session, cgroup: u64, soft: u64, hard: u64) -> bool {
        let _guard = session.lock(&self.memory_lock);
        let free = || self.limits.iter().find(|limit| limit.cgroup.load(Ordering::Acquire) == 0);
        let Some(limit) = self.cgroup_limit(cgroup).or_else(free) else { return false };
        limit.soft.store(soft, Ordering::Release);
        limit.hard.store(hard, Ordering::Release);
        let is_none = soft == 0 && hard == NO_LIMIT;
        limit.cgroup.store(if is_none { 0 } else { cgroup }, Ordering::Release);
        true
    }

    /// Returns the bytes that the processes of this cgroup hold.
    #[must_use]
    pub fn used_by_cgroup(&self, state: &State, cgroup: u64) -> u64 {
        let mut slots = state.slots.iter().zip(&self.bytes).take(state.used_slots());
        let held = slots.by_ref().filter(|(slot, _)| slot.cgroup.load(Ordering::Acquire) == cgroup);
        held.map(|(_, bytes)| bytes.load(Ordering::Acquire)).sum()
    }

    /// Returns the bytes that the process's cgroup may still take, and its limit; `None` without a limit.
    #[must_use]
    pub fn left_to_cgroup(&self, state: &State, cgroup: u64) -> Option<(u64, u64)> {
        let hard = self.cgroup_limit(cgroup)?.hard.load(Ordering::Acquire);
        (hard != NO_LIMIT).then(|| (hard.saturating_sub(self.used_by_cgroup(state, cgroup)), hard))
    }
}

const _: () = assert!(size_of::<PidfdInfo>() == 64 && CGROUPS > 0);
