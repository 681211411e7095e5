//! The child process that enters the container's mount namespace. It has one thread and is started from a
//! read-only copy of this program. It gets descriptors by their numbers, looks up no path of the container,
//! makes three kinds of system calls and ends.

use std::ffi::{CString, OsString};
use std::os::fd::RawFd;

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl;

use crate::sys;

/// Verb that attaches mounts: `attach NAMESPACE [TREE TARGET]...`
pub(super) const ATTACH: &str = "attach";
/// Verb that takes them away: `detach NAMESPACE [TREE]...`
pub(super) const DETACH: &str = "detach";

/// System calls that the child may still make.
const CALLS: [libc::c_long; 5] =
    [libc::SYS_setns, libc::SYS_move_mount, libc::SYS_umount2, libc::SYS_exit_group, libc::SYS_rt_sigreturn];

/// Runs the child and ends the process, if the arguments after the program's name say so; otherwise returns.
/// A program that puts plans into living containers must call this first.
pub fn run_child(mut words: impl Iterator<Item = OsString>) {
    let verb = words.next();
    let verb = verb.as_deref().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
    if verb != ATTACH && verb != DETACH {
        return;
    }
    let numbers: Option<Vec<RawFd>> = words.map(|word| word.to_str()?.parse().ok()).collect();
    let done = match numbers.as_deref().and_then(<[RawFd]>::split_first) {
        Some((namespace, rest)) if verb == ATTACH => attach(*namespace, rest),
        Some((namespace, rest)) => detach(*namespace, rest),
        None => Err(Errno::EINVAL),
    };
    sys::exit(done.map_or_else(|errno| errno as i32, |()| 0));
}

fn attach(namespace: RawFd, pairs: &[RawFd]) -> Result<(), Errno> {
    enter(namespace)?;
    for pair in pairs.chunks_exact(2) {
        sys::move_mount(pair[0], pair[1])?;
    }
    Ok(())
}

/// Detaches by paths in the host's /proc, which a container before pivot_root still sees. The kernel refuses
/// a tree that was not attached.
fn detach(namespace: RawFd, trees: &[RawFd]) -> Result<(), Errno> {
    let paths: Result<Vec<CString>, _> =
        trees.iter().map(|tree| CString::new(format!("/proc/self/fd/{tree}"))).collect();
    let paths = paths.map_err(|_| Errno::EINVAL)?;
    enter(namespace)?;
    for path in &paths {
        let _ = sys::detach(path);
    }
    Ok(())
}

fn enter(namespace: RawFd) -> Result<(), Errno> {
    prctl::set_dumpable(false)?;
    sys::allow_only(&CALLS)?;
    sys::join_mount_namespace(namespace)
}
