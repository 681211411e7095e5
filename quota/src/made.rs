//! How long recent shares took to make, for monitoring. The journal does not outlive the boot.

use std::path::Path;
use std::time::Duration;

use crate::journal::Journal;

/// Records in the state folder `state` that a container's share took this long to make. Ignores failures.
pub fn note_made(state: &Path, took: Duration) {
    let _ = journal(state).add(&took.as_nanos().to_string());
}

pub(crate) fn read(line: &str) -> Option<Duration> {
    line.parse().ok().map(Duration::from_nanos)
}

pub(crate) fn journal(state: &Path) -> Journal<'_> {
    Journal { state, name: "made", most: 64 << 10, lasts: false }
}
