//! The history: leases that have ended.

use std::io;
use std::path::Path;

use crate::journal::Journal;
use crate::lease::PastLease;

/// Records that a lease has ended. A failure is only logged, so that a share can end on a full disk. The
/// caller has the turn.
pub(crate) fn note(state: &Path, past: &PastLease) {
    let line = serde_json::to_string(past).map_err(io::Error::from);
    if let Err(error) = line.and_then(|line| journal(state).add(&line)) {
        tracing::warn!(container = %past.key.container, %error, "lease left out of the history");
    }
}

/// Returns the recently ended leases, newest first.
pub(crate) fn list(state: &Path) -> Vec<PastLease> {
    journal(state).lines(read)
}

pub(crate) fn read(line: &str) -> Option<PastLease> {
    serde_json::from_str(line).ok()
}

/// The size is enough for more than ten thousand leases.
pub(crate) fn journal(state: &Path) -> Journal<'_> {
    Journal { state, name: "ended", most: 8 << 20, lasts: true }
}
