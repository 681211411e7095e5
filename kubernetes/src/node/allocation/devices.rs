//! What the ids and amounts of a device plugin's resources mean. Plugins name their devices after GPUs, and
//! kubelet chooses among them by id; where a scheduler of their own chooses the GPU, the id's does not count.

use std::collections::BTreeMap;

use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};
use gpushare_request::{AllocatedPart, Cores};

use crate::node::podresources::{ContainerDevices, Devices};

/// What an id says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Id {
    /// NVIDIA's plugin: the GPU.
    Whole(GpuUuid),
    /// NVIDIA's plugin: one of the GPU's replicas, `UUID::NUMBER`.
    Replica(GpuUuid),
    /// Aliyun's plugin: one unit of a GPU's memory, `UUID-_-NUMBER`. Its scheduler chooses the GPU.
    Unit(GpuUuid),
    /// Plugins that begin an id with a GPU's UUID otherwise (HAMi, Volcano, vgpu-manager). Their schedulers
    /// choose the GPU.
    Slot,
}

/// Resources that are counted in the pod's own words and handed over by the plugin of another resource: what
/// one of it is, on each GPU.
const AMOUNTS: [(&str, Unit); 12] = [
    ("nvidia.com/gpumem", Unit::Mebibytes(1)),
    ("nvidia.com/gpumem-percentage", Unit::MemoryPercent),
    ("nvidia.com/gpucores", Unit::Cores),
    ("nvidia.com/vgpu-memory", Unit::Mebibytes(1)),
    ("nvidia.com/vgpu-cores", Unit::Cores),
    ("volcano.sh/vgpu-memory", Unit::Mebibytes(1)),
    ("volcano.sh/vgpu-memory-percentage", Unit::MemoryPercent),
    ("volcano.sh/vgpu-cores", Unit::Cores),
    ("volcano.sh/gpu-memory", Unit::Mebibytes(1)),
    ("aliyun.com/gpu-core.percentage", Unit::Cores),
    ("tencent.com/vcuda-memory", Unit::Mebibytes(256)),
    ("tencent.com/vcuda-core", Unit::Cores),
];

/// The resource of gpu-manager whose ids name no GPU: each is one hundredth of one.
const HUNDREDTHS: &str = "tencent.com/vcuda-core";

#[derive(Clone, Copy)]
enum Unit {
    Mebibytes(u64),
    MemoryPercent,
    Cores,
}

/// What a container's devices of one resource are; empty where they are no GPUs of this node.
pub fn parts(its: &ContainerDevices, all: &Devices, gpus: &[Gpu]) -> Vec<AllocatedPart> {
    let resource = &its.resource_name;
    let part = |gpu, count, memory| AllocatedPart {
        by: resource.clone(),
        gpu,
        count,
        memory,
        cores: None,
        is_pods: false,
    };
    if resource == HUNDREDTHS && !its.device_ids.is_empty() {
        return vec![part(None, (its.device_ids.len() / 100).max(1), None)];
    }
    let ids: Vec<Id> = its.device_ids.iter().filter_map(|id| read(id, gpus)).collect();
    let mut by_gpu: BTreeMap<GpuUuid, (u64, bool)> = BTreeMap::new();
    let (mut slots, mut units) = (0, BTreeMap::<GpuUuid, u64>::new());
    for id in ids {
        match id {
            Id::Whole(gpu) => by_gpu.entry(gpu).or_default().1 = true,
            Id::Replica(gpu) => by_gpu.entry(gpu).or_default().0 += 1,
            Id::Unit(gpu) => *units.entry(gpu).or_default() += 1,
            Id::Slot => slots += 1,
        }
    }
    let of = |gpu: GpuUuid, mine: u64| {
        let like =
            all.allocatable(resource).filter_map(|id| read(id, gpus)).filter(|id| id.gpu() == Some(gpu));
        let every = u64::try_from(like.count()).unwrap_or(u64::MAX).max(mine);
        let total = gpus.iter().find(|known| known.uuid == gpu).and_then(|gpu| gpu.memory);
        total.map(|total| whole_mebibytes(u128::from(total.bytes()) * u128::from(mine) / u128::from(every)))
    };
    let mut parts: Vec<AllocatedPart> = Vec::new();
    for (gpu, (replicas, is_whole)) in by_gpu {
        let memory = if is_whole { None } else { of(gpu, replicas) };
        parts.push(part(Some(gpu), 1, memory));
    }
    // The ids of units may be of several GPUs; the share is one GPU's.
    let units: Vec<DeviceMemory> = units.into_iter().filter_map(|(gpu, mine)| of(gpu, mine)).collect();
    if !units.is_empty() {
        let memory = units.iter().fold(DeviceMemory::ZERO, |sum, memory| sum.saturating_add(*memory));
        parts.push(part(None, 1, Some(memory)));
    }
    if slots > 0 {
        parts.push(part(None, slots, None));
    }
    parts
}

