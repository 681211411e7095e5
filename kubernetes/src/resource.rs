//! The countable resources that a node may serve, by name: gpushare's own, and those of other systems, whose
//! manifests then run unchanged.

use anyhow::{Result, bail};
use gpushare_config::Config;
use gpushare_inventory::DeviceMemory;
use gpushare_request::KubeletPolicy;
use serde::{Deserialize, Serialize};

/// One countable resource, as pods ask for it among their limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Resource {
    /// As pods name it.
    pub name: String,
    /// What one of it is.
    pub unit: Unit,
    /// Whose name it is.
    pub system: System,
}

/// One of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Unit {
    /// So many bytes of one GPU's memory.
    Memory(u64),
    /// One percent of one GPU's memory.
    MemoryPercent,
    /// One percent of one GPU's compute.
    Percent,
    /// A share of one GPU, as large as other resources beside it say. A GPU has this many at most.
    Slot(u16),
    /// One of so many equal parts of a GPU's memory.
    Replica(u16),
    /// One GPU. It is told how many there are, and nothing is given.
    Gpus,
}

/// Whose name it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// HAMi.
    Hami,
    /// Volcano's vgpu.
    Volcano,
    /// NVIDIA's plugin with replicas.
    Nvidia,
}

/// Who counts a resource on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// kubelet, by the devices that the agent's plugin lists.
    ByKubelet,
    /// The scheduler extender alone. A GPU has more MiB than kubelet takes devices.
    ByExtender,
}

/// What one of a resource is, before the settings are read.
#[derive(Clone, Copy)]
enum Written {
    Granule,
    AliyunUnit,
    Mebibytes(u64),
    MemoryPercent,
    Percent,
    Slot,
    Replica,
    Gpus,
}

/// A share of one GPU beside which other resources say how much.
pub const SLOT: &str = "gpushare.io/gpu-slot";
/// How many of [`SLOT`] a GPU has: it is there to have kubelet give a GPU, and bounds nothing.
const UNBOUNDED: u16 = 1000;

const KNOWN: [(&str, Written, System, Counted); 21] = [
    ("gpushare.io/gpu-memory", Written::Granule, System::Own, Counted::ByKubelet),
    ("gpushare.io/gpu-core", Written::Percent, System::Own, Counted::ByKubelet),
    ("aliyun.com/gpu-mem", Written::AliyunUnit, System::Aliyun, Counted::ByKubelet),
    ("aliyun.com/gpu-core.percentage", Written::Percent, System::Aliyun, Counted::ByKubelet),
    ("aliyun.com/gpu-count", Written::Gpus, System::Aliyun, Counted::ByKubelet),
    ("tencent.com/vcuda-memory", Written::Mebibytes(256), System::GpuManager, Counted::ByKubelet),
    ("tencent.com/vcuda-core", Written::Percent, System::GpuManager, Counted::ByKubelet),
    ("tke.cloud.tencent.com/qgpu-memory", Written::Mebibytes(1024), System::Qgpu, Counted::ByKubelet),
    ("tke.cloud.tencent.com/qgpu-core", Written::Percent, System::Qgpu, Counted::ByKubelet),
    ("elasticgpu.io/gpu-core", Written::Percent, System::Elastic, Counted::ByKubelet),
    ("elasticgpu.io/gpu-memory", Written::Mebibytes(1), System::Elastic, Counted::ByExtender),
    // What kubelet gives for memory in MiB alone: gpushare-kube webhook adds it to such containers.
    (SLOT, Written::Slot, System::Own, Counted::ByKubelet),
    ("nvidia.com/gpu", Written::Slot, System::Hami, Counted::ByKubelet),
    ("nvidia.com/gpumem", Written::Mebibytes(1), System::Hami, Counted::ByExtender),
    ("nvidia.com/gpumem-percentage", Written::MemoryPercent, System::Hami, Counted::ByExtender),
    ("nvidia.com/gpucores", Written::Percent, System::Hami, Counted::ByExtender),
    ("volcano.sh/vgpu-number", Written::Slot, System::Volcano, Counted::ByKubelet),
    ("volcano.sh/vgpu-memory", Written::Mebibytes(1), System::Volcano, Counted::ByExtender),
    ("volcano.sh/vgpu-memory-percentage", Written::MemoryPercent, System::Volcano, Counted::ByExtender),
    ("volcano.sh/vgpu-cores", Written::Percent, System::Volcano, Counted::ByExtender),
    ("nvidia.com/gpu.shared", Written::Replica, System::Nvidia, Counted::ByKubelet),
];

