//! What a node has of each resource: ids that name the GPU, and whether it can be given. Pure but for
//! [`Offer::of`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Once;

use anyhow::{Result, bail};
use gpushare_inject::{GrantError, known_node};
use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid, NodeError};
use gpushare_placement::GPUS;
use gpushare_quota::Admission;

use crate::node::Agent;
use crate::resource::{Counted, Resource, Unit};

/// Bytes of a list that kubelet takes at most (gRPC's own limit for clients that set none), less some room.
const LONGEST: usize = (4 << 20) - 4096;
/// Bytes of one device in a list, at most: its id, its health, its NUMA node and what stands between them.
const DEVICE: usize = 40 + 1 + 6 + 9 + 16;

/// The GPUs, by UUID.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    gpus: BTreeMap<GpuUuid, OfferedGpu>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedGpu {
    /// Its index on the node.
    pub index: u32,
    /// All memory that shares together may have of it.
    pub memory: DeviceMemory,
    /// What one share may have.
    pub per_share: DeviceMemory,
    /// What all shares together may have of its compute, in percent.
    pub percent: u16,
    /// Its NUMA node, where the machine tells.
    pub numa_node: Option<u32>,
    /// Whether new shares of it are given.
    pub is_open: bool,
}

impl Offer {
    /// What the node has now. A GPU of `before` that is not shown any more is not open.
    ///
    /// # Errors
    /// When the node cannot be read, or has more of a resource than kubelet takes.
    pub fn of(agent: &Agent, before: &Self) -> Result<Self> {
        let rules = &agent.config.quota;
        let mut offer = before.clone();
        offer.gpus.values_mut().for_each(|gpu| gpu.is_open = false);
        match known_node(&agent.state, &agent.settings()) {
            Ok(node) => {
                let whole: Vec<&Gpu> = node.gpus.iter().filter(|gpu| gpu.instance.is_none()).collect();
                if let Some(beyond) = whole.get(GPUS) {
                    static TOLD: Once = Once::new();
                    TOLD.call_once(|| {
                        let first = beyond.index;
                        tracing::warn!(
                            first,
                            "GPUs from this index on are not counted: schedulers know {GPUS} of a node"
                        );
                    });
                }
                for gpu in whole.into_iter().take(GPUS) {
                    let Some(memory) = gpu.memory else { continue };
                    let numa_node = gpu.place.numa_node;
                    let is_open = !rules.cordoned.contains(&gpu.uuid);
                    let offered = OfferedGpu { numa_node, is_open, ..offered(gpu.index, memory, rules) };
                    offer.gpus.insert(gpu.uuid, offered);
                }
            }
            Err(GrantError::Node(
                why
                @ (NodeError::NoDriver { .. } | NodeError::NoGpu { .. } | NodeError::NoneInService { .. }),
            )) => tracing::warn!(%why, "the node has no GPU to offer"),
            Err(error) => return Err(error.into()),
        }
        let mut counted = agent.resources.iter().filter(|resource| resource.counted() == Counted::ByKubelet);
        counted.try_for_each(|resource| offer.check(resource))?;
        Ok(offer)
    }

    /// Checks that kubelet takes the list of the resource's devices.
    fn check(&self, resource: &Resource) -> Result<()> {
        let count: u64 = self.gpus.values().map(|gpu| gpu.count(resource)).sum();
        let most = (LONGEST / DEVICE) as u64;
        if count <= most {
            return Ok(());
        }
        let memory: u64 = self.gpus.values().map(|gpu| gpu.memory.bytes()).sum();
        let least = (memory >> 20).div_ceil(most).next_power_of_two();
        bail!(
            "{} has {count} devices on this node, and kubelet takes {most}: set kubernetes.memory_granule (dialects.aliyun.unit) \
             to {least}MiB or more",
            resource.name
        )
    }

    /// The GPUs, by UUID.
    pub fn gpus(&self) -> impl Iterator<Item = (GpuUuid, &OfferedGpu)> {
        self.gpus.iter().map(|(uuid, gpu)| (*uuid, gpu))
    }