/// The amounts that a container's resources state besides its devices: `limits` has their numbers. `count` is
/// the number of GPUs that the devices are for.
pub fn amounts<'a>(
    limits: impl Iterator<Item = (&'a str, u64)> + Clone,
    count: usize,
    gpus: &[Gpu],
) -> Vec<AllocatedPart> {
    // Of whole GPUs, gpu-manager leaves the rest unread.
    let is_whole = limits.clone().any(|(name, number)| name == HUNDREDTHS && number >= 100);
    let is_read = |name: &str| !(is_whole && name.starts_with("tencent.com/"));
    let mut parts = Vec::new();
    for (name, number) in limits.filter(|(name, number)| *number > 0 && is_read(name)) {
        let Some((_, unit)) = AMOUNTS.iter().find(|(known, _)| *known == name) else { continue };
        // The smallest GPU's, since it is not told which one it is.
        let least = gpus.iter().filter_map(|gpu| gpu.memory).min();
        let memory = match unit {
            Unit::Mebibytes(each) => Some(DeviceMemory::from_bytes(number.saturating_mul(each << 20))),
            Unit::MemoryPercent => least
                .map(|least| whole_mebibytes(u128::from(least.bytes()) * u128::from(number.min(100)) / 100)),
            Unit::Cores => None,
        };
        let cores = match unit {
            Unit::Cores => u8::try_from(number).ok().and_then(Cores::new),
            _ => None,
        };
        if memory.is_some() || cores.is_some() {
            parts.push(AllocatedPart { by: name.into(), gpu: None, count, memory, cores, is_pods: false });
        }
    }
    parts
}

impl Id {
    fn gpu(self) -> Option<GpuUuid> {
        match self {
            Self::Whole(gpu) | Self::Replica(gpu) | Self::Unit(gpu) => Some(gpu),
            Self::Slot => None,
        }
    }
}

/// What the id says; `None` where it names no GPU of this node.
fn read(id: &str, gpus: &[Gpu]) -> Option<Id> {
    /// `GPU-` and a UUID.
    const LENGTH: usize = 40;
    let uuid: GpuUuid = id.get(..LENGTH)?.parse().ok()?;
    gpus.iter().find(|gpu| gpu.uuid == uuid)?;
    let rest = &id[LENGTH..];
    Some(match rest {
        "" => Id::Whole(uuid),
        _ if rest.starts_with("::") => Id::Replica(uuid),
        _ if rest.starts_with("-_-") => Id::Unit(uuid),
        _ => Id::Slot,
    })
}

fn whole_mebibytes(bytes: u128) -> DeviceMemory {
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    DeviceMemory::from_bytes(bytes >> 20 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::allocation::pod::tests::gpus;

    const GIB: u64 = 1 << 30;

    fn told(resource: &str, ids: &[String], all: &[String]) -> Vec<(Option<GpuUuid>, usize, Option<u64>)> {
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let devices = Devices::told(&[], &[(resource, &all)]);
        let its = ContainerDevices { resource_name: resource.into(), device_ids: ids.to_vec() };
        let parts = parts(&its, &devices, &gpus());
        parts.iter().map(|part| (part.gpu, part.count, part.memory.map(DeviceMemory::bytes))).collect()
    }

    #[test]
    fn ids_name_gpus_their_replicas_and_units() {
        let gpus = gpus();
        let (first, second) = (gpus[0].uuid, gpus[1].uuid);
        let each = |gpu: GpuUuid, mark: &str, count: usize| -> Vec<String> {
            (0..count).map(|number| format!("{gpu}{mark}{number}")).collect()
        };
        let whole = [second.to_string()];
        assert_eq!(told("nvidia.com/gpu", &whole, &whole), [(Some(second), 1, None)]);
        let replicas = [each(first, "::", 4), each(second, "::", 4)].concat();
        assert_eq!(
            told("nvidia.com/gpu.shared", &replicas[4..5], &replicas),
            [(Some(second), 1, Some(20 * GIB))]
        );
        let three = [&replicas[0..2], &replicas[7..]].concat();
        assert_eq!(
            told("nvidia.com/gpu", &three, &replicas),
            [(Some(first), 1, Some(40 * GIB)), (Some(second), 1, Some(20 * GIB))]
        );
        let units = [each(first, "-_-", 80), each(second, "-_-", 80)].concat();
        let mixed = [&units[0..3], &units[100..104]].concat();
        assert_eq!(told("aliyun.com/gpu-mem", &mixed, &units), [(None, 1, Some(7 * GIB))]);
        let slots = each(first, "-", 10);
        assert_eq!(told("nvidia.com/gpu", &slots[..2], &slots), [(None, 2, None)]);
        assert_eq!(
            told("tencent.com/vcuda-core", &["tencent.com/vcuda-core-7".into()], &[]),
            [(None, 1, None)]
        );
        let others = ["eth0".to_owned(), "GPU-00000000-0000-0000-0000-0000000000ff".to_owned()];
        assert!(told("example.com/nic", &others, &others).is_empty());
    }

    #[test]
    fn amounts_are_read_in_the_units_of_their_systems() {
        let gpus = gpus();
        let read = |limits: &[(&str, u64)], count| -> Vec<(usize, Option<u64>, Option<u8>)> {
            let parts = amounts(limits.iter().copied(), count, &gpus);
            let cores = |part: &AllocatedPart| part.cores.map(Cores::percent);
            parts.iter().map(|part| (part.count, part.memory.map(DeviceMemory::bytes), cores(part))).collect()
        };
        assert_eq!(
            read(&[("nvidia.com/gpumem", 3000), ("nvidia.com/gpucores", 30)], 2),
            [(2, Some(3000 << 20), None), (2, None, Some(30))]
        );
        assert_eq!(read(&[("volcano.sh/vgpu-memory-percentage", 25)], 1), [(1, Some(20 * GIB), None)]);
        assert_eq!(
            read(&[("tencent.com/vcuda-core", 30), ("tencent.com/vcuda-memory", 8)], 1),
            [(1, None, Some(30)), (1, Some(2 * GIB), None)]
        );
        assert!(read(&[("tencent.com/vcuda-core", 200), ("tencent.com/vcuda-memory", 8)], 2).is_empty());
        assert!(read(&[("example.com/nic", 1), ("nvidia.com/gpumem", 0)], 1).is_empty());
    }
}
