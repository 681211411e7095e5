//! The store's lock file, and the process that holds the lock. The holder signs the file, because the
//! kernel's own list shows all locks of the machine, and any user can make it arbitrarily long.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use procfs::process::Stat;

use crate::process::{own_pid, stat};

/// Length of a signature in bytes: a pid and a start time.
const LENGTH: usize = 10 + 1 + 20 + 1;

/// Writes this process's identity into a file that it has locked. On failure, the lock still works, but its
/// holder is not named.
pub fn sign(file: &File) {
    static OWN: OnceLock<Option<String>> = OnceLock::new();
    let own = OWN.get_or_init(|| {
        let stat = stat(own_pid().ok()?).ok()?;
        Some(format!("{:>10} {:>20}\n", stat.pid, stat.starttime))
    });
    let mut file = file; // just opened, so at its beginning
    let _ = own.as_ref().map(|own| file.write_all(own.as_bytes()));
}

/// Returns the process that signed a locked file, if it still lives.
pub fn signer(file: &File) -> Option<Stat> {
    let mut text = [0; LENGTH];
    file.read_exact_at(&mut text, 0).ok()?;
    let (pid, start) = std::str::from_utf8(&text).ok()?.trim().split_once(' ')?;
    let stat = stat(pid.parse().ok()?).ok()?;
    (start.trim().parse() == Ok(stat.starttime)).then_some(stat)
}

/// The lock file in the state folder. Versions that kept the leases in a database locked the same file.
pub(crate) fn path(state: &Path) -> PathBuf {
    state.join("quota.lock")
}

/// Opens the lock file; creates it if it is absent.
pub(crate) fn open(state: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(path(state))
}

/// Names the process that holds the lock in the state folder `state`, and how to resolve it. The text is the
/// end of a sentence.
pub(crate) fn described(state: &Path) -> String {
    let holder = open(state).ok().and_then(|file| signer(&file));
    holder.map_or_else(|| "; try again".to_owned(), |stat| told(&stat))
}

fn told(stat: &Stat) -> String {
    let (pid, name) = (stat.pid, stat.comm.escape_debug());
    match stat.state {
        'T' | 't' => format!(
            ": process {pid} ({name}) holds it and is stopped; continue it with `kill -CONT {pid}`, or end it with \
             `kill -KILL {pid}`"
        ),
        _ => format!(": process {pid} ({name}) holds it; try again, or end that process if it hangs"),
    }
}
