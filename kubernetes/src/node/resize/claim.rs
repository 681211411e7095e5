//! A claim's share within what the scheduler allocated: annotations of the claim state less of it, and all of
//! it again.

use std::sync::Arc;

use anyhow::{Context, Result};
use gpushare_inject::{change_share, fit, known_node, open_measured};
use gpushare_quota::{Change, ClaimName, LeaseKey};
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::task::spawn_blocking;

use super::{Own, own, share, told};
use crate::node::Agent;
use crate::node::allotment::Allotment;
use crate::node::events::{Reason, Subject};

/// What is known of a claim's annotations.
#[derive(Clone, Debug, Default)]
pub struct Stated {
    /// Those at which nothing was left to do; `None` before the first look.
    held: Option<Own>,
    /// What was told last, where it could not be changed.
    refused: Option<String>,
}

/// Gives the share of the claim `name`, which the cluster has as `found`, what its annotations state. What
/// cannot be done is told, and tried again at the next look.
pub async fn follow(agent: &Arc<Agent>, name: &ClaimName, found: &ResourceClaim) {
    let wanted = own(found.metadata.annotations.as_ref());
    let known = agent.stated.lock().await.get(&name.uid).cloned().unwrap_or_default();
    if known.held.as_ref() == Some(&wanted) {
        if known.refused.is_some() {
            agent.stated.lock().await.insert(name.uid.clone(), Stated { refused: None, ..known });
        }
        return;
    }
    let (changing, its, of_it, turn) = (Arc::clone(agent), name.clone(), found.clone(), agent.turn().await);
    let changed = spawn_blocking(move || {
        let _turn = turn;
        change(&changing, &its, &of_it)
    });
    let (stated, outcome) = match changed.await.map_err(anyhow::Error::from).and_then(|changed| changed) {
        Ok(changed) => {
            (Stated { held: Some(wanted), refused: None }, changed.map(|text| (Reason::Resized, text)))
        }
        Err(error) => {
            let text = told(&error);
            let is_news = known.refused.as_ref() != Some(&text);
            let stated = Stated { refused: Some(text.clone()), ..known };
            (stated, is_news.then_some((Reason::NotResized, text)))
        }
    };
    agent.stated.lock().await.insert(name.uid.clone(), stated);
    if let Some((reason, text)) = outcome {
        agent.metrics.resized(reason == Reason::Resized);
        tracing::info!(claim = %name, uid = name.uid, text, ?reason, "the claim's annotations changed");
        agent.events.tell(Subject::of_claim(name), reason, text);
    }
}

/// Changes the claim's share. Returns what it is then, in words; `None` where nothing of it was to change.
fn change(agent: &Agent, name: &ClaimName, found: &ResourceClaim) -> Result<Option<String>> {
    let settings = agent.settings();
    let store = open_measured(&agent.state)?;
    let lease = store.lease(&LeaseKey::of_claim(&name.uid)?)?.context("the claim holds no share here")?;
    let own = own(found.metadata.annotations.as_ref());
    if lease.restated == own {
        return Ok(None);
    }
    fit(&own)?;
    let node = known_node(&agent.state, &settings)?;
    let allotment = Allotment::of(found, &agent.options.node_name, &node.gpus, settings.policy.strict)?;
    let mut changes = allotment.restated(&own)?;
    changes.push(Change { restated: Some(own), ..Change::default() });
    let (old, new) = change_share(&agent.state, &store, &lease, &changes, &node, &settings)?;
    Ok((old.grants != new.grants).then(|| share(&new)))
}