/// Whether gpushare may serve a resource of this name.
pub fn is_known(name: &str) -> bool {
    known(name).is_some()
}

fn known(name: &str) -> Option<&'static (&'static str, Written, System, Counted)> {
    KNOWN.iter().find(|(known, ..)| *known == name)
}

impl Resource {
    /// The resources that the settings name.
    ///
    /// # Errors
    /// When one of them is unknown, two of them count the same, one counts nothing without another, or memory
    /// without an amount is not settled.
    pub fn all(config: &Config) -> Result<Vec<Self>> {
        let mut all: Vec<Self> = Vec::new();
        for name in &config.kubernetes.resources {
            let Some((_, written, system, _)) = known(name) else {
                let known: Vec<&str> = KNOWN.iter().map(|(name, ..)| *name).collect();
                bail!("kubernetes.resources: {name:?} is unknown; known are {}", known.join(", "));
            };
            let unit = match written {
                Written::Granule => Unit::Memory(config.kubernetes.memory_granule.bytes()),
                // What Alibaba's plugin counts if it is not told otherwise.
                Written::AliyunUnit => Unit::Memory(config.request.dialects.aliyun_unit.unwrap_or(1 << 30)),
                Written::Mebibytes(count) => Unit::Memory(count << 20),
                Written::MemoryPercent => Unit::MemoryPercent,
                Written::Percent => Unit::Percent,
                Written::Slot if name == SLOT => Unit::Slot(UNBOUNDED),
                Written::Slot => Unit::Slot(config.kubernetes.slots),
                Written::Replica => Unit::Replica(config.kubernetes.slots),
                Written::Gpus => Unit::Gpus,
            };
            let resource = Self { name: name.clone(), unit, system: *system };
            if let Some(other) = all.iter().find(|other| other.counts_the_same(&resource)) {
                bail!(
                    "kubernetes.resources: {:?} and {name:?} count the same of a GPU, and kubelet would give it twice: name one of them \
                     on each node",
                    other.name
                );
            }
            all.push(resource);
        }
        check(&all, config)?;
        Ok(all)
    }

    /// Who counts it.
    pub fn counted(&self) -> Counted {
        known(&self.name).map_or(Counted::ByKubelet, |(.., counted)| *counted)
    }

    /// Whether one GPU would be given twice if a node had both.
    fn counts_the_same(&self, other: &Self) -> bool {
        let is_same = match (self.unit, other.unit) {
            (Unit::Percent, Unit::Percent) => true,
            (one, other) => one.is_of_memory() && other.is_of_memory(),
        };
        // Beside a slot a pod may say its memory in one of two ways.
        let is_one_system = self.system == other.system && self.counted() == Counted::ByExtender;
        self.name == other.name || (is_same && !(is_one_system && self.unit != other.unit))
    }

    /// The name of its socket in kubelet's folder. A socket's path has at most 107 bytes.
    pub fn endpoint(&self) -> String {
        let name: String =
            self.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        format!("gpushare-{name}.sock")
    }
}

impl Unit {
    /// Whether it is of a GPU's memory.
    pub fn is_of_memory(self) -> bool {
        matches!(self, Self::Memory(_) | Self::MemoryPercent | Self::Replica(_))
    }

    /// One of it in words.
    pub fn name(self) -> String {
        match self {
            Self::Memory(bytes) => DeviceMemory::from_bytes(bytes).to_string(),
            Self::MemoryPercent => "1 % of a GPU's memory".to_owned(),
            Self::Percent => "1 % of a GPU's compute".to_owned(),
            Self::Slot(_) => "a share of one GPU".to_owned(),
            Self::Replica(parts) => format!("1/{parts} of a GPU's memory"),
            Self::Gpus => "a GPU".to_owned(),
        }
    }
}

