//! What the API server says of a claim.

use anyhow::{Context, Result};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference};
use kube::{Api, Client, Error};

use super::DRIVER;
use gpushare_quota::ClaimName;

/// The claim of this name and UID; `None` if the cluster has it no more.
///
/// # Errors
/// When that is not told. An answer that only looks like it, as of a proxy or of a server without this API,
/// is none.
pub async fn find(api: &Client, name: &ClaimName) -> Result<Option<ResourceClaim>> {
    let claims = Api::<ResourceClaim>::namespaced(api.clone(), &name.namespace);
    let found = match claims.get(&name.name).await {
        Ok(claim) => Some(claim),
        Err(Error::Api(status)) if is_told_missing(&status, name) => None,
        Err(error) => return Err(error).context("the API server cannot be asked for the claim"),
    };
    Ok(found.filter(|claim| claim.metadata.uid.as_deref() == Some(&name.uid)))
}

fn is_told_missing(status: &kube::core::Status, name: &ClaimName) -> bool {
    let named = status.details.as_ref().is_some_and(|details| details.name == name.name);
    (status.code, status.reason.as_str()) == (404, "NotFound") && named
}

/// The UIDs of the pods that may use it; `None` where others than pods may.
pub fn pods(claim: &ResourceClaim) -> Option<Vec<String>> {
    let consumers = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    let pod = |consumer: &ResourceClaimConsumerReference| {
        let is_pod =
            consumer.resource == "pods" && consumer.api_group.as_deref().unwrap_or_default().is_empty();
        is_pod.then(|| consumer.uid.clone())
    };
    consumers.map(pod).collect()
}

/// Whether pods may come that it does not name yet. A claim that was made for one pod is that pod's alone.
pub fn is_shareable(claim: &ResourceClaim) -> bool {
    !claim.metadata.owner_references.iter().flatten().any(|owner| owner.kind == "Pod")
}

/// Whether it has a device of this driver on the node.
pub fn is_on(claim: &ResourceClaim, node: &str) -> bool {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    results.into_iter().flatten().any(|result| result.driver == DRIVER && result.pool == node)
}
