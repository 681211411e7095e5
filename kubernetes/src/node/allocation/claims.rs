//! The claims by which other drivers give GPUs: what their shares are of stands in the claims' status and in
//! those drivers' ResourceSlices alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpushare_inventory::{DeviceMemory, GpuUuid};
use gpushare_request::{AllocatedPart, Cores, kubernetes_quantity};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::ListParams;

use super::pod;
use crate::node::slice::{CORES, MEMORY};
use crate::node::{Agent, DRIVER};

/// By driver, pool and device: the GPU, or `None` for another kind of device.
type Shown = BTreeMap<(String, String, String), Option<GpuUuid>>;

/// The claims that a pod names, and what other drivers show.
#[derive(Default)]
pub struct Claims {
    by_name: BTreeMap<String, Result<ResourceClaim, String>>,
    shown: Shown,
}

/// Claims of a pod at most, as far as they are looked at. The API server has 32 for each container's requests.
const MOST: usize = 64;

/// A part of a claim that a container names.
pub struct Part {
    /// Tells it from the claim's other parts.
    pub number: usize,
    /// What it gives.
    pub part: AllocatedPart,
}

impl Claims {
    /// Asks the API server for all that the pod names.
    ///
    /// # Errors
    /// When it names too many, or slices cannot be listed.
    pub async fn of(agent: &Arc<Agent>, pod: &Pod) -> Result<Self, String> {
        let mut found = Self::default();
        let names = pod::claims(pod);
        if names.len() > MOST {
            return Err(format!("it names {} claims: {MOST} are looked at", names.len()));
        }
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        for name in names {
            let claims = Api::<ResourceClaim>::namespaced(agent.api.clone(), namespace);
            let claim = claims.get(&name).await.map_err(|error| format!("claim {name}: {error}"));
            found.by_name.insert(name, claim);
        }
        let keys = |found: &Self| -> BTreeSet<(String, String, String)> {
            let claims = found.by_name.values().flatten();
            let keys = claims.flat_map(|claim| foreign(claim).map(|(_, result)| key(result)));
            keys.filter(|key| !found.shown.contains_key(key)).collect()
        };
        if keys(&found).is_empty() {
            return Ok(found);
        }
        found.add_slices(agent, &format!("spec.nodeName={}", agent.options.node_name)).await?;
        // Devices that are no node's own.
        let drivers: BTreeSet<String> = keys(&found).into_iter().map(|(driver, ..)| driver).collect();
        for driver in drivers {
            found.add_slices(agent, &format!("spec.driver={driver}")).await?;
        }
        Ok(found)
    }

    async fn add_slices(&mut self, agent: &Arc<Agent>, field: &str) -> Result<(), String> {
        let slices = Api::<ResourceSlice>::all(agent.api.clone());
        let listed = slices.list(&ListParams::default().fields(field)).await;
        let listed = listed.map_err(|error| format!("ResourceSlices cannot be listed: {error}"))?;
        self.shown.extend(shown(&listed.items));
        Ok(())
    }

