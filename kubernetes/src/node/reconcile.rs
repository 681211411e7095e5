//! Gives back what no call of kubelet's will give back: claims that are gone from the cluster while kubelet had
//! lost its notes, and CDI files without a lease.

use std::sync::Arc;

use anyhow::Result;
use gpushare_inject::open_store;
use gpushare_quota::{ClaimName, Holder};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use tokio::task::spawn_blocking;

use super::driver::release;
use super::{Agent, cdi};

/// Looks at each claim that holds a share here.
///
/// # Errors
/// When the store or the API server cannot be asked. What cannot be asked for stays as it is.
pub async fn reconcile(agent: &Arc<Agent>) -> Result<()> {
    for name in unused(agent).await? {
        if is_gone(agent, &name).await? {
            tracing::warn!(claim = %name, uid = name.uid, "the claim is gone from the cluster: its share is given back");
            release(agent, &name.uid).await?;
        }
    }
    Ok(())
}

/// The claims without a living container. CDI files that no claim has are removed on the way.
async fn unused(agent: &Arc<Agent>) -> Result<Vec<ClaimName>> {
    let looking = Arc::clone(agent);
    let _turn = agent.turn.lock().await;
    spawn_blocking(move || {
        let store = open_store(&looking.state, &looking.settings())?;
        let claims = store.claims()?;
        for uid in cdi::existing(&looking) {
            if !claims.iter().any(|(claim, _)| claim.name.uid == uid) {
                cdi::remove(&looking, &uid)?;
            }
        }
        let lives = |holder: &Holder| !holder.is_agent() && !holder.is_gone();
        let unused =
            claims.into_iter().filter(|(_, lease)| !lease.members().any(|member| lives(&member.holder)));
        Ok(unused.map(|(claim, _)| claim.name).collect())
    })
    .await?
}

/// Whether the cluster has no such claim, or one without an allocation. A claim that a pod uses can be neither.
async fn is_gone(agent: &Agent, name: &ClaimName) -> Result<bool> {
    let api = Api::<ResourceClaim>::namespaced(agent.api.clone(), &name.namespace);
    let claim =
        api.get_opt(&name.name).await?.filter(|claim| claim.metadata.uid.as_deref() == Some(&name.uid));
    Ok(claim.and_then(|claim| claim.status).and_then(|status| status.allocation).is_none())
}
