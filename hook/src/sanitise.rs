//! The first acts of a root process that somebody else started: give up descriptors, folder, environment, core
//! dumps and capabilities, in this order, before anything is opened or parsed.

use std::env;
use std::io::{ErrorKind, Read, stdin};

use anyhow::{Context, Result, bail};
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::{Mode, umask};

use crate::args::{Call, Stage};

/// As much of the state as is kept; the rest is read and dropped, since crun fails on a pipe that is closed early.
const MAX_STATE_BYTES: usize = 1 << 20;
/// Where reading ends all the same: no runtime writes as much, and what has no end must not hold the runtime up.
const MAX_READ_BYTES: usize = 64 << 20;

/// The environment that the wrapper gives its hooks, by name.
const ENVIRONMENT: [&str; 2] = ["GPUSHARE_HOOK", "PATH"];

/// Enters the state in which the hook works, and returns what stood on standard input.
///
/// # Errors
/// When the environment of the wrapper's `prestart` is not the one it wrote: then somebody else did. `poststop` goes on
/// whatever it finds, since refusing would keep the lease. Engines give hook-only mode their own environment, of which
/// nothing is read.
pub fn enter(call: &Call) -> Result<Vec<u8>> {
    close_descriptors();
    let state = read_state();
    env::set_current_dir("/").context("cannot enter /")?;
    umask(Mode::from_bits_truncate(0o077));
    let foreign: Vec<_> = env::vars_os().map(|(name, _)| name).filter(|name| !is_known(name)).collect();
    clear_environment();
    let is_wrappers = matches!(call, Call::Wrapper(_)) && call.stage() == Stage::Prestart;
    if let (true, Some(name)) = (is_wrappers, foreign.first()) {
        bail!(
            "unexpected variable {name:?} in the hook's environment; the bundle's hooks were changed by somebody else"
        );
    }
    prctl::set_no_new_privs().context("cannot set no_new_privs")?;
    prctl::set_dumpable(false).context("cannot become undumpable")?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0).context("cannot forbid core dumps")?;
    drop_capabilities(call).context("cannot drop capabilities")?;
    Ok(state)
}

fn is_known(name: &std::ffi::OsStr) -> bool {
    ENVIRONMENT.iter().any(|known| name == *known)
}

/// Everything above the standard three: runtimes hand over what they happen to have open.
fn close_descriptors() {
    // SAFETY: nothing of this process owns a descriptor above 2 yet.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, 0_u32) };
    if closed == 0 {
        return;
    }
    // Kernels before 5.9.
    let listed = std::fs::read_dir("/proc/self/fd").into_iter().flatten().filter_map(Result::ok);
    let open: Vec<i32> = listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for fd in open.into_iter().filter(|fd| *fd > 2) {
        // SAFETY: as above; closing a number that is not open does nothing.
        unsafe { libc::close(fd) };
    }
}

fn read_state() -> Vec<u8> {
    let mut kept = Vec::new();
    let mut read = 0;
    let mut buffer = [0; 8192];
    while read < MAX_READ_BYTES {
        match stdin().lock().read(&mut buffer) {
            Ok(0) => return kept,
            Ok(count) => {
                read += count;
                let room = MAX_STATE_BYTES.saturating_sub(kept.len());
                kept.extend_from_slice(&buffer[..count.min(room)]);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return kept,
        }
    }
    kept
}

fn clear_environment() {
    let names: Vec<_> = env::vars_os().map(|(name, _)| name).collect();
    for name in names {
        // SAFETY: this process has one thread.
        unsafe { env::remove_var(name) };
    }
}

/// What hook-only mode does to a container: mounts, programs and rules of the cgroup (SYS_ADMIN), another's namespace
/// (SYS_CHROOT, and SYS_PTRACE since a runtime's init is undumpable), nodes with their owners (MKNOD, CHOWN), and files
/// as the root user of a user namespace (SETUID, SETGID, DAC_OVERRIDE).
const FOR_A_CONTAINER: [Capability; 8] = [
    Capability::CAP_SYS_ADMIN,
    Capability::CAP_SYS_CHROOT,
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_MKNOD,
    Capability::CAP_CHOWN,
    Capability::CAP_SETUID,
    Capability::CAP_SETGID,
    Capability::CAP_DAC_OVERRIDE,
];
/// Of these, what is in force from the start: with a user namespace, podman's bundle belongs to that one's root user.
const FOR_THE_BUNDLE: Capability = Capability::CAP_DAC_OVERRIDE;
/// What the child needs that attaches the mounts. It is another program, so it must inherit them.
const FOR_THE_CHILD: [Capability; 2] = [Capability::CAP_SYS_ADMIN, Capability::CAP_SYS_CHROOT];

/// Registration needs no capability at all: root's own files in root's own folder. Unmounting a region needs one. For a
/// container without the wrapper they are kept, but all but one not in force before it is known to ask for something.
fn drop_capabilities(call: &Call) -> Result<(), caps::errors::CapsError> {
    let (kept, inherited): (&[Capability], &[Capability]) = match (call, call.stage()) {
        (Call::HookOnly { .. }, Stage::Prestart) => (&FOR_A_CONTAINER, &FOR_THE_CHILD),
        (_, Stage::Poststop) => (&FOR_THE_CHILD[..1], &[]),
        (Call::Wrapper(_), Stage::Prestart) => (&[], &[]),
    };
    // An engine may have taken some away.
    let held = caps::read(None, CapSet::Permitted)?;
    let of = |names: &[Capability]| -> CapsHashSet {
        names.iter().copied().filter(|one| held.contains(one)).collect()
    };
    caps::clear(None, CapSet::Ambient)?;
    caps::set(None, CapSet::Inheritable, &of(inherited))?;
    // The bounding set while there is still the capability to do so.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        caps::clear(None, CapSet::Bounding)?;
    }
    let in_force = if inherited.is_empty() { of(kept) } else { of(&[FOR_THE_BUNDLE]) };
    caps::set(None, CapSet::Effective, &in_force)?;
    caps::set(None, CapSet::Permitted, &of(kept))
}

/// Puts what was kept in force.
///
/// # Errors
/// When the kernel refuses.
pub fn use_capabilities() -> Result<()> {
    let kept = caps::read(None, CapSet::Permitted).context("cannot read capabilities")?;
    caps::set(None, CapSet::Effective, &kept).context("cannot use capabilities")
}
