//! What CUDA contexts cost on this node's GPUs: what the meter saw of the driver that runs now. A container's library
//! charges it in advance.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gpushare_inventory::GpuUuid;
use gpushare_region::ContextCost;
use serde::{Deserialize, Serialize};

/// Less is taken for a wrong figure, in bytes: no GPU is known to hold a context in it.
const LEAST: u64 = 64 << 20;

/// The costs by GPU. They rest on what containers say of their own allocations, so both figures are bounded by what is
/// charged where nothing was seen: no tenant makes contexts dearer for others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextCosts {
    driver_version: String,
    gpus: BTreeMap<String, Seen>,
}

/// The least and the most that one process's contexts were seen to take, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Seen {
    least: u64,
    most: u64,
}

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
        match self.gpus.get(&gpu.to_string()) {
            Some(seen) => ContextCost { bare: seen.least.min(bare), most: seen.most },
            None => ContextCost { bare, most },
        }
    }

    /// Notes that the contexts of one process take `bytes` on this GPU. Returns whether that is news.
    pub fn note(&mut self, gpu: GpuUuid, bytes: u64) -> bool {
        let bytes = bytes.clamp(LEAST, ContextCost::UNKNOWN.most);
        let seen = self.gpus.entry(gpu.to_string()).or_insert(Seen { least: u64::MAX, most: 0 });
        let new = Seen { least: seen.least.min(bytes), most: seen.most.max(bytes) };
        let is_news = new != *seen;
        *seen = new;
        is_news
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
        for (seen, is_news, bare, most) in [
            (676, true, 520, 676),
            (530, true, 520, 676),
            (600, false, 520, 676),
            (105, true, 105, 676),
            (4000, true, 105, 776),
            (1, true, 64, 776),
        ] {
            assert_eq!(costs.note(gpu, seen * MIB), is_news, "{seen} MiB");
            assert_eq!(costs.of(gpu), ContextCost { bare: bare * MIB, most: most * MIB }, "{seen} MiB");
        }
        assert_eq!(costs.of(other), unknown);
    }

    #[test]
    fn costs_of_another_driver_or_a_damaged_file_count_as_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let gpu = GpuUuid::from_bytes([1; 16]);
        let mut costs = ContextCosts::load(folder.path(), "580.65.06");
        costs.note(gpu, 600 * MIB);
        costs.store(folder.path()).unwrap();
        assert_eq!(ContextCosts::load(folder.path(), "580.65.06"), costs);
        assert_eq!(ContextCosts::load(folder.path(), "580.65.07").of(gpu), ContextCost::UNKNOWN);
        fs::write(path(folder.path()), "{\"driver_version\": \"580").unwrap();
        assert_eq!(ContextCosts::load(folder.path(), "580.65.06").of(gpu), ContextCost::UNKNOWN);
    }
}
