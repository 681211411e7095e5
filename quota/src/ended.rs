//! The history: leases that have ended.

use std::io;
use std::path::Path;

use crate::journal::Journal;
use crate::lease::PastLease;

/// Notes that a lease has ended. A failure is logged and hinders nothing: a share comes back on a full disk
/// too. The caller has the turn.
pub(crate) fn note(state: &Path, past: &PastLease) {
    let line = serde_json::to_string(past).map_err(io::Error::from);
    if let Err(error) = line.and_then(|line| journal(state).add(&line)) {
        tracing::warn!(container = %past.key.container, %error, "lease left out of the history");
    }
}

/// The last leases that ended, newest first.
pub(crate) fn list(state: &Path) -> Vec<PastLease> {
    journal(state).lines(read)
}

pub(crate) fn read(line: &str) -> Option<PastLease> {
    serde_json::from_str(line).ok()
}

/// More than ten thousand leases.
pub(crate) fn journal(state: &Path) -> Journal<'_> {
    Journal { state, name: "ended", most: 8 << 20, lasts: true }
}
