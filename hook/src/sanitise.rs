//! Removes inherited state from this root process: descriptors, folder, environment, core dumps and
//! capabilities, in this order. Only the arguments are parsed earlier; no file is opened and the state is not
//! parsed yet.

use std::env;
use std::io::{self, Read, stdin};

use anyhow::{Context, Result, bail};
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::{Mode, umask};

use crate::args::{Call, Stage};

/// Length of the state to keep. The rest is read and dropped, since crun fails if the pipe is closed early.
const MAX_STATE_BYTES: u64 = 1 << 20;
/// Limit on reading. No runtime writes as much, and endless input must not block the runtime.
const MAX_READ_BYTES: u64 = 64 << 20;

/// Names of the variables that the wrapper passes to its hooks.
const ENVIRONMENT: [&str; 2] = ["GPUSHARE_HOOK", "PATH"];

/// Drops inherited state, and returns the data from standard input.
///
/// # Errors
/// When the environment of the wrapper's `prestart` has a variable that the wrapper does not write: then
/// another program changed the hook. `poststop` continues in that case, since a refusal would keep the lease.
/// In hook-only mode engines pass the hook their own environment, and the hook reads nothing from it.
pub fn enter(call: &Call) -> Result<Vec<u8>> {
    close_descriptors();
    let state = read_state();
    env::set_current_dir("/").context("cannot enter /")?;
    umask(Mode::from_bits_truncate(0o077));
    let names: Vec<_> = env::vars_os().map(|(name, _)| name).collect();
    for name in &names {
        // SAFETY: this process has one thread.
        unsafe { env::remove_var(name) };
    }
    let is_wrappers = matches!(call, Call::Wrapper(_)) && call.stage() == Stage::Prestart;
    let foreign = names.iter().find(|name| ENVIRONMENT.iter().all(|known| name.as_os_str() != *known));
    if let (true, Some(name)) = (is_wrappers, foreign) {
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

/// Closes every descriptor above 2. Runtimes leak open descriptors.
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
    let mut input = stdin().lock().take(MAX_READ_BYTES);
    // After an error, use the bytes read so far.
    let _ = input.by_ref().take(MAX_STATE_BYTES).read_to_end(&mut kept);
    let _ = io::copy(&mut input, &mut io::sink());
    kept
}

/// The capabilities that hook-only mode needs to change a container: for mounts, programs and rules of the
/// cgroup (SYS_ADMIN), another namespace (SYS_CHROOT, and SYS_PTRACE since a runtime's init is undumpable),
/// nodes with their owners (MKNOD, CHOWN), and files as the root user of a user namespace (SETUID, SETGID,
/// DAC_OVERRIDE).
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
/// The capability that is effective from the start: with a user namespace, podman's bundle belongs to that
/// namespace's root user.
const FOR_THE_BUNDLE: Capability = Capability::CAP_DAC_OVERRIDE;
/// The capabilities of the child that attaches the mounts. The child executes a program, so it has to inherit
/// them.
const FOR_THE_CHILD: [Capability; 2] = [Capability::CAP_SYS_ADMIN, Capability::CAP_SYS_CHROOT];

/// The capabilities for a region's mounts: unmounting (SYS_ADMIN), also in another namespace (SYS_CHROOT).
const FOR_THE_REGION: [Capability; 2] = [Capability::CAP_SYS_ADMIN, Capability::CAP_SYS_CHROOT];

/// Drops all capabilities that this call does not need. The wrapper's `prestart` unmounts on the host as its
/// last step; before that no capability is effective. `poststop` removes a region. Hook-only mode keeps
/// several as permitted, but only one is effective before the hook knows that the container requests a share.
/// The bounding set is cleared if a program inherits capabilities. Otherwise no_new_privs prevents a program
/// from getting any that are not permitted here.
fn drop_capabilities(call: &Call) -> Result<(), caps::errors::CapsError> {
    let (kept, inherited): (&[Capability], &[Capability]) = match (call, call.stage()) {
        (Call::HookOnly { .. }, Stage::Prestart) => (&FOR_A_CONTAINER, &FOR_THE_CHILD),
        (_, Stage::Poststop) => (&FOR_THE_REGION, &[]),
        (Call::Wrapper(_), Stage::Prestart) => (&FOR_THE_REGION[..1], &[]),
    };
    // An engine may have removed some of them.
    let held = caps::read(None, CapSet::Permitted)?;
    let of = |names: &[Capability]| -> CapsHashSet {
        names.iter().copied().filter(|one| held.contains(one)).collect()
    };
    caps::clear(None, CapSet::Ambient)?;
    caps::set(None, CapSet::Inheritable, &of(inherited))?;
    // A child of root gets the capabilities that are both permitted here and in the bounding set. Clear the
    // set before SETPCAP is dropped, which this needs.
    if !inherited.is_empty() && caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        caps::clear(None, CapSet::Bounding)?;
    }
    let in_force = match (call, call.stage()) {
        (_, Stage::Poststop) => of(kept),
        (Call::HookOnly { .. }, Stage::Prestart) => of(&[FOR_THE_BUNDLE]),
        (Call::Wrapper(_), Stage::Prestart) => of(&[]),
    };
    caps::set(None, CapSet::Effective, &in_force)?;
    caps::set(None, CapSet::Permitted, &of(kept))
}

/// Makes the permitted capabilities effective.
///
/// # Errors
/// When the kernel refuses to read or set them.
pub fn use_capabilities() -> Result<()> {
    let kept = caps::read(None, CapSet::Permitted).context("cannot read capabilities")?;
    caps::set(None, CapSet::Effective, &kept).context("cannot use capabilities")
}
