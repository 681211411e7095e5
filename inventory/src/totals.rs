//! The cache of what only NVML knows: how much memory each GPU has, and what images may require of it.
//!
//! It is valid for one boot, one driver version and the GPUs that it names; anything else makes it stale, and a GPU
//! without a known size takes no leases.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::gpu::Gpu;
use crate::memory::DeviceMemory;

/// What NVML told about the GPUs of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    /// The boot in which NVML was asked.
    pub boot_id: String,
    /// The driver version that answered.
    pub driver_version: String,
    /// The highest CUDA version that the driver serves, as `12.2`; empty when NVML does not tell.
    pub cuda_version: String,
    /// One entry per GPU.
    pub gpus: Vec<GpuTotals>,
}

/// One GPU's figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuTotals {
    /// The UUID in text.
    pub uuid: String,
    /// The whole memory in bytes.
    pub memory_bytes: u64,
    /// NVML's brand in lower case, as `tesla`; `unknown` when it does not tell.
    pub brand: String,
    /// The compute capability, as `9.0`; empty when NVML does not tell.
    pub architecture: String,
}

/// Why the cache could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the inventory cache {path}")]
pub struct TotalsError {
    path: PathBuf,
    source: std::io::Error,
}

impl Totals {
    /// The cache's file below the state folder.
    pub fn path(state: &Path) -> PathBuf {
        state.join("inventory.json")
    }

    /// Reads the cache; `None` when there is none yet, or one that nobody can read: it is only a cache, and is made
    /// anew then.
    pub fn load(path: &Path) -> Option<Self> {
        fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok())
    }

    /// Writes the cache by rename, so that no reader sees half of it.
    ///
    /// # Errors
    /// When the state folder cannot be written.
    pub fn store(&self, path: &Path) -> Result<(), TotalsError> {
        let io = |source| TotalsError { path: path.into(), source };
        let text = serde_json::to_vec_pretty(self).map_err(|error| io(error.into()))?;
        let temporary = path.with_extension(format!("json.{}", std::process::id()));
        let written = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path));
        written.map_err(|source| {
            let _ = fs::remove_file(&temporary);
            io(source)
        })
    }

    /// Whether the cache speaks of this boot, this driver and all these GPUs. It may know more: one that fell sick since
    /// takes nothing from what is known of the others.
    pub fn fits(&self, boot_id: &str, driver_version: &str, gpus: &[Gpu]) -> bool {
        let known: BTreeSet<&str> = self.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        self.boot_id == boot_id
            && self.driver_version == driver_version
            && gpus.iter().all(|gpu| known.contains(gpu.uuid.to_string().as_str()))
    }

    /// The memory of one GPU; `None` for a GPU that NVML did not report, or reported without a size.
    pub fn memory(&self, gpu: &Gpu) -> Option<DeviceMemory> {
        let uuid = gpu.uuid.to_string();
        let totals = self.gpus.iter().find(|totals| totals.uuid == uuid)?;
        (totals.memory_bytes > 0).then(|| DeviceMemory::from_bytes(totals.memory_bytes))
    }
}
