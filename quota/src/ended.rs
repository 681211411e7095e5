//! The history: leases that have ended, one line for each, in two files of bounded size.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use crate::lease::PastLease;

/// Above this size, in bytes, a new file is begun, and the one before is kept as `ended.old`. The two hold more than
/// a thousand leases.
const MOST: u64 = 512 << 10;

/// Notes that a lease has ended. A failure is logged and hinders nothing: the share comes back on a full disk
/// too. The caller has the turn.
pub(crate) fn note(state: &Path, past: &PastLease) {
    let path = newest(state);
    if fs::symlink_metadata(&path).is_ok_and(|file| file.len() > MOST) {
        let _ = fs::rename(&path, older(state));
    }
    let line = serde_json::to_string(past).map(|line| line + "\n").unwrap_or_default();
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(path);
    // One call for one line. A line of which only a part had room is no JSON and is left out when read.
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        tracing::warn!(container = %past.key.container, %error, "lease left out of the history");
    }
}

/// The last leases that ended, newest first.
pub(crate) fn list(state: &Path) -> Vec<PastLease> {
    let texts = [older(state), newest(state)].map(|path| fs::read(path).unwrap_or_default());
    let mut all: Vec<PastLease> = texts
        .iter()
        .flat_map(|text| text.split(|byte| *byte == b'\n'))
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect();
    all.reverse();
    all
}

fn newest(state: &Path) -> PathBuf {
    state.join("ended")
}

fn older(state: &Path) -> PathBuf {
    state.join("ended.old")
}
