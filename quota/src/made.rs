//! How long the latest shares took to make, for whoever measures the node. It is forgotten with the boot.

use std::path::Path;
use std::time::Duration;

use crate::journal::{Journal, Stamp};
use crate::state::StateFolder;

/// Notes in the state folder `state` that a container's share took this long to make. A failure is ignored.
pub fn note_made(state: &Path, took: Duration) {
    let _ = journal(state).add(&took.as_nanos().to_string());
}

impl StateFolder {
    /// Tells whether shares were made: it changes with each.
    pub fn made_stamp(&self) -> Option<Stamp> {
        journal(self.path()).stamp()
    }

    /// How long those shares took that stand behind the first `length` bytes of the notes, or in all of them
    /// where they were begun anew.
    pub fn made_behind(&self, length: u64) -> Vec<Duration> {
        journal(self.path()).lines_behind(length, |line| line.parse().ok().map(Duration::from_nanos))
    }
}

fn journal(state: &Path) -> Journal<'_> {
    Journal { state, name: "made", most: 64 << 10, lasts: false }
}
