//! Ends a container that its low-level runtime does not know.
//!
//! If a runtime is killed after it ran the hooks and before it recorded the container, the init stays alive,
//! waits for `start` forever and holds its lease. The engine's `delete --force` then finds no container and
//! does nothing.

use std::env;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpushare_quota::{LeaseKey, LeaseState, Member};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::args::Args;

/// Files in which a runtime records a container, in the container's folder below its root: crun writes the
/// first, runc and youki the second.
const RECORDS: [&str; 2] = ["status", "state.json"];
/// How long to wait for a killed container to end.
pub const DEADLINE: Duration = Duration::from_secs(2);

/// Kills the init of `member` if `runtime` has no record of the container. `delete --force` does the same for
/// containers that it knows.
pub fn end(member: &Member, args: &Args, runtime: &Path) {
    if member.state != LeaseState::Active || is_known(&member.key, args, runtime) || !member.holder.lives() {
        return;
    }
    tracing::warn!(container = %member.key, pid = member.holder.pid, "ending a container that its runtime does not know");
    // The process may have ended just now, so ignore errors.
    let _ = kill(Pid::from_raw(member.holder.pid), Signal::SIGKILL);
    member.holder.await_end(DEADLINE);
}

/// Whether `runtime` has a record of the container `key`.
pub fn is_known(key: &LeaseKey, args: &Args, runtime: &Path) -> bool {
    roots(args, runtime).iter().any(|root| is_recorded(&root.join(&key.container)))
}

/// The runtime roots that may contain the container's record: the one that the engine names, else the
/// runtime's defaults.
fn roots(args: &Args, runtime: &Path) -> Vec<PathBuf> {
    if let Some(root) = &args.root {
        return vec![root.clone()];
    }
    let name = runtime.file_name().unwrap_or_default();
    let folders = [Some(PathBuf::from("/run")), env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)];
    folders.into_iter().flatten().map(|folder| folder.join(name)).collect()
}

/// Whether a record exists. If the lookup fails, assume that it does.
fn is_recorded(folder: &Path) -> bool {
    let is_absent = |error: io::Error| error.kind() == ErrorKind::NotFound;
    RECORDS.iter().any(|name| !fs::symlink_metadata(folder.join(name)).is_err_and(is_absent))
}