    /// What a claim gives to a container of the pod that names these of its requests, or the whole claim
    /// (`None`). What is no GPU is left out.
    ///
    /// # Errors
    /// When it is not known yet.
    pub fn parts(&self, pod: &Pod, name: &str, requests: &[Option<&str>]) -> Result<Vec<Part>, String> {
        let claim = self.by_name.get(name).ok_or_else(|| format!("claim {name} is new"))?.as_ref()?;
        let status = claim.status.as_ref();
        if status.is_none_or(|status| status.allocation.is_none()) {
            return Err(format!("claim {name} is not allocated"));
        }
        if !consumers(claim).any(|uid| Some(uid) == pod.metadata.uid.as_deref()) {
            return Err(format!("claim {name} is not reserved for the pod"));
        }
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(format!("claim {name} is being deleted"));
        }
        let mut parts = Vec::new();
        for (number, result) in foreign(claim) {
            if !requests.iter().any(|request| is_of(result, *request)) {
                continue;
            }
            let gpu = self.shown.get(&key(result));
            let gpu =
                gpu.ok_or_else(|| format!("driver {} shows no {} now", result.driver, result.device))?;
            if let Some(gpu) = gpu {
                parts.push(Part { number, part: part(format!("claim {name}"), *gpu, result)? });
            }
        }
        Ok(parts)
    }

    /// Whether other pods may use the claim, too.
    pub fn is_shared(&self, name: &str) -> bool {
        let claim = self.by_name.get(name).and_then(|claim| claim.as_ref().ok());
        claim.is_some_and(|claim| consumers(claim).count() > 1)
    }

    /// The claim of this name.
    #[cfg(test)]
    pub fn claim(&self, name: &str) -> &ResourceClaim {
        self.by_name[name].as_ref().unwrap()
    }

    /// One claim, and the slice of its driver.
    #[cfg(test)]
    pub fn told(claim: &serde_json::Value, slice: &serde_json::Value) -> Self {
        let claim: ResourceClaim = serde_json::from_value(claim.clone()).unwrap();
        let slice: ResourceSlice = serde_json::from_value(slice.clone()).unwrap();
        let name = claim.metadata.name.clone().unwrap();
        Self { by_name: [(name, Ok(claim))].into(), shown: shown(&[slice]) }
    }
}

/// The UIDs of the pods that may use the claim, and of whatever else may.
fn consumers(claim: &ResourceClaim) -> impl Iterator<Item = &str> {
    let status = claim.status.iter();
    status.flat_map(|status| status.reserved_for.iter().flatten()).map(|consumer| consumer.uid.as_str())
}

fn key(result: &DeviceRequestAllocationResult) -> (String, String, String) {
    (result.driver.clone(), result.pool.clone(), result.device.clone())
}

/// What other drivers allotted to the claim, with its number in the claim.
fn foreign(claim: &ResourceClaim) -> impl Iterator<Item = (usize, &DeviceRequestAllocationResult)> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    let all = results.into_iter().flatten().enumerate();
    all.filter(|(_, result)| result.driver != DRIVER && result.admin_access != Some(true))
}

/// Whether a container that names `request` gets it. One of several alternatives has its name behind a `/`.
fn is_of(result: &DeviceRequestAllocationResult, request: Option<&str>) -> bool {
    let main = result.request.split('/').next().unwrap_or_default();
    request.is_none_or(|request| request == main || request == result.request)
}

fn part(by: String, gpu: GpuUuid, result: &DeviceRequestAllocationResult) -> Result<AllocatedPart, String> {
    let consumed = |capacity: &str| {
        let all = result.consumed_capacity.iter().flatten();
        let mut its = all.filter(|(name, _)| name.rsplit('/').next() == Some(capacity));
        let Some((_, Quantity(amount))) = its.next() else { return Ok(None) };
        let malformed = || format!("{by}: {capacity} of {} is {amount:?}", result.device);
        kubernetes_quantity(amount).map(Some).ok_or_else(malformed)
    };
    let memory = consumed(MEMORY)?.map(DeviceMemory::from_bytes);
    let percent = consumed(CORES)?.and_then(|percent| u8::try_from(percent).ok());
    Ok(AllocatedPart {
        gpu: Some(gpu),
        count: 1,
        memory,
        cores: percent.and_then(Cores::new),
        by,
        is_pods: false,
    })
}

/// What drivers show: a device with a GPU's UUID among its attributes is that GPU.
fn shown(slices: &[ResourceSlice]) -> Shown {
    let mut found = Shown::new();
    for slice in slices {
        for device in slice.spec.devices.iter().flatten() {
            let attributes = device.attributes.iter().flatten();
            let mut uuids = attributes.filter(|(name, _)| name.rsplit('/').next() == Some("uuid"));
            let uuid = uuids.find_map(|(_, value)| value.string.as_ref()?.parse().ok());
            let key = (slice.spec.driver.clone(), slice.spec.pool.name.clone(), device.name.clone());
            found.insert(key, uuid);
        }
    }
    found
}
