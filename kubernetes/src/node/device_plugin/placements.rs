//! What this node's pods ask for by resources, and the GPUs that the scheduler extender chose for them.
//!
//! kubelet asks for advice on one resource at a time and names no pod. What is known here is for advice
//! alone: two pods may ask for the same amount, and annotations can be forged.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpushare_placement::Part;
use k8s_openapi::api::core::v1::Pod;

use super::offer::{Offer, gpu_of};
use crate::asks::{Asking, Terms, asking};
use crate::gpus::{Placed, Placement, placement};
use crate::node::podresources::Devices;
use crate::resource::{Counted, Resource};

/// The node's pods that ask for counted GPUs, and what kubelet has allocated to them.
#[derive(Default)]
pub struct Placements(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// In the order in which they were bound to the node, as kubelet hears of them.
    pods: BTreeMap<u64, KnownPod>,
    heard: u64,
    /// Counts the pods that kubelet has admitted, and those that are gone.
    changes: u64,
}

struct KnownPod {
    uid: String,
    namespace: String,
    name: String,
    containers: Vec<KnownContainer>,
    placement: Placement,
    is_admitted: bool,
}

struct KnownContainer {
    asking: Asking,
    /// The resources that kubelet has allocated to it since.
    allocated: BTreeSet<String>,
}

impl KnownPod {
    fn waits_for(&self, resource: &Resource, count: u64) -> impl Iterator<Item = &KnownContainer> {
        let is_waiting = move |its: &&KnownContainer| {
            its.asking.amounts.get(&resource.name) == Some(&count) && !its.allocated.contains(&resource.name)
        };
        self.containers.iter().filter(is_waiting).filter(|_| !self.is_admitted)
    }
}

impl Placements {
    /// What a pod is now.
    pub fn learn(&self, pod: &Pod, resources: &[Resource]) {
        let Some(uid) = pod.metadata.uid.clone().filter(|_| !resources.is_empty()) else { return };
        let serves = |name: &String| resources.iter().any(|resource| resource.name == *name);
        let of = |mut asking: Asking| {
            asking.amounts.retain(|name, _| serves(name));
            KnownContainer { asking, allocated: BTreeSet::new() }
        };
        let containers: Vec<KnownContainer> =
            asking(pod).into_iter().map(of).filter(|its| !its.asking.amounts.is_empty()).collect();
        if containers.is_empty() {
            return;
        }
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        let is_admitted = pod.status.as_ref().is_some_and(|status| status.start_time.is_some());
        let mut known = self.known();
        known.heard += 1;
        let before = known.pods.iter().find(|(_, before)| before.uid == uid).map(|(key, _)| *key);
        let key = before.unwrap_or(known.heard);
        let placement = placement(pod).unwrap_or_default();
        let is_as_before =
            |before: &KnownPod| before.is_admitted == is_admitted && before.placement == placement;
        if !known.pods.get(&key).is_some_and(is_as_before) {
            let pod = KnownPod {
                uid,
                namespace: text(&pod.metadata.namespace),
                name: text(&pod.metadata.name),
                containers,
                placement,
                is_admitted,
            };
            known.pods.insert(key, pod);
            known.changes += u64::from(is_admitted);
        }
    }

    /// The pod has ended.
    pub fn forget(&self, pod: &Pod) {
        let mut known = self.known();
        let before = known.pods.len();
        known.pods.retain(|_, known| Some(&known.uid) != pod.metadata.uid.as_ref());
        if known.pods.len() != before {
            known.changes += 1;
        }
    }

    /// What the containers ask for that wait for `count` of this resource, in the order of their pods.
    pub fn waiting(&self, resource: &Resource, count: u64) -> Vec<Asking> {
        let known = self.known();
        let its = known.pods.values().flat_map(|pod| pod.waits_for(resource, count));
        its.map(|its| its.asking.clone()).collect()
    }

    /// Forgets all pods but those with these UIDs: the others have ended unheard.
    pub fn retain(&self, uids: &HashSet<String>) {
        let mut known = self.known();
        let before = known.pods.len();
        known.pods.retain(|_, known| uids.contains(&known.uid));
        if known.pods.len() != before {
            known.changes += 1;
        }
    }

    /// The indexes of the GPUs that were chosen for the first container that waits for `count` of this
    /// resource.
    pub fn chosen(&self, resource: &Resource, count: u64) -> Option<Vec<u32>> {
        let known = self.known();
        let mut all =
            known.pods.values().flat_map(|pod| pod.waits_for(resource, count).map(move |its| (pod, its)));
        all.find_map(|(pod, its)| pod.placement.get(&its.asking.container).cloned())
    }

