//! Keeps claims as the cluster has them: which pods may use them, and that those are given back which no call
//! of kubelet's will give back. A claim is gone when the cluster has no such claim, or has it on another
//! node.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::Result;
use gpushare_inject::{forget_ended, known_node, open_measured};
use gpushare_inventory::Gpu;
use gpushare_quota::{ClaimName, Holder, Lease, ResourceClaim};
use tokio::task::spawn_blocking;

use super::consumers::{Named, note_consumers};
use super::driver::give_back;
use super::metrics::number;
use super::{Agent, cdi, claim, resize};

/// Which claims are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which<'a> {
    /// All that hold a share here.
    All,
    /// Of those that further pods may come to share, these.
    Shared(&'a BTreeSet<Named>),
}

/// Looks at claims that hold a share here. What the API server does not tell stays as it is.
///
/// # Errors
/// When the store cannot be asked.
pub async fn reconcile(agent: &Arc<Agent>, which: Which<'_>) -> Result<()> {
    let names = held(agent, which).await?;
    if names.is_empty() {
        return Ok(());
    }
    let reading = Arc::clone(agent);
    let gpus = spawn_blocking(move || known_node(&reading.state, &reading.settings()).map(|node| node.gpus));
    // Without a GPU in service nothing can be compared, and all else is done.
    let gpus = gpus.await?.unwrap_or_default();
    for name in names {
        if let Err(error) = look(agent, &name, which, &gpus).await {
            let error = format!("{error:#}");
            tracing::warn!(claim = %name, uid = name.uid, error, "it is not known whether the claim is still needed");
        }
    }
    Ok(())
}

/// The claims that hold a share. What killed processes left (CDI files, regions) is removed on the way.
async fn held(agent: &Arc<Agent>, which: Which<'_>) -> Result<Vec<ClaimName>> {
    if let Which::Shared(named) = which {
        let is_named = |name: &&ClaimName| named.contains(&(name.namespace.clone(), name.name.clone()));
        return Ok(agent.shareable.lock().await.iter().filter(is_named).cloned().collect());
    }
    let (looking, turn) = (Arc::clone(agent), agent.turn().await);
    let claims = spawn_blocking(move || {
        let _turn = turn;
        let store = open_measured(&looking.state)?;
        let claims = store.claims()?;
        cdi::remove_others(&looking, |uid| claims.iter().any(|(claim, _)| claim.name.uid == uid))?;
        forget_ended(&looking.state, &store)?;
        anyhow::Ok(claims)
    });
    let names: Vec<ClaimName> = claims.await??.into_iter().map(|(claim, _)| claim.name).collect();
    agent.metrics.claims.set(number(names.len()));
    // What is noted of claims that were given back goes.
    agent.shareable.lock().await.retain(|name| names.contains(name));
    agent.suspects.lock().await.retain(|uid| names.iter().any(|name| name.uid == *uid));
    agent.stated.lock().await.retain(|uid, _| names.iter().any(|name| name.uid == *uid));
    Ok(names)
}

async fn look(agent: &Arc<Agent>, name: &ClaimName, which: Which<'_>, gpus: &[Gpu]) -> Result<()> {
    let found = claim::find(&agent.api, name).await?;
    let found = found.filter(|found| claim::is_on(found, &agent.options.node_name));
    let mut suspects = agent.suspects.lock().await;
    if let Some(found) = found {
        suspects.remove(&name.uid);
        drop(suspects);
        resize::claim::follow(agent, name, &found).await;
        note_consumers(agent, name, &found, Some(gpus)).await
    } else if which != Which::All || suspects.insert(name.uid.clone()) {
        Ok(()) // asked once more at the next look
    } else {
        drop(suspects);
        give_back_unused(agent, name).await
    }
}

/// Gives the claim back if it is still gone and no container of it lives. The API server is asked once more
/// with the turn, since kubelet may have had the claim prepared meanwhile.
async fn give_back_unused(agent: &Arc<Agent>, name: &ClaimName) -> Result<()> {
    let turn = agent.turn().await;
    let found = claim::find(&agent.api, name).await?;
    if found.is_some_and(|found| claim::is_on(&found, &agent.options.node_name)) {
        return Ok(());
    }
    let (agent, name) = (Arc::clone(agent), name.clone());
    spawn_blocking(move || {
        let store = open_measured(&agent.state)?;
        let its = |(claim, _): &(ResourceClaim, Lease)| claim.name.uid == name.uid;
        let Some((_, lease)) = store.claims()?.into_iter().find(its) else { return Ok(()) };
        let lives = |holder: &Holder| !holder.is_agent() && !holder.is_gone();
        if lease.members().any(|member| lives(&member.holder)) {
            tracing::warn!(claim = %name, uid = name.uid, "the claim is gone from the cluster, and containers hold its share");
            return Ok(());
        }
        tracing::warn!(claim = %name, uid = name.uid, "the claim is gone from the cluster: its share is given back");
        give_back(&agent, &name.uid, &turn)
    })
    .await?
}
