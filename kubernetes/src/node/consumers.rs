//! Which pods may use a claim, as the cluster says.

use std::sync::Arc;

use anyhow::Result;
use gpushare_inject::open_store;
use gpushare_quota::ClaimName;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::task::spawn_blocking;

use super::{Agent, claim};

/// Notes which pods may use the claim.
///
/// # Errors
/// When the store fails. The next look does it then.
pub async fn note_consumers(agent: &Arc<Agent>, name: &ClaimName, found: &ResourceClaim) -> Result<()> {
    let mut shareable = agent.shareable.lock().await;
    shareable.retain(|known| known != name);
    if claim::is_shareable(found) {
        shareable.push(name.clone());
    }
    drop(shareable);
    let (pods, uid, agent) = (claim::pods(found), name.uid.clone(), Arc::clone(agent));
    spawn_blocking(move || {
        let store = open_store(&agent.state, &agent.settings())?;
        if store.set_claim_pods(&uid, pods.as_deref())? {
            tracing::info!(uid, count = pods.map(|pods| pods.len()), "pods of the claim");
        }
        Ok(())
    })
    .await?
}
