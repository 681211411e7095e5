//! Findings: actions against shares that were detected, kept so that they are visible after they ended.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::journal::Journal;
use crate::state::StateFolder;

/// An action against a share, at the time it was first seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Seconds since 1970.
    pub at: u64,
    /// The lease's id; `None` for processes without a lease.
    pub lease: Option<i64>,
    /// The container's id, or the cgroup of a process without a lease.
    pub container: String,
    /// The kind of action, in one word.
    pub kind: String,
    /// A description of the action.
    pub text: String,
}

/// Records a finding below the state folder `state`.
///
/// # Errors
/// When it cannot be written.
pub fn note_found(state: &Path, found: &Found) -> io::Result<()> {
    journal(state).add(&serde_json::to_string(found)?)
}

impl StateFolder {
    /// Returns all findings, newest first.
    pub fn found(&self) -> Vec<Found> {
        journal(self.path()).lines(read)
    }
}

pub(crate) fn read(line: &str) -> Option<Found> {
    serde_json::from_str(line).ok()
}

pub(crate) fn journal(state: &Path) -> Journal<'_> {
    Journal { state, name: "found", most: 2 << 20, lasts: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_is_kept_whatever_a_container_calls_itself() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFolder::open(&folder.path().join("state")).unwrap();
        let found = |container: &str| Found {
            at: 17,
            lease: Some(4),
            container: container.to_owned(),
            kind: "memory".to_owned(),
            text: "more\nthan it may".to_owned(),
        };
        let names = ["web", "a\nb\"\u{1b}"];
        names.iter().for_each(|name| note_found(state.path(), &found(name)).unwrap());
        assert_eq!(state.found(), [found(names[1]), found(names[0])]);
    }
}
