//! Actions on living shares after they were granted, recorded so that they are visible after the shares
//! ended.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::journal::Journal;
use crate::lease::{Lease, PastLease, now};
use crate::state::StateFolder;

/// An action on a living share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deed {
    /// Seconds since 1970.
    pub at: u64,
    /// The lease's id.
    pub lease: i64,
    /// The container's id.
    pub container: String,
    /// What was done to the lease, with its figures.
    #[serde(flatten)]
    pub what: Done,
}

/// The kind of action.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "done", rename_all = "kebab-case")]
pub enum Done {
    /// It got new figures. Automatic growth and shrinking is not recorded.
    Resized {
        /// Its grants before, in words.
        before: String,
        /// Its grants now, in words.
        after: String,
        /// The memory that it granted before, over all GPUs in MiB.
        mebibytes: u64,
    },
    /// Its limit was reduced by the memory that its containers use beyond what gpushare accounted for, while
    /// that lasts.
    Capped {
        /// The setting that caused it, and the reason.
        why: String,
    },
    /// Its containers were stopped.
    Stopped {
        /// The setting that caused it, and the reason.
        why: String,
    },
    /// Stopped containers continued.
    Continued,
    /// Its containers got a request to end, or were killed.
    Ended {
        /// The setting that caused it, and the reason.
        why: String,
    },
}

impl Done {
    /// Describes a change of figures; `None` if nothing changed.
    pub fn resized(old: &Lease, new: &Lease) -> Option<Self> {
        let (before, after) = (old.summary(), new.summary());
        (before != after).then(|| Self::Resized { before, after, mebibytes: old.mebibytes() })
    }

    /// Records the action on `lease` below the state folder `state`. A failure is only logged.
    pub fn note(self, state: &Path, lease: &Lease) {
        let container = lease.member.key.container.clone();
        let deed = Deed { at: now(), lease: lease.id, container, what: self };
        let line = serde_json::to_string(&deed).map_err(io::Error::from);
        if let Err(error) = line.and_then(|line| journal(state).add(&line)) {
            tracing::warn!(container = %deed.container, %error, "what was done to a share is left out of the history");
        }
    }
}

/// Actions on shares, by container.
#[derive(Clone, Debug, Default)]
pub struct Deeds(BTreeMap<String, Vec<Deed>>);

impl Deeds {
    /// Returns the actions on `lease` during its lifetime, oldest first.
    pub fn of<'a>(&'a self, lease: &'a PastLease) -> impl Iterator<Item = &'a Deed> {
        let containers = lease.others.iter().chain([&lease.key.container]);
        let all = containers.filter_map(|container| self.0.get(container)).flatten();
        let is_its_time = |deed: &&Deed| (lease.granted_at..=lease.released_at).contains(&deed.at);
        let mut its: Vec<&Deed> = all.filter(is_its_time).collect();
        its.sort_by_key(|deed| deed.at);
        its.into_iter()
    }

    /// Returns all actions, not sorted by time.
    pub fn all(&self) -> impl Iterator<Item = &Deed> {
        self.0.values().flatten()
    }
}

impl FromIterator<Deed> for Deeds {
    /// Among actions with the same time, the first counts as the oldest.
    fn from_iter<I: IntoIterator<Item = Deed>>(deeds: I) -> Self {
        let mut all = BTreeMap::<String, Vec<Deed>>::new();
        deeds.into_iter().for_each(|deed| all.entry(deed.container.clone()).or_default().push(deed));
        Self(all)
    }
}

impl StateFolder {
    /// Returns the actions on shares that are in the history.
    pub fn deeds(&self) -> Deeds {
        journal(self.path()).lines(|line| serde_json::from_str(line).ok()).into_iter().rev().collect()
    }
}

pub(crate) fn journal(state: &Path) -> Journal<'_> {
    Journal { state, name: "deeds", most: 2 << 20, lasts: true }
}
