//! What this node's pods ask for by resources, and the GPUs that the scheduler extender chose for them.
//!
//! kubelet asks for advice on one resource at a time and names no pod. What is known here is for advice
//! alone: two pods may ask for the same amount, and annotations can be forged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpushare_placement::Part;
use k8s_openapi::api::core::v1::Pod;

use super::offer::{Offer, gpu_of};
use crate::asks::{Asking, Terms, asking};
use crate::gpus::{Placed, Placement, placement};
use crate::node::podresources::Devices;
use crate::resource::{Counted, Resource};

/// The pods.
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

    /// What the first container asks for which waits for `count` of this resource.
    pub fn beside(&self, resource: &Resource, count: u64) -> Option<Asking> {
        let known = self.known();
        let mut its = known.pods.values().flat_map(|pod| pod.waits_for(resource, count));
        its.next().map(|its| its.asking.clone())
    }

    /// The indexes of the GPUs that were chosen for the first container that waits for `count` of this
    /// resource.
    pub fn chosen(&self, resource: &Resource, count: u64) -> Option<Vec<u32>> {
        let known = self.known();
        let mut all =
            known.pods.values().flat_map(|pod| pod.waits_for(resource, count).map(move |its| (pod, its)));
        all.find_map(|(pod, its)| pod.placement.get(&its.asking.container).cloned())
    }

    /// kubelet allocates so many of this resource on these GPUs.
    pub fn allocated(&self, resource: &Resource, count: u64, gpus: &[u32]) {
        let mut known = self.known();
        let is_its = |pod: &KnownPod, its: &KnownContainer| {
            pod.placement.get(&its.asking.container).is_none_or(|chosen| chosen == gpus)
        };
        for pod in known.pods.values_mut().filter(|pod| !pod.is_admitted) {
            let waiting = pod
                .waits_for(resource, count)
                .find(|its| is_its(pod, its))
                .map(|its| its.asking.container.clone());
            if let Some(its) =
                pod.containers.iter_mut().find(|its| Some(&its.asking.container) == waiting.as_ref())
            {
                its.allocated.insert(resource.name.clone());
                return;
            }
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
                let share = Terms { resources: resources.to_vec(), default_cores: 0 }
                    .share(&container.asking.amounts, container.asking.gpus);
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
