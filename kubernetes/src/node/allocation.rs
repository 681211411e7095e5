//! Notes for the runtime what kubelet allocated to each container of this node's pods.
//!
//! The API server tells the pods, their resources and the claims of other drivers; kubelet's PodResources
//! tells the devices. Both are asked as soon as a pod is bound to the node, since its containers wait for the
//! note.

mod claims;
mod devices;
mod pod;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use gpushare_inject::{Allocations, Presence, known_node};
use gpushare_inventory::Gpu;
use gpushare_request::{Allocated, KubeletPolicy};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ListParams, WatchEvent, WatchParams};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};
use tokio_stream::StreamExt;

use super::Agent;
use super::metrics::number;
use super::podresources::Devices;
use pod::Found;
pub use pod::claims as claims_of_pod;

/// Seconds after which the API server ends a watch, and another one begins: less than it may be silent.
const WATCH: u32 = 15;
/// Time between two looks for a pod that kubelet has just got, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// The pods of the node, as far as they are known.
struct Pods {
    agent: Arc<Agent>,
    allocations: Arc<Allocations>,
    by_uid: HashMap<String, Known>,
    /// When the next look is due, if pods are to be looked at, and the pause after it.
    next: Option<(Instant, Duration)>,
}

struct Known {
    pod: Pod,
    /// What was noted; `None` before.
    noted: Option<BTreeMap<String, Allocated>>,
    /// Whether it is to be looked at.
    is_due: bool,
}

/// Notes allocations until it is dropped, where the settings ask for it.
pub async fn keep(agent: &Arc<Agent>) {
    if agent.config.request.kubelet == KubeletPolicy::Off {
        return std::future::pending().await;
    }
    let mut presence = None;
    loop {
        let error = match follow(agent, &mut presence).await {
            Ok(never) => match never {},
            Err(error) => format!("{error:#}"),
        };
        tracing::warn!(error, "cannot follow the node's pods");
        tokio::time::sleep(PAUSES.1).await;
    }
}

