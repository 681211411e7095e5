//! What pods ask for that are bound to the node, and that kubelet has not admitted yet. kubelet asks for
//! advice on one resource at a time and names no pod: a GPU that has the memory of a container may lack its
//! compute. What is known here is for advice alone, since two pods may ask for the same amount.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpushare_request::kubernetes_quantity;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::resource::Resource;

/// Amounts by the name of the resource.
pub type Amounts = BTreeMap<String, u64>;

/// The containers of such pods, by the pod's UID.
#[derive(Default)]
pub struct Asking(Mutex<HashMap<String, Vec<Amounts>>>);

impl Asking {
    /// What a pod is now.
    pub fn learn(&self, pod: &Pod, resources: &[Resource]) {
        let Some(uid) = pod.metadata.uid.clone().filter(|_| !resources.is_empty()) else { return };
        let is_admitted = pod.status.as_ref().is_some_and(|status| status.start_time.is_some());
        let asked = if is_admitted { Vec::new() } else { amounts(pod, resources) };
        match asked.is_empty() {
            true => drop(self.known().remove(&uid)),
            false => drop(self.known().insert(uid, asked)),
        }
    }

    /// The pod has ended.
    pub fn forget(&self, pod: &Pod) {
        if let Some(uid) = &pod.metadata.uid {
            self.known().remove(uid);
        }
    }

    /// All that a container asks for which asks for `count` of this resource. Of several the most of each.
    pub fn beside(&self, resource: &Resource, count: u64) -> Option<Amounts> {
        let known = self.known();
        let its = known.values().flatten().filter(|amounts| amounts.get(&resource.name) == Some(&count));
        its.cloned().reduce(|mut most, other| {
            for (name, count) in other {
                let known = most.entry(name).or_default();
                *known = count.max(*known);
            }
            most
        })
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Vec<Amounts>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What each container asks for of these resources; none for one that asks for nothing of them.
fn amounts(pod: &Pod, resources: &[Resource]) -> Vec<Amounts> {
    let spec = pod.spec.iter();
    let containers = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let asked = containers.filter_map(|container| {
        let limits = container.resources.as_ref()?.limits.as_ref()?;
        let its = resources.iter().filter_map(|resource| {
            let Quantity(text) = limits.get(&resource.name)?;
            Some((resource.name.clone(), kubernetes_quantity(text)?))
        });
        Some(its.collect::<Amounts>()).filter(|amounts| !amounts.is_empty())
    });
    asked.collect()
}
