//! Which pods may use a claim, as the cluster says.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use gpushare_inject::open_measured;
use gpushare_inventory::Gpu;
use gpushare_quota::{ClaimName, words};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::task::spawn_blocking;

use super::allotment::Allotment;
use super::events::{Reason, Subject};
use super::{Agent, claim};

/// A claim's namespace and name.
pub type Named = (String, String);

/// The claims that pods name which have come to the node. A claim that was prepared for one of its pods is
/// prepared for none of those that come later: kubelet calls nobody then.
#[derive(Default)]
pub struct Newcomers(Mutex<BTreeSet<Named>>);

impl Newcomers {
    /// Notes the claims of a pod that was not known before. Those that were made for it alone are shared with
    /// no other.
    pub fn learn(&self, pod: &Pod) {
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let claims = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
        let named = claims.filter_map(|claim| Some((namespace.clone(), claim.resource_claim_name.clone()?)));
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(named);
    }

    /// All that were noted since the last call.
    pub fn take(&self) -> BTreeSet<Named> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Notes which pods may use the claim. Where the scheduler has allocated it anew meanwhile, none may: what is
/// prepared is another share, and kubelet does not prepare it again as long as a pod of before uses it.
/// `gpus`: those of the node; `None` where the claim has just been prepared.
///
/// # Errors
/// When the store fails. The next look does it then.
pub async fn note_consumers(
    agent: &Arc<Agent>,
    name: &ClaimName,
    found: &ResourceClaim,
    gpus: Option<&[Gpu]>,
) -> Result<()> {
    let mut shareable = agent.shareable.lock().await;
    shareable.retain(|known| known != name);
    if claim::is_shareable(found) {
        shareable.push(name.clone());
    }
    drop(shareable);
    // What cannot be read now, as that of a GPU that is out of service, is taken for the same.
    let allotted = gpus.and_then(|gpus| {
        let strict = agent.config.request.strict;
        let allotment = Allotment::of(found, &agent.options.node_name, gpus, strict).ok()?;
        words(&allotment.request, gpus).ok()
    });
    let (pods, uid, noting) = (claim::pods(found), name.uid.clone(), Arc::clone(agent));
    let is_stale = spawn_blocking(move || {
        let store = open_measured(&noting.state)?;
        let prepared = allotted.is_some().then(|| store.request_of_claim(&uid)).transpose()?.flatten();
        let is_stale = prepared.zip(allotted).is_some_and(|(prepared, allotted)| prepared != allotted);
        let pods = if is_stale { Some(Vec::new()) } else { pods };
        let is_news = store.set_claim_pods(&uid, pods.as_deref())?;
        if is_news {
            tracing::info!(uid, count = pods.map(|pods| pods.len()), is_stale, "pods of the claim");
        }
        anyhow::Ok(is_stale && is_news)
    });
    if is_stale.await?? {
        let text = "the scheduler allocated the claim anew while its share of before is in use on this node: delete the pods \
                    that use it, so that the claim is prepared as it is allocated now";
        agent.events.tell(Subject::of_claim(name), Reason::Stale, text.to_owned());
    }
    Ok(())
}
