//! The claims by which other drivers give GPUs: what their shares are of stands in the claims' status and in
//! those drivers' ResourceSlices alone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};
use gpushare_request::{AllocatedPart, Cores, kubernetes_quantity};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::ListParams;

use super::pod;
use crate::node::slice::{CORES, MEMORY};
use crate::node::{Agent, DRIVER};

/// The claims that pods of this node name, and the GPUs that other drivers show.
pub struct Claims {
    /// By namespace and name.
    by_name: HashMap<(String, String), Result<ResourceClaim, String>>,
    /// By driver, pool and device.
    gpus: Result<BTreeMap<(String, String, String), GpuUuid>, String>,
}

impl Default for Claims {
    fn default() -> Self {
        Self { by_name: HashMap::new(), gpus: Ok(BTreeMap::new()) }
    }
}

impl Claims {
    /// Asks the API server for all that these pods name.
    pub async fn of(agent: &Arc<Agent>, pods: impl Iterator<Item = &Pod>) -> Self {
        let mut found = Self::default();
        let names: BTreeSet<(String, String)> = pods
            .flat_map(|pod| {
                let namespace = pod.metadata.namespace.clone().unwrap_or_default();
                pod::claims(pod).into_iter().map(move |name| (namespace.clone(), name))
            })
            .collect();
        for (namespace, name) in names {
            let claims = Api::<ResourceClaim>::namespaced(agent.api.clone(), &namespace);
            let claim = claims.get(&name).await.map_err(|error| format!("claim {namespace}/{name}: {error}"));
            found.by_name.insert((namespace, name), claim);
        }
        if found.by_name.values().flatten().any(|claim| foreign(claim).next().is_some()) {
            let slices = Api::<ResourceSlice>::all(agent.api.clone());
            let field = format!("spec.nodeName={}", agent.options.node_name);
            let listed = slices.list(&ListParams::default().fields(&field)).await;
            found.gpus = listed
                .map(|listed| gpus(&listed.items))
                .map_err(|error| format!("the node's ResourceSlices cannot be listed: {error}"));
        }
        found
    }

    /// One claim, and the slice of its driver.
    #[cfg(test)]
    pub fn told(claim: &serde_json::Value, slice: &serde_json::Value) -> Self {
        let claim: ResourceClaim = serde_json::from_value(claim.clone()).unwrap();
        let slice: ResourceSlice = serde_json::from_value(slice.clone()).unwrap();
        let name = (claim.metadata.namespace.clone().unwrap(), claim.metadata.name.clone().unwrap());
        Self { by_name: [(name, Ok(claim))].into(), gpus: Ok(gpus(&[slice])) }
    }

    /// What a claim gives to containers that name `request` of it, or the whole claim. What is no GPU of this
    /// node is left out.
    ///
    /// # Errors
    /// When it is not known yet.
    pub fn parts(
        &self,
        namespace: &str,
        name: &str,
        request: Option<&str>,
        gpus: &[Gpu],
    ) -> Result<Vec<AllocatedPart>, String> {
        let found = self.by_name.get(&(namespace.to_owned(), name.to_owned()));
        let claim = found.ok_or_else(|| format!("claim {namespace}/{name} is new"))?.as_ref()?;
        let mut parts = Vec::new();
        for result in foreign(claim).filter(|result| is_of(result, request)) {
            let key = (result.driver.clone(), result.pool.clone(), result.device.clone());
            let uuid = self.gpus.as_ref()?.get(&key);
            if let Some(gpu) = uuid.filter(|uuid| gpus.iter().any(|gpu| gpu.uuid == **uuid)) {
                parts.push(part(format!("claim {namespace}/{name}"), *gpu, result)?);
            }
        }
        Ok(parts)
    }
}

/// What other drivers allotted to the claim.
fn foreign(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    results
        .into_iter()
        .flatten()
        .filter(|result| result.driver != DRIVER && result.admin_access != Some(true))
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

/// The GPUs that drivers show: those with a GPU's UUID among their attributes.
fn gpus(slices: &[ResourceSlice]) -> BTreeMap<(String, String, String), GpuUuid> {
    let mut found = BTreeMap::new();
    for slice in slices {
        for device in slice.spec.devices.iter().flatten() {
            let attributes = device.attributes.iter().flatten();
            let mut uuids = attributes.filter(|(name, _)| name.rsplit('/').next() == Some("uuid"));
            let uuid = uuids.find_map(|(_, value)| value.string.as_ref()?.parse().ok());
            let key = (slice.spec.driver.clone(), slice.spec.pool.name.clone(), device.name.clone());
            found.extend(uuid.map(|uuid| (key, uuid)));
        }
    }
    found
}
