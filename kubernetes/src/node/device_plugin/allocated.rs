//! What kubelet is answered when it allocates devices: which GPUs they are and how much of each, or why they
//! are none. Pure.

use std::collections::{BTreeMap, HashMap};

use gpushare_inventory::GpuUuid;

use super::messages::ContainerAllocated;
use super::offer::{Offer, gpu_of};
use crate::asks::{Compute, percent, unsplit};
use crate::resource::{Resource, System, Unit};

/// How many of the devices are of each GPU.
pub fn units(ids: &[String]) -> BTreeMap<GpuUuid, u64> {
    let mut units = BTreeMap::new();
    ids.iter().filter_map(|id| gpu_of(id)).for_each(|gpu| *units.entry(gpu).or_default() += 1);
    units
}

/// Whether these are in equal parts, but for a remainder, on so many GPUs.
pub fn is_even(units: &BTreeMap<GpuUuid, u64>, of: u64) -> bool {
    let count: u64 = units.values().sum();
    units.len() as u64 == of && units.values().all(|its| *its <= count.div_ceil(of))
}

/// How the devices of a container may lie on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// In equal parts, but for a remainder, on so many.
    Even(u64),
    /// In any way: they may be memory beside whole GPUs, which the runtime leaves unread there. What is
    /// written of them is no more of any GPU than kubelet counts, for a container that gets no whole GPUs.
    BesideWholes,
    /// On several, by a label of the pod that nothing checks.
    Unchecked,
}

/// What a container with these ids gets, and of which GPUs.
pub fn allocated(
    ids: &[String],
    resource: &Resource,
    offer: &Offer,
    spread: Spread,
) -> Result<(Vec<GpuUuid>, ContainerAllocated), String> {
    let (name, count) = (&resource.name, ids.len() as u64);
    if let Some(id) = ids.iter().find(|id| gpu_of(id).is_none()) {
        return Err(format!("{id:?} is no device of {name}"));
    }
    let counts = units(ids);
    let gpus: Vec<GpuUuid> = counts.keys().copied().collect();
    let Some(first) = gpus.first() else { return Err(format!("no device of {name} is named")) };
    let compute = match resource.unit {
        Unit::Percent => Some(percent(resource, count)?),
        _ => None,
    };
    let of = match spread {
        Spread::Even(of) => of,
        Spread::BesideWholes => counts.len() as u64,
        Spread::Unchecked => return Err(unsplit(name)),
    };
    if !is_even(&counts, of) && spread != Spread::BesideWholes {
        return Err(not_together(resource, count, of));
    }
    for gpu in &gpus {
        if !offer.gpu(*gpu).is_some_and(|offered| offered.is_open) {
            return Err(format!("GPU {gpu} gives no new share: it is cordoned or out of service"));
        }
    }
    let offered = offer.gpu(*first).ok_or_else(|| format!("GPU {first} is not known"))?;
    let list = gpus.iter().map(GpuUuid::to_string).collect::<Vec<_>>().join(",");
    let mut annotations = HashMap::new();
    let mut allocate =
        |name: &str, value: String| annotations.insert(format!("alloc.gpushare.io/{name}"), value);
    match resource.unit {
        Unit::Memory(bytes) => {
            let each = match spread {
                Spread::BesideWholes => counts.values().min().copied().unwrap_or(0) * of,
                _ => count,
            };
            let bytes = bytes.saturating_mul(each) / of;
            if bytes > offered.per_share.bytes() && spread != Spread::BesideWholes {
                let most = offered.per_share;
                return Err(format!(
                    "{count} of {name} are more than one container can have of a GPU ({most}); ask for less"
                ));
            }
            allocate("devices", list);
            allocate("memory", format!("{}MiB", bytes >> 20));
        }
        Unit::Replica(parts) => {
            if count > 1 {
                return Err(format!(
                    "{count} of {name}: several replicas are not one larger share: ask for 1"
                ));
            }
            allocate("devices", list);
            allocate("memory", format!("{}MiB", (offered.per_share.bytes() / u64::from(parts.max(1))) >> 20));
        }
        // How much of each stands in the pod, and what kubelet gave is noted with it.
        Unit::Slot(_) => drop(allocate("devices", list)),
        Unit::Percent => match compute.and_then(|compute| compute.percent) {
            None => drop(allocate("whole-devices", list)),
            Some(percent) => {
                // By its pod's label it may be of several GPUs together.
                let percent = match compute {
                    Some(Compute { gpus: 1, .. }) => u64::from(percent) / of,
                    _ => percent.into(),
                };
                if percent == 0 {
                    return Err(format!(
                        "{count} of {name} are less than 1 % of each of {of} GPUs: ask for more"
                    ));
                }
                // Under a key of its own: the runtime refuses memory of one GPU beside compute of another.
                allocate("cores-devices", list);
                allocate("cores", percent.to_string());
            }
        },
        Unit::MemoryPercent => return Err(format!("{name} has no devices")),
        Unit::Gpus => {
            return Err(format!("{name} tells how many GPUs the node has; it is not to be asked for"));
        }
    }
    if let Some(system) = words(resource) {
        allocate("words", system.to_owned());
    }
    Ok((gpus, ContainerAllocated { annotations }))
}

/// The system whose words programs in the container read. One of a container's resources names it.
fn words(resource: &Resource) -> Option<&'static str> {
    match (resource.system, resource.unit) {
        (System::Aliyun, Unit::Memory(_)) => Some("aliyun"),
        (System::Hami, Unit::Slot(_)) => Some("hami"),
        (System::Volcano, Unit::Slot(_)) => Some("hami"),
        _ => None,
    }
}

