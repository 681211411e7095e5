//! The file that writers of the store lock, and the process that holds the lock.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use gpushare_inventory::flock_holder;

use crate::process::stat;

/// The lock file in the state folder. Versions that kept the leases in a database locked it too.
pub(crate) fn path(state: &Path) -> PathBuf {
    state.join("quota.lock")
}

/// Opens the lock file, and makes it if it is absent.
pub(crate) fn open(state: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path(state))
}

/// Says which process holds the lock in the state folder `state`, as the kernel tells, and what to do about
/// it. The text is the end of a sentence.
pub(crate) fn described(state: &Path) -> String {
    let pid = open(state).ok().and_then(|file| flock_holder(&file));
    let holder = pid.and_then(|pid| told(i32::try_from(pid).ok()?));
    holder.unwrap_or_else(|| "; try again".to_owned())
}

fn told(pid: i32) -> Option<String> {
    let stat = stat(pid).ok()?;
    let name = stat.comm.escape_debug();
    Some(match stat.state {
        'T' | 't' => format!(
            ": process {pid} ({name}) holds it and is stopped; continue it with `kill -CONT {pid}`, or end it with \
             `kill -KILL {pid}`"
        ),
        _ => format!(": process {pid} ({name}) holds it; try again, or end that process if it hangs"),
    })
}
