//! Follows this node's pods: the API server lists them, and then tells every change.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use gpushare_inject::Presence;
use gpushare_request::KubeletPolicy;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ListParams, WatchEvent, WatchParams};
use tokio::time::{Duration, Instant, sleep, sleep_until};
use tokio_stream::StreamExt;

use super::Agent;
use super::allocation::Notes;
use super::resize::Resizes;

/// Seconds after which the API server ends a watch, and another one begins: less than it may be silent.
const WATCH: u32 = 15;
/// How many pods the API server sends at once. A pod may have more than 1 MiB, and takes several times that
/// while it is read: all of a node at once could be more than the agent may use.
const PAGE: u32 = 8;
/// How long to wait after an error.
const PAUSE: Duration = Duration::from_secs(4);

/// All that depends on pods.
struct Pods {
    agent: Arc<Agent>,
    /// `None` where the settings do not ask for what kubelet allocated.
    notes: Option<Notes>,
    resizes: Resizes,
}

/// Follows them until it is dropped.
pub async fn keep(agent: &Arc<Agent>) {
    let mut presence = None;
    loop {
        let error = match follow(agent, &mut presence).await {
            Ok(never) => match never {},
            Err(error) => format!("{error:#}"),
        };
        tracing::warn!(error, "cannot follow the node's pods");
        sleep(PAUSE).await;
    }
}

/// Lists the pods, and follows their changes until an error. Where allocations are noted, containers wait for
/// their pod's note from then on (`presence`).
async fn follow(agent: &Arc<Agent>, presence: &mut Option<Presence>) -> Result<Infallible> {
    let notes = match agent.config.request.kubelet {
        KubeletPolicy::Off => None,
        KubeletPolicy::Refuse | KubeletPolicy::Believe => Some(Notes::of(agent, presence)?),
    };
    let api = Api::<Pod>::all(agent.api.clone());
    let mut pods = Pods { agent: Arc::clone(agent), notes, resizes: Resizes::of(agent) };
    // Pods that have ended hold nothing; one that ends is told as deleted.
    let field =
        format!("spec.nodeName={},status.phase!=Succeeded,status.phase!=Failed", agent.options.node_name);
    let mut page = ListParams::default().fields(&field).limit(PAGE);
    let (mut version, mut uids) = (String::new(), HashSet::new());
    loop {
        let listed = api.list(&page).await.context("the API server does not list this node's pods")?;
        version = listed.metadata.resource_version.unwrap_or(version);
        for pod in listed.items {
            uids.extend(pod.metadata.uid.clone());
            pods.learn(pod);
        }
        match listed.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => break,
        }
    }
    agent.placements.retain(&uids);
    if let Some(notes) = &pods.notes {
        notes.forget_others()?;
    }
    let params = WatchParams::default().fields(&field).timeout(WATCH);
    loop {
        let events = api.watch(&params, &version).await.context("the API server cannot be watched")?;
        tokio::pin!(events);
        loop {
            let due = pods.next();
            let event = tokio::select! {
                event = events.next() => event,
                () = sleep_until(due) => {
                    pods.look().await?;
                    continue;
                }
            };
            let Some(event) = event else { break };
            match event.context("the API server cannot be watched")? {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                    version = pod.metadata.resource_version.clone().unwrap_or(version);
                    pods.learn(pod);
                }
                WatchEvent::Deleted(pod) => {
                    version = pod.metadata.resource_version.clone().unwrap_or(version);
                    pods.forget(&pod)?;
                }
                WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                WatchEvent::Error(status) => bail!("the watch ended: {}", status.message),
            }
        }
        if let Some(notes) = &mut pods.notes {
            notes.distrust_devices();
        }
    }
}

impl Pods {
    fn learn(&mut self, pod: Pod) {
        self.agent.placements.learn(&pod, &self.agent.resources);
        if self.resizes.learn(&pod) {
            self.agent.newcomers.learn(&pod);
        }
        if let Some(notes) = &mut self.notes {
            notes.learn(pod);
        }
    }

    fn forget(&mut self, pod: &Pod) -> Result<()> {
        self.agent.placements.forget(pod);
        self.resizes.forget(pod);
        self.notes.as_mut().map_or(Ok(()), |notes| notes.forget(pod))
    }

    /// When there is something to do next.
    fn next(&self) -> Instant {
        let notes = self.notes.as_ref().and_then(Notes::next);
        notes.map_or(self.resizes.next(), |due| due.min(self.resizes.next()))
    }

    async fn look(&mut self) -> Result<()> {
        let now = Instant::now();
        if let Some(notes) = self.notes.as_mut().filter(|notes| notes.next().is_some_and(|due| due <= now)) {
            notes.look().await?;
        }
        if self.resizes.next() <= now {
            self.resizes.look().await;
        }
        Ok(())
    }
}
