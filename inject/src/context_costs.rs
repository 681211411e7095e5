//! What CUDA contexts cost on this node's GPUs: what the meter saw of the driver that runs now. A container's library
//! charges it in advance.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gpushare_inventory::GpuUuid;
use gpushare_region::ContextCost;
use serde::{Deserialize, Serialize};

/// Less is taken for a wrong figure, in bytes: no GPU is known to hold a context in it.
const LEAST: u64 = 64 << 20;

/// The costs by GPU. They rest on what containers say of their own allocations. So they are bounded by what is charged
/// where nothing was seen, count once several leases were measured, and never fall: no tenant makes contexts dearer for
/// others, and none makes them cheaper alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextCosts {
    driver_version: String,
    /// What was seen, by the GPU's UUID.
    gpus: BTreeMap<String, Seen>,
}

/// What was seen on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Seen {
    /// The most that one process's contexts took, in bytes.
    most: u64,
    /// The first leases that were measured, at most [`WITNESSES`].
    leases: BTreeSet<i64>,
}

/// How many leases must have been measured before less is charged than where nothing was seen.
const WITNESSES: usize = 3;

impl ContextCosts {
    /// What was seen under this driver; nothing where the file is missing, cannot be read, or is of another driver.
    pub fn load(state: &Path, driver_version: &str) -> Self {
        let known = fs::read(path(state)).ok().and_then(|bytes| serde_json::from_slice::<Self>(&bytes).ok());
        known
            .filter(|known| known.driver_version == driver_version)
            .unwrap_or_else(|| Self { driver_version: driver_version.to_owned(), gpus: BTreeMap::new() })
    }

    /// What a process's contexts are charged as on this GPU.
    pub fn of(&self, gpu: GpuUuid) -> ContextCost {
        let ContextCost { bare, most } = ContextCost::UNKNOWN;
        let seen = self.gpus.get(&gpu.to_string()).filter(|seen| seen.leases.len() >= WITNESSES);
        let most = seen.map_or(most, |seen| seen.most);
        ContextCost { bare: bare.min(most), most }
    }

    /// Notes that the contexts of one process of `lease` take `bytes` on this GPU. Returns whether that is news.
    pub fn note(&mut self, gpu: GpuUuid, lease: i64, bytes: u64) -> bool {
        let bytes = bytes.clamp(LEAST, ContextCost::UNKNOWN.most);
        let seen = self.gpus.entry(gpu.to_string()).or_default();
        let is_new = seen.leases.len() < WITNESSES && seen.leases.insert(lease);
        let is_more = bytes > seen.most;
        seen.most = bytes.max(seen.most);
        is_new || is_more
    }

    /// Writes what was seen, by another file and a rename.
    ///
    /// # Errors
    /// When the state folder cannot be written to.
    pub fn store(&self, state: &Path) -> io::Result<()> {
        let new = state.join("contexts.new");
        fs::write(&new, serde_json::to_vec_pretty(self)?)?;
        fs::rename(new, path(state))
    }
}

fn path(state: &Path) -> PathBuf {
    state.join("contexts.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn costs_follow_what_was_seen_within_the_bounds() {
        let (gpu, other) = (GpuUuid::from_bytes([1; 16]), GpuUuid::from_bytes([2; 16]));
        let mut costs = ContextCosts::default();
        let unknown = ContextCost::UNKNOWN;
        assert_eq!(costs.of(gpu), unknown);
        for (lease, seen, is_news, bare, most) in [
            (1, 1, true, 520, 776),
            (1, 1, false, 520, 776), // one lease alone
            (2, 64, true, 520, 776),
            (3, 105, true, 105, 105),
            (4, 105, false, 105, 105),
            (4, 600, true, 520, 600),
            (5, 676, true, 520, 676),
            (6, 530, false, 520, 676),
            (7, 1, false, 520, 676),
            (8, 4000, true, 520, 776),
        ] {
            assert_eq!(costs.note(gpu, lease, seen * MIB), is_news, "{seen} MiB");
            assert_eq!(costs.of(gpu), ContextCost { bare: bare * MIB, most: most * MIB }, "{seen} MiB");
        }
        assert_eq!(costs.of(other), unknown);
    }

    #[test]
    fn costs_of_another_driver_or_a_damaged_file_count_as_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let gpu = GpuUuid::from_bytes([1; 16]);
        let mut costs = ContextCosts::load(folder.path(), "580.65.06");
        for lease in 1..=3 {
            assert!(costs.note(gpu, lease, 600 * MIB));
        }
        assert_eq!(costs.of(gpu).most, 600 * MIB);
        costs.store(folder.path()).unwrap();
        assert_eq!(ContextCosts::load(folder.path(), "580.65.06"), costs);
        assert_eq!(ContextCosts::load(folder.path(), "580.65.07").of(gpu), ContextCost::UNKNOWN);
        fs::write(path(folder.path()), "{\"driver_version\": \"580").unwrap();
        assert_eq!(ContextCosts::load(folder.path(), "580.65.06").of(gpu), ContextCost::UNKNOWN);
    }
}