    /// The UUID of the GPU with this index.
    pub fn at(&self, index: u32) -> Option<GpuUuid> {
        self.gpus().find(|(_, gpu)| gpu.index == index).map(|(uuid, _)| uuid)
    }

    /// One GPU.
    pub fn gpu(&self, uuid: GpuUuid) -> Option<&OfferedGpu> {
        self.gpus.get(&uuid)
    }

    /// All ids of the resource.
    pub fn ids(&self, resource: &Resource) -> BTreeSet<String> {
        self.gpus()
            .flat_map(|(uuid, gpu)| (0..gpu.count(resource)).map(move |number| id(uuid, number)))
            .collect()
    }
}

impl OfferedGpu {
    /// How many of the resource it has.
    pub fn count(&self, resource: &Resource) -> u64 {
        match resource.unit {
            Unit::Memory(bytes) => self.memory.bytes() / bytes.max(1),
            Unit::MemoryPercent => 100,
            Unit::Percent => self.percent.into(),
            Unit::Slot(count) | Unit::Replica(count) => count.into(),
            Unit::Gpus => 1,
        }
    }
}

fn offered(index: u32, memory: DeviceMemory, rules: &Admission) -> OfferedGpu {
    OfferedGpu {
        index,
        memory: rules.total(memory),
        per_share: rules.per_lease(memory),
        percent: rules.cores_percent,
        numa_node: None,
        is_open: true,
    }
}

/// The id of a device: the GPU's UUID and a number. An id has at most 63 bytes.
pub fn id(gpu: GpuUuid, number: u64) -> String {
    format!("{gpu}-{number}")
}

/// The GPU that an id names.
pub fn gpu_of(id: &str) -> Option<GpuUuid> {
    let (uuid, number) = id.rsplit_once('-')?;
    number.parse::<u64>().ok()?;
    uuid.parse().ok()
}

/// Whether an id is one of this form, also of a GPU that is not there any more.
pub fn is_id(id: &str) -> bool {
    gpu_of(id).is_some()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::resource::System;

    /// GPUs of 80 GiB, by number.
    pub fn offer(numbers: &[u8]) -> Offer {
        let memory = DeviceMemory::from_bytes(80 << 30);
        let gpu = |number: &u8| {
            (GpuUuid::from_bytes([*number; 16]), offered(u32::from(*number), memory, &Admission::default()))
        };
        Offer { gpus: numbers.iter().map(gpu).collect() }
    }

    /// Ids of these numbers of a GPU.
    pub fn ids(gpu: u8, numbers: std::ops::Range<u64>) -> Vec<String> {
        numbers.map(|number| id(GpuUuid::from_bytes([gpu; 16]), number)).collect()
    }

    /// A resource of so many MiB.
    pub fn memory(mebibytes: u64) -> Resource {
        let unit = Unit::Memory(mebibytes << 20);
        Resource { name: "gpushare.io/gpu-memory".into(), unit, system: System::Own }
    }

    #[test]
    fn sixteen_large_gpus_are_within_kubelets_limit_and_a_granule_too_small_is_refused_with_the_least() {
        let mut offer = offer(&(0..16).collect::<Vec<u8>>());
        offer.gpus.values_mut().for_each(|gpu| gpu.memory = DeviceMemory::from_bytes(141 << 30));
        assert!(offer.check(&memory(256)).is_ok());
        assert_eq!(offer.ids(&memory(256)).len(), 16 * 564);
        let error = offer.check(&memory(1)).unwrap_err().to_string();
        assert!(error.contains("memory_granule") && error.contains("to 64MiB or more"), "{error}");
        assert!(offer.check(&memory(64)).is_ok());
        assert!(offer.ids(&memory(64)).iter().all(|id| id.len() <= 63));
    }

    #[test]
    fn an_id_names_its_gpu() {
        let gpu = GpuUuid::from_bytes([7; 16]);
        assert_eq!(gpu_of(&id(gpu, 12)), Some(gpu));
        for foreign in [
            "",
            "GPU-1",
            "7",
            "GPU-07070707-0707-0707-0707-070707070707",
            "x-1",
            "GPU-07070707-0707-0707-0707-070707070707::3",
        ] {
            assert!(!is_id(foreign), "{foreign}");
        }
    }
}