    /// kubelet allocates so many of this resource on these GPUs: to the first container that waits for them
    /// there, else to the first that waits for as many.
    pub fn allocated(&self, resource: &Resource, count: u64, gpus: &[u32]) {
        let mut known = self.known();
        let waiting = known.pods.iter().flat_map(|(key, pod)| {
            pod.waits_for(resource, count).map(move |its| {
                let chosen = pod.placement.get(&its.asking.container);
                let is_elsewhere = chosen.is_some_and(|chosen| chosen != gpus);
                (is_elsewhere, *key, its.asking.container.clone())
            })
        });
        let Some((_, key, container)) = waiting.min_by_key(|(is_elsewhere, key, _)| (*is_elsewhere, *key))
        else {
            return;
        };
        let its = known
            .pods
            .get_mut(&key)
            .and_then(|pod| pod.containers.iter_mut().find(|its| its.asking.container == container));
        if let Some(its) = its {
            its.allocated.insert(resource.name.clone());
        }
    }

    /// How often what kubelet has put where may have changed.
    pub fn changes(&self) -> u64 {
        self.known().changes
    }

    /// The containers of admitted pods that kubelet put on other GPUs than was chosen for them.
    pub fn moved(&self, devices: &Devices, offer: &Offer, resources: &[Resource]) -> Placed {
        let known = self.known();
        let mut moved = Placed::new();
        for pod in known.pods.values().filter(|pod| pod.is_admitted) {
            for container in &pod.containers {
                let its =
                    devices.of(&pod.namespace, &pod.name, &container.asking.container).unwrap_or_default();
                let mut gpus: Vec<u32> = Vec::new();
                let share =
                    Terms::of_given(resources).share(&container.asking.amounts, container.asking.gpus);
                let is_whole = share.is_ok_and(|share| share.part == Part::Whole);
                for devices in its {
                    let is_counted = |known: &&Resource| {
                        known.name == devices.resource_name && known.counted() == Counted::ByKubelet
                    };
                    // Of whole GPUs memory beside them says nothing.
                    let says = |known: &Resource| !(is_whole && known.unit.is_of_memory());
                    if resources.iter().any(|known| is_counted(&known) && says(known)) {
                        let indexes = devices.device_ids.iter().filter_map(|id| gpu_of(id));
                        gpus.extend(indexes.filter_map(|uuid| offer.gpu(uuid)).map(|gpu| gpu.index));
                    }
                }
                gpus.sort_unstable();
                gpus.dedup();
                if !gpus.is_empty() && pod.placement.get(&container.asking.container) != Some(&gpus) {
                    moved
                        .entry(pod.uid.clone())
                        .or_default()
                        .insert(container.asking.container.clone(), gpus);
                }
            }
        }
        moved
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::resource::{System, Unit};

    fn resources() -> [Resource; 2] {
        let resource = |name: &str, unit| Resource { name: name.into(), unit, system: System::GpuManager };
        [
            resource("tencent.com/vcuda-memory", Unit::Memory(256 << 20)),
            resource("tencent.com/vcuda-core", Unit::Percent),
        ]
    }

    fn pod(name: &str, core: u64, gpus: &[u32], is_admitted: bool) -> Pod {
        let limits = json!({"tencent.com/vcuda-memory": "60", "tencent.com/vcuda-core": core.to_string()});
        let chosen = json!({"main": gpus}).to_string();
        let started = if is_admitted { json!("2026-11-25T00:00:00Z") } else { Value::Null };
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "team", "uid": name,
                "annotations": {crate::gpus::PLACEMENT: chosen}},
            "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
            "status": {"startTime": started}}))
        .unwrap()
    }

    fn cores(placements: &Placements) -> Vec<u64> {
        let [memory, core] = resources();
        placements.waiting(&memory, 60).iter().map(|asking| asking.amounts[&core.name]).collect()
    }

    #[test]
    fn what_is_allocated_is_that_of_the_container_which_waits_for_it_there() {
        let [memory, core] = resources();
        let placements = Placements::default();
        for (name, core, gpus) in [("a", 200, &[0, 1][..]), ("b", 50, &[2]), ("c", 40, &[3])] {
            placements.learn(&pod(name, core, gpus, false), &resources());
        }
        assert_eq!(cores(&placements), [200, 50, 40], "in the order of their pods");
        assert_eq!(placements.chosen(&memory, 60), Some(vec![0, 1]));
        placements.allocated(&memory, 60, &[2]);
        assert_eq!(cores(&placements), [200, 40]);
        assert_eq!(placements.waiting(&core, 50).len(), 1, "its compute it waits for still");
        // Where nobody was to be there it is the first one: none is waited for twice.
        placements.allocated(&memory, 60, &[7]);
        assert_eq!(cores(&placements), [40]);
        placements.learn(&pod("c", 40, &[3], true), &resources());
        assert!(cores(&placements).is_empty(), "kubelet has admitted it");
        placements.allocated(&memory, 60, &[3]);
    }

    #[test]
    fn pods_that_ended_unheard_are_waited_for_no_longer() {
        let placements = Placements::default();
        for name in ["gone", "here"] {
            placements.learn(&pod(name, 200, &[0, 1], false), &resources());
        }
        let changes = placements.changes();
        placements.retain(&["here".to_owned()].into());
        assert_eq!((cores(&placements).len(), placements.changes()), (1, changes + 1));
        placements.retain(&["here".to_owned()].into());
        assert_eq!(placements.changes(), changes + 1);
    }
}
