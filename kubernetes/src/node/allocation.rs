//! Notes for the runtime what kubelet allocated to each container of this node's pods.
//!
//! The API server tells the pods, their resources and the claims of other drivers; kubelet's PodResources
//! tells the devices. Both are asked as soon as a pod is bound to the node, since its containers wait for the
//! note.

mod claims;
mod devices;
mod own;
mod pod;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use gpushare_inject::{Allocations, PodAllocation, Presence, known_node};
use gpushare_inventory::Gpu;
use k8s_openapi::api::core::v1::Pod;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

use super::Agent;
use super::metrics::number;
use super::podresources::Devices;
use claims::Claims;
pub use pod::claims as claims_of_pod;
use pod::{Found, Noted, OfNode};

/// Time between two looks at a pod that is not noted yet, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(4));
/// How long pods are looked at in one go, in turn with what else there is.
const LOOKS: Duration = Duration::from_secs(2);
/// How long the claims of one pod may take to be read: others wait meanwhile.
const LOOK: Duration = Duration::from_secs(1);

/// The pods of the node, as far as they are known.
pub struct Notes {
    agent: Arc<Agent>,
    allocations: Arc<Allocations>,
    by_uid: HashMap<String, Known>,
}

struct Known {
    pod: Pod,
    /// What was noted; `None` before.
    noted: Option<Noted>,
    /// When it is to be looked at next, and the pause after that; `None` where nothing is to be found out.
    due: Option<(Instant, Duration)>,
}

impl Notes {
    /// None yet. From now on containers wait for their pod's note (`presence`).
    ///
    /// # Errors
    /// When the folder of notes cannot be used.
    pub fn of(agent: &Arc<Agent>, presence: &mut Option<Presence>) -> Result<Self> {
        let allocations = Arc::new(Allocations::of(&agent.state)?);
        if presence.is_none() {
            *presence = Some(allocations.appear()?);
        }
        Ok(Self { agent: Arc::clone(agent), allocations, by_uid: HashMap::new() })
    }

    /// When a pod is to be looked at next.
    pub fn next(&self) -> Option<Instant> {
        self.by_uid.values().filter_map(|known| Some(known.due?.0)).min()
    }

    /// What a pod is now.
    pub fn learn(&mut self, pod: Pod) {
        let Some(uid) = pod.metadata.uid.clone() else { return };
        let pod = pod::trimmed(pod);
        let known = match self.by_uid.remove(&uid) {
            // Whoever changes anything else about a pod has it looked at no sooner.
            Some(known) if pod::is_same(&known.pod, &pod) => Known { pod, ..known },
            Some(known) => Known { pod, due: Some((Instant::now(), PAUSES.0)), ..known },
            None => {
                // By an agent before this one; it stays until it is looked at.
                let noted = self.allocations.read(&uid).ok().flatten();
                let noted = noted.map(|noted| Noted { containers: noted.containers, refused: noted.refused });
                Known { pod, noted, due: Some((Instant::now(), PAUSES.0)) }
            }
        };
        self.by_uid.insert(uid, known);
    }

    /// The pod has ended.
    ///
    /// # Errors
    /// When its note cannot be removed.
    pub fn forget(&mut self, pod: &Pod) -> Result<()> {
        let Some(uid) = pod.metadata.uid.as_deref() else { return Ok(()) };
        self.by_uid.remove(uid);
        Ok(self.allocations.forget(uid)?)
    }

    /// Has the pods with devices looked at again: kubelet may have moved them, as after its restart.
    pub fn distrust_devices(&mut self) {
        let settled = self.by_uid.values_mut().filter(|known| known.due.is_none());
        for known in settled.filter(|known| pod::has_devices(&known.pod)) {
            known.due = Some((Instant::now(), PAUSES.0));
        }
    }

    /// Removes what is noted of pods that are gone.
    ///
    /// # Errors
    /// When a note cannot be removed.
    pub fn forget_others(&self) -> Result<()> {
        for uid in self.allocations.pods()? {
            if !self.by_uid.contains_key(&uid) {
                self.allocations.forget(&uid)?;
            }
        }
        Ok(())
    }

