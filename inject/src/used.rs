//! What the containers of a lease have used, for the history: by the region that is left of them, and by what
//! the meter saw while they ran.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gpushare_quota::{Lease, Running, StateFolder, Store, StoreError, Used};
use serde::{Deserialize, Serialize};

use crate::region::Region;

/// The store below the state folder, which notes in the history what each lease used that ends.
///
/// # Errors
/// Those of [`Store::open`].
pub fn open_measured(state: &StateFolder) -> Result<Store, StoreError> {
    Store::open(state.path()).map(measured)
}

/// `store`, which notes in the history what each lease used that ends.
pub fn measured(store: Store) -> Store {
    store.measured_by(used)
}

/// What the containers of `lease` used so far. What cannot be read counts as nothing.
pub fn used(state: &Path, lease: &Lease) -> Used {
    let lines = lease.grants.len();
    let region = Region::of(state, lease.id);
    let measured = region.measured().unwrap_or_default();
    let measured = || measured.iter().take(lines).filter(|line| line.until > 0);
    let seen = MemoryUse::read(state).remove(&lease.id);
    let throttled = region.read_throttled().unwrap_or_default();
    Used {
        gpu_nanoseconds: measured().next().map(|_| measured().map(|line| line.own_nanoseconds).sum()),
        throttled_nanoseconds: throttled.iter().take(lines).fold(0, |sum, line| sum.saturating_add(*line)),
        refused: region.read_usage(&Running::default(), lines).map_or(0, |usage| usage.refused),
        peak_bytes: seen.map(|seen| seen.peak),
        mean_bytes: seen.and_then(|seen| seen.mean()),
    }
}

/// How much memory the meter saw a lease's containers hold, at its looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// The most, in bytes.
    pub peak: u64,
    /// The sum over all looks, in MiB.
    pub sum: u64,
    /// How many looks there were.
    pub looks: u64,
}

impl MemoryUse {
    /// Adds a look that saw `bytes`.
    pub fn add(&mut self, bytes: u64) {
        self.peak = self.peak.max(bytes);
        self.sum = self.sum.saturating_add(bytes >> 20);
        self.looks += 1;
    }

    /// The memory that was held on average, in bytes; `None` before the first look.
    pub fn mean(&self) -> Option<u64> {
        self.sum.checked_div(self.looks).map(|mebibytes| mebibytes << 20)
    }

    /// What the meter wrote last, by lease; empty where none ran.
    pub fn read(state: &Path) -> BTreeMap<i64, Self> {
        serde_json::from_slice(&fs::read(Self::path(state)).unwrap_or_default()).unwrap_or_default()
    }

    /// Replaces what the meter wrote before.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(all: &BTreeMap<i64, Self>, state: &Path) -> io::Result<()> {
        let new = state.join("memory.new");
        fs::write(&new, serde_json::to_vec(all)?)?;
        fs::rename(new, Self::path(state))
    }

    fn path(state: &Path) -> PathBuf {
        state.join("memory.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_is_read_by_who_ends_the_lease() {
        let folder = tempfile::tempdir().unwrap();
        assert!(MemoryUse::read(folder.path()).is_empty());
        let mut seen = MemoryUse::default();
        assert_eq!(seen.mean(), None);
        [1 << 30, 3 << 30].into_iter().for_each(|bytes| seen.add(bytes));
        assert_eq!((seen.peak, seen.mean()), (3 << 30, Some(2 << 30)));
        let all = BTreeMap::from([(7, seen)]);
        MemoryUse::write(&all, folder.path()).unwrap();
        assert_eq!(MemoryUse::read(folder.path()), all);
        fs::write(folder.path().join("memory.json"), "{\"7\": {").unwrap();
        assert!(MemoryUse::read(folder.path()).is_empty());
    }
}
