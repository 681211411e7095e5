//! What the ids and amounts of a device plugin's resources mean. Plugins name their devices after GPUs, and
//! kubelet chooses among them by id; where a scheduler of their own chooses the GPU, the id's does not count.

use std::collections::{BTreeMap, BTreeSet};

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

/// A resource whose scheduler chooses the GPU, and the amounts that a pod states beside it: what one of each
/// is, on each GPU. They count only where the plugin of that resource gave the container something.
struct System {
    devices: &'static str,
    amounts: &'static [(&'static str, Unit)],
}

const SYSTEMS: [System; 6] = [
    System {
        devices: "nvidia.com/gpu",
        amounts: &[
            ("nvidia.com/gpumem", Unit::Mebibytes(1)),
            ("nvidia.com/gpumem-percentage", Unit::MemoryPercent),
            ("nvidia.com/gpucores", Unit::Cores),
        ],
    },
    System {
        devices: "nvidia.com/vgpu-number",
        amounts: &[("nvidia.com/vgpu-memory", Unit::Mebibytes(1)), ("nvidia.com/vgpu-cores", Unit::Cores)],
    },
    System {
        devices: "volcano.sh/vgpu-number",
        amounts: &[
            ("volcano.sh/vgpu-memory", Unit::Mebibytes(1)),
            ("volcano.sh/vgpu-memory-percentage", Unit::MemoryPercent),
            ("volcano.sh/vgpu-cores", Unit::Cores),
        ],
    },
    System { devices: "volcano.sh/gpu-memory", amounts: &[("volcano.sh/gpu-memory", Unit::Mebibytes(1))] },
    System { devices: "aliyun.com/gpu-mem", amounts: &[("aliyun.com/gpu-core.percentage", Unit::Cores)] },
    System {
        devices: HUNDREDTHS,
        amounts: &[("tencent.com/vcuda-memory", Unit::Mebibytes(256)), (HUNDREDTHS, Unit::Cores)],
    },
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
///
/// # Errors
/// When it is not known how many parts a GPU has, as while its plugin is away.
pub fn parts(its: &ContainerDevices, all: &Devices, gpus: &[Gpu]) -> Result<Vec<AllocatedPart>, String> {
    let resource = &its.resource_name;
    let part = |gpu, count, memory| AllocatedPart {
        by: resource.clone(),
        gpu,
        count,
        memory,
        cores: None,
        is_pods: false,
    };
    if is_amount_alone(resource) || its.device_ids.is_empty() {
        return Ok(Vec::new());
    }
    if resource == HUNDREDTHS {
        return Ok(vec![part(None, (its.device_ids.len() / 100).max(1), None)]);
    }
    let (mut wholes, mut replicas) = (BTreeSet::new(), BTreeMap::<GpuUuid, Vec<&str>>::new());
    let (mut units, mut slots) = (BTreeMap::<GpuUuid, Vec<&str>>::new(), 0);
    for id in &its.device_ids {
        match read(resource, id, gpus) {
            Some(Id::Whole(gpu)) => drop(wholes.insert(gpu)),
            Some(Id::Replica(gpu)) => replicas.entry(gpu).or_default().push(id),
            Some(Id::Unit(gpu)) => units.entry(gpu).or_default().push(id),
            Some(Id::Slot) => slots += 1,
            None => {}
        }
    }
    let share = |gpu: GpuUuid, mine: &[&str]| {
        let like = |id: &&str| read(resource, id, gpus).and_then(Id::gpu) == Some(gpu);
        let every: BTreeSet<&str> = all.allocatable(resource).filter(like).collect();
        if !mine.iter().all(|id| every.contains(id)) {
            return Err(format!("kubelet does not list all of {resource}: its plugin may be away"));
        }
        let total = gpus.iter().find(|known| known.uuid == gpu).and_then(|gpu| gpu.memory);
        let total = total.ok_or_else(|| format!("the size of {gpu} is not known"))?;
        let (mine, every) = (mine.len() as u128, every.len() as u128);
        Ok(whole_mebibytes(u128::from(total.bytes()) * mine / every))
    };
    let mut parts: Vec<AllocatedPart> = wholes.iter().map(|gpu| part(Some(*gpu), 1, None)).collect();
    for (gpu, mine) in replicas.iter().filter(|(gpu, _)| !wholes.contains(gpu)) {
        parts.push(part(Some(*gpu), 1, Some(share(*gpu, mine)?)));
    }
    // The ids of units may be of several GPUs; the share is one GPU's.
    let units = units.iter().map(|(gpu, mine)| share(*gpu, mine)).collect::<Result<Vec<_>, String>>()?;
    if !units.is_empty() {
        let memory = units.iter().fold(DeviceMemory::ZERO, |sum, memory| sum.saturating_add(*memory));
        parts.push(part(None, 1, Some(memory)));
    }
    if slots > 0 {
        parts.push(part(None, slots, None));
    }
    Ok(parts)
}

/// The amounts that a container's resources state beside the devices in `given`: `limits` has their numbers.
pub fn amounts<'a>(
    limits: impl Iterator<Item = (&'a str, u64)> + Clone,
    given: &[AllocatedPart],
    gpus: &[Gpu],
) -> Vec<AllocatedPart> {
    // Of whole GPUs, gpu-manager leaves the rest unread.
    let is_whole = limits.clone().any(|(name, number)| name == HUNDREDTHS && number >= 100);
    let systems = SYSTEMS.iter().filter(|system| !(is_whole && system.devices == HUNDREDTHS));
    let mut parts = Vec::new();
    for system in systems {
        let its = given.iter().find(|part| part.by == system.devices && part.gpu.is_none());
        let Some(count) = its.map(|part| part.count) else { continue };
        for (name, unit) in system.amounts {
            let Some((_, number)) = limits.clone().find(|(known, number)| known == name && *number > 0)
            else {
                continue;
            };
            // The smallest GPU's, since it is not told which one it is.
            let least = gpus.iter().filter_map(|gpu| gpu.memory).min();
            let memory = match unit {
                Unit::Mebibytes(each) => Some(DeviceMemory::from_bytes(number.saturating_mul(each << 20))),
                Unit::MemoryPercent => least.map(|least| {
                    whole_mebibytes(u128::from(least.bytes()) * u128::from(number.min(100)) / 100)
                }),
                Unit::Cores => None,
            };
            let cores = match unit {
                Unit::Cores => u8::try_from(number).ok().and_then(Cores::new),
                _ => None,
            };
            if memory.is_some() || cores.is_some() {
                let by = (*name).to_owned();
                parts.push(AllocatedPart { by, gpu: None, count, memory, cores, is_pods: false });
            }
        }
    }
    parts
}

/// Whether the resource only states an amount of another's devices. Some plugins list an id for each MiB.
fn is_amount_alone(resource: &str) -> bool {
    let is_devices = SYSTEMS.iter().any(|system| system.devices == resource);
    !is_devices && SYSTEMS.iter().any(|system| system.amounts.iter().any(|(name, _)| *name == resource))
}

impl Id {
    fn gpu(self) -> Option<GpuUuid> {
        match self {
            Self::Whole(gpu) | Self::Replica(gpu) | Self::Unit(gpu) => Some(gpu),
            Self::Slot => None,
        }
    }
}

/// What the id says; `None` where it names no GPU of this node. Of a system with a scheduler of its own only
/// the bare UUID is NVIDIA's, whose plugin has one of the names, too.
fn read(resource: &str, id: &str, gpus: &[Gpu]) -> Option<Id> {
    /// `GPU-` and a UUID.
    const LENGTH: usize = 40;
    /// Where NVIDIA's plugin gives GPUs and replicas of them under the name of another system.
    const NVIDIA: &str = "nvidia.com/gpu";
    let uuid: GpuUuid = id.get(..LENGTH)?.parse().ok()?;
    gpus.iter().find(|gpu| gpu.uuid == uuid)?;
    let rest = &id[LENGTH..];
    let is_systems = resource != NVIDIA && SYSTEMS.iter().any(|system| system.devices == resource);
    Some(match rest {
        _ if rest.starts_with("-_-") => Id::Unit(uuid),
        _ if is_systems => Id::Slot,
        "" => Id::Whole(uuid),
        _ if rest.starts_with("::") => Id::Replica(uuid),
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
        let parts = parts(&its, &devices, &gpus()).unwrap();
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
        // Systems with schedulers of their own, whatever their ids look like, and their amounts.
        assert_eq!(told("nvidia.com/vgpu-number", &replicas[..1], &replicas), [(None, 1, None)]);
        assert!(told("volcano.sh/vgpu-memory", &slots, &slots).is_empty());
    }

    #[test]
    fn parts_of_an_absent_plugin_are_not_known() {
        let replica = format!("{}::1", gpus()[0].uuid);
        let its = ContainerDevices { resource_name: "nvidia.com/gpu".into(), device_ids: vec![replica] };
        assert!(parts(&its, &Devices::default(), &gpus()).unwrap_err().contains("plugin may be away"));
    }

    #[test]
    fn amounts_are_read_in_the_units_of_their_systems_and_beside_their_devices_alone() {
        let gpus = gpus();
        let given = |by: &str, gpu: Option<GpuUuid>, count: usize| AllocatedPart {
            by: by.into(),
            gpu,
            count,
            memory: None,
            cores: None,
            is_pods: false,
        };
        let read = |devices: &str, count, limits: &[(&str, u64)]| -> Vec<(usize, Option<u64>, Option<u8>)> {
            let parts = amounts(limits.iter().copied(), &[given(devices, None, count)], &gpus);
            let cores = |part: &AllocatedPart| part.cores.map(Cores::percent);
            parts.iter().map(|part| (part.count, part.memory.map(DeviceMemory::bytes), cores(part))).collect()
        };
        let hami = [("nvidia.com/gpumem", 3000), ("nvidia.com/gpucores", 30)];
        assert_eq!(read("nvidia.com/gpu", 2, &hami), [(2, Some(3000 << 20), None), (2, None, Some(30))]);
        let percent = [("volcano.sh/vgpu-memory-percentage", 25)];
        assert_eq!(read("volcano.sh/vgpu-number", 1, &percent), [(1, Some(20 * GIB), None)]);
        let vcuda = |cores| [("tencent.com/vcuda-core", cores), ("tencent.com/vcuda-memory", 8)];
        assert_eq!(
            read("tencent.com/vcuda-core", 1, &vcuda(30)),
            [(1, Some(2 * GIB), None), (1, None, Some(30))]
        );
        assert!(read("tencent.com/vcuda-core", 2, &vcuda(200)).is_empty());
        assert!(read("nvidia.com/gpu", 1, &[("example.com/nic", 1), ("nvidia.com/gpumem", 0)]).is_empty());
        // What the pod states beside another plugin's devices is its own word.
        assert!(read("nvidia.com/gpu.shared", 1, &hami).is_empty());
        let replica = [given("nvidia.com/gpu", Some(gpus[0].uuid), 1)];
        assert!(amounts(hami.into_iter(), &replica, &gpus).is_empty());
    }
}
