//! What kubelet's devices of the node's own plugin are.

use std::collections::BTreeMap;

use gpushare_inventory::{DeviceMemory, GpuUuid};
use gpushare_placement::{Gpu, Memory, Part};
use gpushare_request::{AllocatedPart, Cores};

use super::pod::OfNode;
use crate::asks::{Asking, Terms};
use crate::node::device_plugin::offer::gpu_of;
use crate::node::podresources::ContainerDevices;

/// What a container has of the node's own device plugin, one part for each of its GPUs: the devices say
/// which, and its resources how much of each. `asked` are its amounts of them.
///
/// # Errors
/// When it has devices of other GPUs than it asks for, as kubelet allocates each resource by itself.
pub fn own_parts(
    its: &[&ContainerDevices],
    asked: &Asking,
    node: &OfNode<'_>,
) -> Result<Vec<AllocatedPart>, String> {
    let mut by_resource: BTreeMap<&str, Vec<GpuUuid>> = BTreeMap::new();
    for devices in its.iter().filter(|its| node.resources.iter().any(|known| known.name == its.resource_name))
    {
        let of = by_resource.entry(&devices.resource_name).or_default();
        for id in &devices.device_ids {
            of.push(gpu_of(id).ok_or_else(|| format!("{id:?} is no device of {}", devices.resource_name))?);
        }
    }
    by_resource.values_mut().for_each(|gpus| {
        gpus.sort_unstable();
        gpus.dedup();
    });
    let Some((first, of_first)) = by_resource.iter().next() else { return Ok(Vec::new()) };
    let terms = Terms::of_given(node.resources);
    let share = terms.share(&asked.amounts, asked.gpus)?;
    // Whole GPUs are those of the compute; what memory was asked for beside them says nothing.
    let is_enough = |gpus: &[GpuUuid]| gpus.len() == usize::from(share.gpus);
    let counted = match share.part {
        Part::Whole => by_resource.iter().find(|(_, gpus)| is_enough(gpus)),
        Part::Of(..) => Some((first, of_first)).filter(|(_, gpus)| is_enough(gpus)),
    };
    let Some((by, of)) = counted else {
        return Err(format!(
            "kubelet gave it not as many GPUs as it asks for ({}): delete the pod",
            share.gpus
        ));
    };
    if share.part != Part::Whole
        && let Some((other, _)) = by_resource.iter().find(|(_, gpus)| *gpus != of)
    {
        return Err(format!(
            "kubelet gave it {other} of another GPU than {by}: delete the pod, so that it is placed anew"
        ));
    }
    let part = |gpu: &GpuUuid| {
        let (memory, cores) = match share.part {
            // The node's settings say.
            Part::Whole => (None, 0),
            Part::Of(Memory::Default, cores) => (None, cores),
            Part::Of(Memory::Bytes(bytes), cores) => (Some(DeviceMemory::from_bytes(bytes)), cores),
            Part::Of(Memory::Part { .. }, cores) => (of_gpu(share.part, *gpu, node), cores),
        };
        let cores = u8::try_from(cores).ok().and_then(Cores::new);
        AllocatedPart { by: (*by).to_owned(), gpu: Some(*gpu), count: 1, memory, cores, is_pods: false }
    };
    Ok(of.iter().map(part).collect())
}

/// So much memory of this GPU; `None` where its size is not known.
fn of_gpu(part: Part, gpu: GpuUuid, node: &OfNode<'_>) -> Option<DeviceMemory> {
    let memory = node.gpus.iter().find(|known| known.uuid == gpu)?.memory?;
    let per_share = node.rules.per_lease(memory).bytes();
    Some(DeviceMemory::from_bytes(part.of(&Gpu { per_share, ..Gpu::default() }).0))
}
