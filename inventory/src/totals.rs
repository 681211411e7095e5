//! Reads and writes the cache of NVML's data: each GPU's memory size, and the properties that images may
//! require of a GPU.
//!
//! The cache is valid for one boot, one driver version and the GPUs in it. With anything else it is stale,
//! and a GPU without a known size gets no leases.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::gpu::Gpu;
use crate::memory::DeviceMemory;
use crate::mig::InstanceId;
use crate::node::Node;

/// NVML's data about the GPUs of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    /// Id of the boot in which NVML was queried.
    pub boot_id: String,
    /// Driver version of that NVML.
    pub driver_version: String,
    /// The highest CUDA version that the driver supports, for example `12.2`; empty if NVML does not report
    /// it.
    pub cuda_version: String,
    /// One entry for each GPU that NVML reported.
    pub gpus: Vec<GpuTotals>,
}

/// NVML's data about one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuTotals {
    /// UUID as text, `GPU-…`.
    pub uuid: String,
    /// The whole memory in bytes; 0 if unknown.
    pub memory_bytes: u64,
    /// The part in bytes that the driver reserves for itself; 0 if NVML does not report it (before 510).
    pub reserved_bytes: u64,
    /// NVML's brand in lower case, for example `tesla`; `unknown` if NVML does not report it.
    pub brand: String,
    /// The compute capability, for example `9.0`; empty if NVML does not report it.
    pub architecture: String,
    /// GPUs that are connected by NVLink, directly or through others and switches, have the same text here:
    /// the PCI address of one of them, for example `0000:07:00.0`. Empty if there are none.
    pub nvlink_group: String,
    /// Whether it is divided into MIG instances: then containers can only get these.
    pub is_mig: bool,
    /// Its MIG instances.
    pub instances: Vec<InstanceTotals>,
    /// The instances that `/proc` showed at that time: ids of GPU instance and compute instance.
    pub shown: Vec<(u32, u32)>,
}

/// NVML's data about one MIG instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstanceTotals {
    /// UUID as text, `MIG-…`.
    pub uuid: String,
    /// Id of its GPU instance on the GPU.
    pub gpu_instance: u32,
    /// Id of its compute instance in the GPU instance.
    pub compute_instance: u32,
    /// NVML's index of the instance on the GPU.
    pub position: u32,
    /// Name with the profile at its end, for example `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
    pub name: String,
    /// The memory in bytes; 0 if unknown.
    pub memory_bytes: u64,
    /// The part in bytes that the driver reserves for itself.
    pub reserved_bytes: u64,
}

/// Why the cache could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the inventory cache {path}")]
pub struct TotalsError {
    path: PathBuf,
    source: std::io::Error,
}

impl Totals {
    /// Path of the cache below the state folder. Versions whose caches have other fields use other names,
    /// since each would consider the other's unreadable and query NVML again.
    pub fn path(state: &Path) -> PathBuf {
        state.join("totals.json")
    }

    /// Reads the cache; `None` if it does not exist or is not readable. It is only a cache and can be filled
    /// again.
    pub fn load(path: &Path) -> Option<Self> {
        fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok())
    }

    /// Writes the cache to another file and renames it, so that readers never see a partial file.
    ///
    /// # Errors
    /// When the state folder cannot be written to.
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

    /// Whether the cache is of this boot and this driver, has all GPUs of `node`, which has no totals yet,
    /// and was made when they had their current MIG instances. It may have more GPUs: one that failed since
    /// does not make the others' entries wrong.
    pub fn fits(&self, boot_id: &str, node: &Node) -> bool {
        let is_known =
            |gpu: &Gpu| self.of(gpu).is_some_and(|totals| totals.shown == node.instances_shown(gpu));
        self.boot_id == boot_id
            && self.driver_version == node.driver.version
            && node.gpus.iter().all(is_known)
    }

    /// NVML's data about this GPU, which must not be an instance.
    pub(crate) fn of(&self, gpu: &Gpu) -> Option<&GpuTotals> {
        let uuid = gpu.uuid.to_string();
        self.gpus.iter().find(|totals| totals.uuid == uuid)
    }
}

impl InstanceTotals {
    pub(crate) const fn id(&self) -> InstanceId {
        InstanceId { gpu: self.gpu_instance, compute: self.compute_instance }
    }
}

/// The memory that programs can allocate on a GPU with `total` bytes, of which the driver reserves `reserved`
/// and `unusable` is lost; `None` if NVML reported no size, or nothing is left.
pub(crate) fn capacity(total: u64, reserved: u64, unusable: DeviceMemory) -> Option<DeviceMemory> {
    let bytes = total.checked_sub(reserved)?.checked_sub(unusable.bytes())?;
    (bytes > 0).then(|| DeviceMemory::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_what_the_driver_leaves_to_programs() {
        const MIB: u64 = 1 << 20;
        let unusable = DeviceMemory::from_bytes(16 * MIB);
        for (total, reserved, want) in [
            (143_771, 616, Some(143_139)), // an H200 gave one program 142,626 MiB in addition to a context of 520
            (81_920, 0, Some(81_904)),
            (632, 616, None),
            (616, 616, None),
            (0, 0, None),
            (100, 616, None),
        ] {
            let got = capacity(total * MIB, reserved * MIB, unusable).map(DeviceMemory::bytes);
            assert_eq!(got, want.map(|mib: u64| mib * MIB), "{total} MiB, {reserved} of them reserved");
        }
    }
}