    /// Looks at the pods that are due, and notes what has changed. Those of which the API server has said all
    /// come first.
    ///
    /// # Errors
    /// When the folder of notes cannot be used.
    pub async fn look(&mut self) -> Result<()> {
        let now = Instant::now();
        let is_due = |known: &Known| known.due.is_some_and(|(at, _)| at <= now);
        let mut due: Vec<(Duration, bool, String)> = Vec::new();
        for (uid, known) in self.by_uid.iter().filter(|(_, known)| is_due(known)) {
            let has_claims = !pod::claims(&known.pod).is_empty();
            let pause = known.due.map_or(PAUSES.0, |(_, pause)| pause);
            due.push((pause, has_claims || pod::has_devices(&known.pod), uid.clone()));
        }
        // Pods that could not be noted wait behind new ones, and none of them keeps the watch from being read.
        due.sort();
        let node = Node::of(&self.agent, self.by_uid.values().filter(|known| is_due(known))).await;
        for (.., uid) in due {
            if now.elapsed() > LOOKS {
                break;
            }
            let Some(known) = self.by_uid.get_mut(&uid) else { continue };
            let name = pod::name(&known.pod);
            let found = timeout(LOOK, node.found(&self.agent, &known.pod)).await;
            let found =
                found.unwrap_or_else(|_| Found::NotYet("its claims take too long to read".to_owned()));
            match found {
                Found::All(noted) => {
                    // What it is refused for may end with another pod, of which nobody is told.
                    let again = (Instant::now() + PAUSES.1, PAUSES.1);
                    known.due = Some(again).filter(|_| !noted.refused.is_empty());
                    if known.noted.as_ref() != Some(&noted) {
                        known.noted = Some(noted.clone());
                        if let Err(error) = self.note(uid.clone(), name.clone(), noted).await {
                            tracing::error!(pod = name, uid, error = format!("{error:#}"), "cannot note");
                            self.try_again(&uid);
                        }
                    }
                }
                Found::NotYet(why) => {
                    let pause = known.due.map_or(PAUSES.0, |(_, pause)| pause);
                    if pause >= PAUSES.1 && known.noted.is_none() {
                        tracing::warn!(pod = name, why, "it is not known what kubelet allocated");
                    }
                    known.due = Some((Instant::now() + pause, (pause * 2).min(PAUSES.1)));
                }
            }
        }
        let noted = self.by_uid.values().filter(|known| known.noted.is_some()).count();
        self.agent.metrics.noted.set(number(noted));
        self.agent.metrics.waiting.set(number(self.by_uid.len() - noted));
        Ok(())
    }

    /// Has a pod looked at again that could not be noted.
    fn try_again(&mut self, uid: &str) {
        if let Some(known) = self.by_uid.get_mut(uid) {
            (known.noted, known.due) = (None, Some((Instant::now() + PAUSES.1, PAUSES.1)));
        }
    }

    async fn note(&self, uid: String, pod: String, noted: Noted) -> Result<()> {
        let gpus = noted.containers.values().map(|its| its.0.len()).sum::<usize>();
        tracing::info!(pod, uid, gpus, "noted what kubelet allocated");
        let allocations = Arc::clone(&self.allocations);
        let Noted { containers, refused } = noted;
        let noted = PodAllocation { boot: String::new(), pod, containers, refused };
        Ok(spawn_blocking(move || allocations.write(&uid, noted)).await??)
    }
}

/// What the node and kubelet say, besides the pods.
struct Node {
    gpus: Result<Vec<Gpu>, String>,
    /// Asked only if a pod has resources of a device plugin.
    devices: Result<Devices, String>,
}

impl Node {
    async fn of(agent: &Arc<Agent>, mut pods: impl Iterator<Item = &Known>) -> Self {
        let line = |error: anyhow::Error| format!("{error:#}");
        let reading = Arc::clone(agent);
        let gpus =
            spawn_blocking(move || Ok(known_node(&reading.state, &reading.settings())?.gpus) as Result<_>);
        let gpus = gpus.await.map_err(anyhow::Error::from).and_then(|gpus| gpus).map_err(line);
        let devices = match pods.any(|known| pod::has_devices(&known.pod)) {
            true => Devices::asked(&agent.options.kubelet_dir).await.map_err(line),
            false => Ok(Devices::default()),
        };
        Self { gpus, devices }
    }

    async fn found(&self, agent: &Arc<Agent>, pod: &Pod) -> Found {
        match (&self.gpus, Claims::of(agent, pod).await) {
            (Ok(gpus), Ok(claims)) => {
                let of_node = OfNode { gpus, resources: &agent.resources, rules: &agent.config.quota };
                pod::found(pod, self.devices.as_ref(), &claims, &of_node)
            }
            // A node without a GPU has nothing to allocate.
            (Err(why), _) => Found::NotYet(why.clone()),
            (_, Err(why)) => Found::NotYet(why),
        }
    }
}
