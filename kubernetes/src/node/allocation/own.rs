//! What kubelet's devices of the node's own plugin are.

use gpushare_inventory::DeviceMemory;
use gpushare_request::{AllocatedPart, Cores};

use crate::node::device_plugin::offer::gpu_of;
use crate::node::device_plugin::resource::{Resource, Unit};
use crate::node::podresources::ContainerDevices;

/// What a container has of the node's own device plugin: memory and compute of one GPU; `None` where it has
/// nothing of it.
///
/// # Errors
/// When it has devices of two GPUs, as kubelet allocates each resource by itself.
pub fn own_part(its: &[&ContainerDevices], resources: &[Resource]) -> Result<Option<AllocatedPart>, String> {
    let mut found: Option<AllocatedPart> = None;
    for devices in its {
        let Some(resource) = resources.iter().find(|known| known.name == devices.resource_name) else {
            continue;
        };
        for id in &devices.device_ids {
            let gpu = gpu_of(id).ok_or_else(|| format!("{id:?} is no device of {}", resource.name))?;
            let (by, count, is_pods) = (resource.name.clone(), 1, false);
            let part = found.get_or_insert(AllocatedPart {
                by,
                gpu: Some(gpu),
                count,
                memory: None,
                cores: None,
                is_pods,
            });
            if part.gpu != Some(gpu) {
                return Err(format!(
                    "kubelet gave it {} of another GPU than {}: delete the pod, so that it is placed anew",
                    resource.name, part.by
                ));
            }
            match resource.unit {
                Unit::Memory(unit) => {
                    part.memory = Some(part.memory.unwrap_or(DeviceMemory::ZERO).saturating_add(unit));
                }
                Unit::Percent => {
                    let percent = part.cores.map_or(0, Cores::percent).saturating_add(1);
                    part.cores = Cores::new(percent.min(Cores::ALL.percent()));
                }
            }
        }
    }
    Ok(found)
}
