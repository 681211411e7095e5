//! The first acts of a root process that somebody else started: give up descriptors, folder, environment, core
//! dumps and capabilities, in this order, before anything is opened or parsed.

use std::env;
use std::io::{ErrorKind, Read, stdin};

use anyhow::{Context, Result, bail};
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::{Mode, umask};

use crate::args::Stage;

/// As much of the state as is kept; the rest is read and dropped, since crun fails on a pipe that is closed early.
const MAX_STATE_BYTES: usize = 1 << 20;

/// The environment that the wrapper gives its hooks, by name.
const ENVIRONMENT: [&str; 2] = ["GPUSHARE_HOOK", "PATH"];

/// Enters the state in which the hook works, and returns what stood on standard input.
///
/// # Errors
/// When the environment of `prestart` is not the one the wrapper wrote: then somebody else did. `poststop` goes on
/// whatever it finds, since refusing would keep the lease.
pub fn enter(stage: Stage) -> Result<Vec<u8>> {
    close_descriptors();
    let state = read_state();
    env::set_current_dir("/").context("cannot enter /")?;
    umask(Mode::from_bits_truncate(0o077));
    let foreign: Vec<_> = env::vars_os().map(|(name, _)| name).filter(|name| !is_known(name)).collect();
    clear_environment();
    if let (Stage::Prestart, Some(name)) = (stage, foreign.first()) {
        bail!(
            "unexpected variable {name:?} in the hook's environment; the bundle's hooks were changed by somebody else"
        );
    }
    prctl::set_no_new_privs().context("cannot set no_new_privs")?;
    prctl::set_dumpable(false).context("cannot become undumpable")?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0).context("cannot forbid core dumps")?;
    drop_capabilities(stage).context("cannot drop capabilities")?;
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
    let mut buffer = [0; 8192];
    loop {
        match stdin().lock().read(&mut buffer) {
            Ok(0) => return kept,
            Ok(count) => {
                let room = MAX_STATE_BYTES.saturating_sub(kept.len());
                kept.extend_from_slice(&buffer[..count.min(room)]);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return kept,
        }
    }
}

fn clear_environment() {
    let names: Vec<_> = env::vars_os().map(|(name, _)| name).collect();
    for name in names {
        // SAFETY: this process has one thread.
        unsafe { env::remove_var(name) };
    }
}

/// Registration needs no capability at all: root's own files in root's own folder. Unmounting a region needs one.
fn drop_capabilities(stage: Stage) -> Result<(), caps::errors::CapsError> {
    let mut kept = CapsHashSet::new();
    if stage == Stage::Poststop && caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_ADMIN)? {
        kept.insert(Capability::CAP_SYS_ADMIN);
    }
    // The bounding set first, while there is still the capability to do so. An engine may have taken that away.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        caps::clear(None, CapSet::Bounding)?;
    }
    caps::clear(None, CapSet::Ambient)?;
    caps::clear(None, CapSet::Inheritable)?;
    caps::set(None, CapSet::Effective, &kept)?;
    caps::set(None, CapSet::Permitted, &kept)
}