/// Refuses resources of which some count nothing as the settings are.
fn check(all: &[Resource], config: &Config) -> Result<()> {
    let is_slot = |resource: &&Resource| matches!(resource.unit, Unit::Slot(_));
    let slot = all.iter().find(is_slot);
    // Every container takes one of what bounds their number.
    let is_bound = |resource: &&Resource| {
        matches!(resource.unit, Unit::Slot(_) | Unit::Replica(_)) && resource.name != SLOT
    };
    if let Some(slot) = all.iter().find(is_bound)
        && let Some(other) = all.iter().find(|other| other.system != slot.system)
    {
        bail!(
            "kubernetes.resources: {:?} is one of another system than {:?}, and kubelet would give a GPU twice: name those of \
             one system on each node",
            other.name,
            slot.name
        );
    }
    let by_extender = all.iter().find(|resource| resource.counted() == Counted::ByExtender);
    if let Some(resource) = by_extender {
        let has_devices = all.iter().any(|other| other.counted() == Counted::ByKubelet);
        if !has_devices {
            bail!(
                "kubernetes.resources: {:?} alone has kubelet give no GPU: name the resource of {} that counts GPUs or compute, too",
                resource.name,
                resource.name.split('/').next().unwrap_or_default()
            );
        }
        if config.request.kubelet != KubeletPolicy::Refuse {
            bail!(
                "kubernetes.resources: amounts of {:?} stand in the pod alone, and containers would not be held to them: set \
                 request.kubelet = \"refuse\"",
                resource.name
            );
        }
    }
    let counts_compute = all.iter().find(|resource| resource.unit == Unit::Percent && slot.is_none());
    if let Some(resource) = counts_compute.filter(|_| config.request.default_memory.is_none()) {
        bail!(
            "kubernetes.resources: a container that asks for {} alone would get all memory that is left on a GPU: set \
             request.default_memory, as \"10%\"",
            resource.name
        );
    }
    Ok(())
}

/// Whether another plugin that many clusters have serves a resource of this name, too.
pub fn is_ambiguous(name: &str) -> bool {
    name == "nvidia.com/gpu" || name == "nvidia.com/gpu.shared"
}

/// What a container has to ask for besides, where it asks for amounts that kubelet does not count, and for
/// nothing that it does.
pub fn companion(names: &[&str]) -> Option<&'static str> {
    let all = || names.iter().filter_map(|name| known(name));
    let is_counted = |(.., counted): &&(&str, Written, System, Counted)| *counted == Counted::ByKubelet;
    let (.., system, _) = all().next()?;
    if all().any(|known| is_counted(&known)) {
        return None;
    }
    let is_slot = |(_, written, its, _): &&(&str, Written, System, Counted)| {
        matches!(written, Written::Slot) && its == system
    };
    Some(KNOWN.iter().find(is_slot).map_or(SLOT, |(name, ..)| name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn kube_scheduler_is_told_of_every_resource_and_which_of_them_it_is_not_to_count() {
        let map: Value =
            serde_saphyr::from_str(include_str!("../manifests/extender/configuration.yaml")).unwrap();
        let told: Value = serde_saphyr::from_str(map["data"]["config.yaml"].as_str().unwrap()).unwrap();
        let told = told["extenders"][0]["managedResources"]
            .as_array()
            .unwrap()
            .iter()
            .map(|its| (its["name"].as_str().unwrap().to_owned(), its["ignoredByScheduler"] == true));
        let mut told: Vec<_> = told.collect();
        // Nobody asks for what only tells a number.
        let asked = KNOWN.iter().filter(|(_, written, ..)| !matches!(written, Written::Gpus));
        let mut known: Vec<_> =
            asked.map(|(name, .., counted)| ((*name).to_owned(), *counted == Counted::ByExtender)).collect();
        told.sort();
        known.sort();
        assert_eq!(told, known);
    }

    #[test]
    fn amounts_without_devices_have_a_companion() {
        for (names, want) in [
            (&["nvidia.com/gpumem", "nvidia.com/gpucores"][..], Some("nvidia.com/gpu")),
            (&["nvidia.com/gpumem", "nvidia.com/gpu"], None),
            (&["volcano.sh/vgpu-cores"], Some("volcano.sh/vgpu-number")),
            (&["elasticgpu.io/gpu-memory"], Some(SLOT)),
            (&["elasticgpu.io/gpu-memory", "elasticgpu.io/gpu-core"], None),
            (&["cpu"], None),
            (&[], None),
        ] {
            assert_eq!(companion(names), want, "{names:?}");
        }
    }
}
