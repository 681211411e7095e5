//! The resources that can be served, by name: gpushare's own, and those of other systems, whose manifests then
//! run unchanged.

use anyhow::{Result, bail};
use gpushare_config::Config;
use gpushare_inventory::DeviceMemory;

/// One countable resource, as pods ask for it among their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// As pods name it.
    pub name: String,
    /// What one of it is.
    pub unit: Unit,
    /// Whose name it is.
    pub system: System,
}

/// One of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// So much memory of one GPU.
    Memory(DeviceMemory),
    /// One percent of one GPU's compute.
    Percent,
}

/// Whose name it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// gpushare's own.
    Own,
    /// Alibaba's gpushare and cGPU.
    Aliyun,
    /// Tencent's gpu-manager.
    GpuManager,
    /// Tencent's qGPU.
    Qgpu,
    /// Elastic GPU.
    Elastic,
}

/// What one of a resource is, before the settings are read.
#[derive(Clone, Copy)]
enum Written {
    Granule,
    AliyunUnit,
    Mebibytes(u64),
    Percent,
}

const KNOWN: [(&str, Written, System); 9] = [
    ("gpushare.io/gpu-memory", Written::Granule, System::Own),
    ("gpushare.io/gpu-core", Written::Percent, System::Own),
    ("aliyun.com/gpu-mem", Written::AliyunUnit, System::Aliyun),
    ("aliyun.com/gpu-core.percentage", Written::Percent, System::Aliyun),
    ("tencent.com/vcuda-memory", Written::Mebibytes(256), System::GpuManager),
    ("tencent.com/vcuda-core", Written::Percent, System::GpuManager),
    ("tke.cloud.tencent.com/qgpu-memory", Written::Mebibytes(1024), System::Qgpu),
    ("tke.cloud.tencent.com/qgpu-core", Written::Percent, System::Qgpu),
    ("elasticgpu.io/gpu-core", Written::Percent, System::Elastic),
];

impl Resource {
    /// The resources that the settings name.
    ///
    /// # Errors
    /// When one of them is unknown, two of them count the same, or memory without an amount is not settled.
    pub fn all(config: &Config) -> Result<Vec<Self>> {
        let mut all: Vec<Self> = Vec::new();
        for name in &config.kubernetes.resources {
            let Some((_, written, system)) = KNOWN.iter().find(|(known, ..)| known == name) else {
                let known: Vec<&str> = KNOWN.iter().map(|(name, ..)| *name).collect();
                bail!("kubernetes.resources: {name:?} is unknown; known are {}", known.join(", "));
            };
            let mebibytes = |count: u64| DeviceMemory::from_bytes(count << 20);
            let unit = match written {
                Written::Granule => Unit::Memory(config.kubernetes.memory_granule),
                // What Alibaba's plugin counts if it is not told otherwise.
                Written::AliyunUnit => Unit::Memory(DeviceMemory::from_bytes(
                    config.request.dialects.aliyun_unit.unwrap_or(1 << 30),
                )),
                Written::Mebibytes(count) => Unit::Memory(mebibytes(*count)),
                Written::Percent => Unit::Percent,
            };
            let counts_the_same = |other: &&Self| {
                matches!(
                    (other.unit, unit),
                    (Unit::Percent, Unit::Percent) | (Unit::Memory(_), Unit::Memory(_))
                )
            };
            if let Some(other) = all.iter().find(counts_the_same) {
                bail!(
                    "kubernetes.resources: {:?} and {name:?} count the same of a GPU, and kubelet would give it twice: name one of them \
                     on each node",
                    other.name
                );
            }
            all.push(Self { name: name.clone(), unit, system: *system });
        }
        let counts_compute = all.iter().find(|resource| resource.unit == Unit::Percent);
        if let Some(resource) = counts_compute.filter(|_| config.request.default_memory.is_none()) {
            bail!(
                "kubernetes.resources: a container that asks for {} alone would get all memory that is left on a GPU: set \
                 request.default_memory, as \"10%\"",
                resource.name
            );
        }
        Ok(all)
    }

    /// The name of its socket in kubelet's folder. A socket's path has at most 107 bytes.
    pub fn endpoint(&self) -> String {
        let name: String =
            self.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        format!("gpushare-{name}.sock")
    }
}