fn not_together(resource: &Resource, count: u64, of: u64) -> String {
    let name = &resource.name;
    match of {
        1 => format!(
            "{count} of {name} are left on this node, but not on one GPU: ask for less, or wait until another pod ends; a pod with a \
             resource claim stays pending in such a case"
        ),
        _ => format!(
            "{count} of {name} are {} each of {of} GPUs, and not so many GPUs have that free: wait until another pod ends",
            count.div_ceil(of)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::offer::tests::{ids, memory, offer};
    use super::*;

    #[test]
    fn what_is_allocated_is_told_to_the_runtime_or_refused_in_words() {
        let mut offer = offer(&[0, 1]);
        let granule = memory(256);
        let (gpus, answer) = allocated(&ids(1, 3..35), &granule, &offer, Spread::Even(1)).unwrap();
        let gpu = GpuUuid::from_bytes([1; 16]);
        assert_eq!(gpus, [gpu]);
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "8192MiB");
        assert_eq!(answer.annotations["alloc.gpushare.io/devices"], gpu.to_string());
        let percent = Resource { unit: Unit::Percent, ..granule.clone() };
        let (_, answer) = allocated(&ids(0, 0..30), &percent, &offer, Spread::Even(1)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/cores"], "30");
        assert_eq!(
            answer.annotations["alloc.gpushare.io/cores-devices"],
            GpuUuid::from_bytes([0; 16]).to_string()
        );
        assert_eq!(answer.annotations.len(), 2);
        let aliyun = Resource { system: System::Aliyun, ..memory(1024) };
        let (_, answer) = allocated(&ids(1, 0..8), &aliyun, &offer, Spread::Even(1)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "8192MiB");
        assert_eq!(answer.annotations["alloc.gpushare.io/words"], "aliyun");
        let vcuda = Resource { system: System::GpuManager, ..percent.clone() };
        let (gpus, answer) =
            allocated(&[ids(0, 0..100), ids(1, 0..100)].concat(), &vcuda, &offer, Spread::Even(2)).unwrap();
        let both = gpus.iter().map(GpuUuid::to_string).collect::<Vec<_>>().join(",");
        assert_eq!(answer.annotations, [("alloc.gpushare.io/whole-devices".to_owned(), both.clone())].into());
        let slot = Resource { unit: Unit::Slot(10), system: System::Hami, ..granule.clone() };
        let (_, answer) =
            allocated(&[ids(0, 3..4), ids(1, 0..1)].concat(), &slot, &offer, Spread::Even(2)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/devices"], both);
        let replica = Resource { unit: Unit::Replica(3), system: System::Nvidia, ..granule.clone() };
        let (_, answer) = allocated(&ids(1, 2..3), &replica, &offer, Spread::Even(1)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "27306MiB");
        let spread = [ids(0, 0..16), ids(1, 0..16)].concat();
        let (_, answer) = allocated(&spread, &granule, &offer, Spread::Even(2)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "4096MiB", "of each");
        for (ids, resource, of, want) in [
            (Vec::new(), &granule, 1, "no device of"),
            (vec!["x".to_owned()], &granule, 1, "is no device of"),
            ([ids(0, 0..2), ids(1, 0..1)].concat(), &granule, 1, "not on one GPU"),
            ([ids(0, 0..20), ids(1, 0..12)].concat(), &granule, 2, "16 each of 2 GPUs"),
            (ids(7, 0..1), &granule, 1, "cordoned or out of service"),
            (ids(0, 0..81), &aliyun, 1, "more than one container can have of a GPU (80 GiB)"),
            (ids(0, 0..101), &percent, 1, "at most 100 %"),
            ([ids(0, 0..100), ids(1, 0..50)].concat(), &vcuda, 2, "100, 200"),
            ([ids(0, 0..99), ids(1, 0..1)].concat(), &vcuda, 1, "not on one GPU"),
            (ids(0, 0..200), &vcuda, 2, "100 each of 2 GPUs"),
            (ids(0, 0..2), &slot, 2, "1 each of 2 GPUs"),
            (ids(0, 0..2), &replica, 1, "ask for 1"),
            (ids(0, 0..7), &Resource { system: System::Qgpu, ..percent.clone() }, 1, "in steps of 5"),
        ] {
            let told = allocated(&ids, resource, &offer, Spread::Even(of)).unwrap_err();
            assert!(told.contains(want), "{want}: {told}");
        }
        let spread = [ids(0, 0..20), ids(1, 0..12)].concat();
        let (gpus, answer) = allocated(&spread, &granule, &offer, Spread::BesideWholes).unwrap();
        let both = gpus.iter().map(GpuUuid::to_string).collect::<Vec<_>>().join(",");
        // It is written all the same, in case that it is another container's: no more than it is of any GPU.
        assert_eq!(answer.annotations["alloc.gpushare.io/devices"], both);
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "3072MiB");
        assert!(allocated(&ids(0, 0..1), &granule, &offer, Spread::BesideWholes).is_ok());
        let told = allocated(&spread, &aliyun, &offer, Spread::Unchecked).unwrap_err();
        assert!(told.contains("request.kubelet"), "{told}");
        offer = Offer::default();
        assert!(allocated(&ids(0, 0..1), &granule, &offer, Spread::Even(1)).is_err());
    }
}