/// Lists the pods, and follows their changes until an error. From then on containers wait for their pod's note
/// (`presence`).
async fn follow(agent: &Arc<Agent>, presence: &mut Option<Presence>) -> Result<Infallible> {
    let allocations = Arc::new(Allocations::of(&agent.state)?);
    if presence.is_none() {
        *presence = Some(allocations.appear()?);
    }
    let api = Api::<Pod>::all(agent.api.clone());
    let mut pods = Pods { agent: Arc::clone(agent), allocations, by_uid: HashMap::new(), next: None };
    let field = format!("spec.nodeName={}", agent.options.node_name);
    let listed = api.list(&ListParams::default().fields(&field)).await;
    let listed = listed.context("the API server does not list this node's pods")?;
    let mut version = listed.metadata.resource_version.unwrap_or_default();
    listed.items.into_iter().for_each(|pod| pods.learn(pod));
    pods.forget_others()?;
    let params = WatchParams::default().fields(&field).timeout(WATCH);
    loop {
        let events = api.watch(&params, &version).await.context("the API server cannot be watched")?;
        tokio::pin!(events);
        loop {
            let due = pods.next.map(|(at, _)| at);
            let event = tokio::select! {
                event = events.next() => event,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
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
        pods.distrust_devices();
    }
}

impl Pods {
    fn learn(&mut self, pod: Pod) {
        let Some(uid) = pod::uid(&pod) else { return };
        let known = self.by_uid.remove(&uid);
        let is_same = known.as_ref().is_some_and(|known| pod::is_same(&known.pod, &pod) && !known.is_due);
        let noted = match known {
            Some(known) => known.noted,
            // By an agent before this one; it stays until it is looked at.
            None => self.allocations.read(&uid).ok().flatten().map(|noted| noted.containers),
        };
        self.by_uid.insert(uid, Known { pod, noted, is_due: !is_same });
        if !is_same {
            self.next = Some((Instant::now(), PAUSES.0));
        }
    }

    fn forget(&mut self, pod: &Pod) -> Result<()> {
        let Some(uid) = pod::uid(pod) else { return Ok(()) };
        self.by_uid.remove(&uid);
        Ok(self.allocations.forget(&uid)?)
    }

    /// Has the pods with devices looked at again: kubelet may have moved them, as after its restart.
    fn distrust_devices(&mut self) {
        for known in self.by_uid.values_mut().filter(|known| pod::has_devices(&known.pod)) {
            known.is_due = true;
            self.next = Some((Instant::now(), PAUSES.0));
        }
    }

    /// Removes what is noted of pods that are gone.
    fn forget_others(&self) -> Result<()> {
        for uid in self.allocations.pods()? {
            if !self.by_uid.contains_key(&uid) {
                self.allocations.forget(&uid)?;
            }
        }
        Ok(())
    }

    /// Looks at the pods that are due, and notes what has changed.
    async fn look(&mut self) -> Result<()> {
        let pause = self.next.take().map_or(PAUSES.0, |(_, pause)| pause);
        let due = self.by_uid.values().filter(|known| known.is_due).map(|known| &known.pod);
        let facts = Facts::of(&self.agent, due).await;
        let mut waiting = BTreeSet::new();
        for (uid, known) in self.by_uid.iter_mut().filter(|(_, known)| known.is_due) {
            let name = pod::name(&known.pod);
            match facts.found(&known.pod) {
                Found::NotYet(why) => drop(waiting.insert((name, why))),
                Found::All(containers) => {
                    known.is_due = false;
                    if known.noted.as_ref() != Some(&containers) {
                        let gpus = containers.values().map(|its| its.0.len()).sum::<usize>();
                        tracing::info!(pod = name, uid, gpus, "noted what kubelet allocated");
                        let (allocations, uid) = (Arc::clone(&self.allocations), uid.clone());
                        known.noted = Some(containers.clone());
                        spawn_blocking(move || allocations.write(&uid, name, containers)).await??;
                    }
                }
            }
        }
        let noted = self.by_uid.values().filter(|known| known.noted.is_some()).count();
        self.agent.metrics.noted.set(number(noted));
        self.agent.metrics.waiting.set(number(waiting.len()));
        if let Some((pod, why)) = waiting.first() {
            let longest = PAUSES.1;
            if pause >= longest {
                tracing::warn!(pod, why, count = waiting.len(), "it is not known what kubelet allocated");
            }
            self.next = Some((Instant::now() + pause, (pause * 2).min(longest)));
        }
        Ok(())
    }
}

/// All that says what was allocated, besides the pods.
struct Facts {
    gpus: Result<Vec<Gpu>, String>,
    /// Asked only if a pod has resources of a device plugin.
    devices: Result<Devices, String>,
    claims: claims::Claims,
}

impl Facts {
    async fn of(agent: &Arc<Agent>, pods: impl Iterator<Item = &Pod> + Clone) -> Self {
        let line = |error: anyhow::Error| format!("{error:#}");
        let reading = Arc::clone(agent);
        let gpus =
            spawn_blocking(move || Ok(known_node(&reading.state, &reading.settings())?.gpus) as Result<_>);
        let gpus = gpus.await.map_err(anyhow::Error::from).and_then(|gpus| gpus).map_err(line);
        let devices = match pods.clone().any(pod::has_devices) {
            true => Devices::asked(&agent.options.kubelet_dir).await.map_err(line),
            false => Ok(Devices::default()),
        };
        let claims = claims::Claims::of(agent, pods).await;
        Self { gpus, devices, claims }
    }

    fn found(&self, pod: &Pod) -> Found {
        match &self.gpus {
            Ok(gpus) => pod::found(pod, self.devices.as_ref(), &self.claims, gpus),
            // A node without a GPU has nothing to allocate.
            Err(why) => Found::NotYet(why.clone()),
        }
    }
}
