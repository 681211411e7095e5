//! The history: leases that have ended.

use std::io;
use std::path::Path;

use crate::journal::{Journal, Stamp};
use crate::lease::PastLease;
use crate::state::StateFolder;

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
    journal(state).lines(|line| serde_json::from_str(line).ok())
}

impl StateFolder {
    /// Tells whether leases ended: it changes with each.
    pub fn ended_stamp(&self) -> Option<Stamp> {
        journal(self.path()).stamp()
    }

    /// The leases that ended and stand behind the first `length` bytes of the history, or in all of it where
    /// that was begun anew.
    pub fn ended_behind(&self, length: u64) -> Vec<PastLease> {
        journal(self.path()).lines_behind(length, |line| serde_json::from_str(line).ok())
    }
}

/// More than ten thousand leases.
pub(crate) fn journal(state: &Path) -> Journal<'_> {
    Journal { state, name: "ended", most: 8 << 20, lasts: true }
}
