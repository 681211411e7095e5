//! What was done to living shares after they were granted, so that it is known after they have ended.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::journal::Journal;
use crate::lease::{Lease, PastLease, now};
use crate::state::StateFolder;

/// Something that was done to a living share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deed {
    /// Seconds since 1970.
    pub at: u64,
    /// The lease's id.
    pub lease: i64,
    /// The container's id.
    pub container: String,
    /// What was done to it.
    #[serde(flatten)]
    pub what: Done,
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "done", rename_all = "kebab-case")]
pub enum Done {
    /// It was given other figures. What grows and shrinks by itself is not noted.
    Resized {
        /// What it granted before, in words.
        before: String,
        /// What it grants now, in words.
        after: String,
        /// The memory that it granted before, over all GPUs in MiB.
        mebibytes: u64,
    },
    /// Its limit was lowered by what its containers hold beyond their books, for as long as they do.
    Capped {
        /// By which setting, and for what.
        why: String,
    },
    /// Its containers were stopped.
    Stopped {
        /// By which setting, and for what.
        why: String,
    },
    /// Stopped containers were let go on.
    Continued,
    /// Its containers were asked or made to end.
    Ended {
        /// By which setting, and for what.
        why: String,
    },
}

impl Done {
    /// What a change of figures did; `None` where they are what they were.
    pub fn resized(old: &Lease, new: &Lease) -> Option<Self> {
        let (before, after) = (old.summary(), new.summary());
        (before != after).then(|| Self::Resized { before, after, mebibytes: old.mebibytes() })
    }

    /// Notes below the state folder `state` that this was done to `lease`. A failure is logged and hinders
    /// nothing.
    pub fn note(self, state: &Path, lease: &Lease) {
        let container = lease.member.key.container.clone();
        let deed = Deed { at: now(), lease: lease.id, container, what: self };
        let line = serde_json::to_string(&deed).map_err(io::Error::from);
        if let Err(error) = line.and_then(|line| journal(state).add(&line)) {
            tracing::warn!(container = %deed.container, %error, "what was done to a share is left out of the history");
        }
    }
}

/// What was done to shares, by container.
#[derive(Clone, Debug, Default)]
pub struct Deeds(BTreeMap<String, Vec<Deed>>);

impl Deeds {
    /// What was done to `lease` while it was held, oldest first.
    pub fn of<'a>(&'a self, lease: &'a PastLease) -> impl Iterator<Item = &'a Deed> {
        let containers = lease.others.iter().chain([&lease.key.container]);
        let all = containers.filter_map(|container| self.0.get(container)).flatten();
        let is_its_time = |deed: &&Deed| (lease.granted_at..=lease.released_at).contains(&deed.at);
        let mut its: Vec<&Deed> = all.filter(is_its_time).collect();
        its.sort_by_key(|deed| deed.at);
        its.into_iter()
    }

    /// All of it, in no order of time.
    pub fn all(&self) -> impl Iterator<Item = &Deed> {
        self.0.values().flatten()
    }
}

impl FromIterator<Deed> for Deeds {
    /// Of those of one moment the first is taken for the oldest.
    fn from_iter<I: IntoIterator<Item = Deed>>(deeds: I) -> Self {
        let mut all = BTreeMap::<String, Vec<Deed>>::new();
        deeds.into_iter().for_each(|deed| all.entry(deed.container.clone()).or_default().push(deed));
        Self(all)
    }
}

impl StateFolder {
    /// What was done to shares, as far as the history has it.
    pub fn deeds(&self) -> Deeds {
        journal(self.path()).lines(|line| serde_json::from_str(line).ok()).into_iter().rev().collect()
    }
}

pub(crate) fn journal(state: &Path) -> Journal<'_> {
    Journal { state, name: "deeds", most: 2 << 20, lasts: true }
}
