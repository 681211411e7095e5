//! Looks up in the quota store what the node reserved for a container's resource claim.

use std::borrow::Cow;

use gpushare_quota::{Grant, Lease, Store, StoreError};
use gpushare_request::{
    Container, DeviceSelector, Devices, Request, RequestError, Reserved, ReservedShare, named_claim,
};

/// Why a container may not join the lease of the claim that its bundle names.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The bundle's words for a claim are malformed.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The quota store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The claim belongs to another Kubernetes namespace than the container's pod.
    #[error("claim {claim} is not of the pod's namespace {namespace:?}")]
    ForeignNamespace {
        /// Namespace and name of the claim.
        claim: String,
        /// The pod's namespace.
        namespace: String,
    },
    /// The cluster does not let the container's pod use the claim.
    #[error(
        "claim {claim} is not reserved for this pod (UID {uid:?}), as far as the node knows; a pod that shares it is told to the \
         node within seconds, and is started then"
    )]
    ForeignPod {
        /// Namespace and name of the claim.
        claim: String,
        /// The pod's UID.
        uid: String,
    },
}

/// The container with what is reserved for the claim that its bundle names; `None` where it names none, or
/// one that holds nothing here. The store is opened only for a claim.
///
/// # Errors
/// When the bundle's words for it are malformed, the claim is another namespace's or not for this pod, or the
/// store fails.
pub fn look_up_claim<E: From<ClaimError>>(
    container: &Container,
    store: impl FnOnce() -> Result<Store, E>,
) -> Result<Option<Container>, E> {
    let Some(named) = named_claim(container).map_err(ClaimError::from)? else { return Ok(None) };
    let Ok(token) = named.token.parse() else { return Ok(None) };
    let Some((claim, lease)) = store()?.claim_of(&token).map_err(ClaimError::from)? else { return Ok(None) };
    // Outside Kubernetes no engine writes a namespace, and its caller is root's equal.
    if let Some(namespace) = container.pod_namespace().filter(|namespace| *namespace != claim.name.namespace)
    {
        let namespace = namespace.escape_debug().to_string();
        return Err(ClaimError::ForeignNamespace { claim: claim.name.to_string(), namespace }.into());
    }
    if let (Some(pods), true) = (&claim.pods, container.pod_namespace().is_some()) {
        let uid = container.pod_uid().unwrap_or_default();
        if !pods.iter().any(|pod| pod == uid) {
            let uid = uid.escape_debug().to_string();
            return Err(ClaimError::ForeignPod { claim: claim.name.to_string(), uid }.into());
        }
    }
    let share = |grant: &Grant| ReservedShare { gpu: grant.gpu, memory: grant.memory, cores: grant.cores };
    let of_gpu = |gpu| lease.grants.iter().find(|grant| grant.gpu == gpu).map(share);
    let Some(shares) = named.gpus.iter().map(|gpu| of_gpu(*gpu)).collect() else { return Ok(None) };
    let reserved = Reserved { claim: claim.name.to_string(), lease: lease.id, shares };
    Ok(Some(container.clone().with_reserved(reserved)))
}

/// The part of a claim's lease that the container gets: it may use only some of the claim's GPUs. Any other
/// lease is its container's whole.
pub fn part_of<'a>(lease: &'a Lease, request: &Request) -> Cow<'a, Lease> {
    let (Some(_), Devices::These(list)) = (request.reserved, &request.devices) else {
        return Cow::Borrowed(lease);
    };
    let of = |selector: &DeviceSelector| {
        lease.grants.iter().find(|grant| matches!(selector, DeviceSelector::Uuid(uuid) if *uuid == grant.gpu))
    };
    Cow::Owned(Lease { grants: list.iter().filter_map(of).cloned().collect(), ..lease.clone() })
}
