//! Gives living shares the figures that pods and claims state anew by their annotations.
//!
//! A pod's containers get what they would get if they were started again with the annotations of now, by the
//! same rules, as long as that is another amount of the same GPUs. What cannot be done is told by an event,
//! and tried again until it can, or until the annotations change again.

pub mod claim;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use anyhow::{Context, Result};
use gpushare_inject::{
    LONGEST, RestateError, Settings, change_share, changes, fit, known_allocation, known_node,
    living_configuration, one_line, open_measured, own_annotations, restate,
};
use gpushare_inventory::Node;
use gpushare_quota::{Change, Lease, PodContainer, Store, words};
use gpushare_request::{Request, RequestError, read};
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::{Duration, Instant};

use super::Agent;
use super::events::{Reason, Subject};

/// gpushare's own annotations, by key.
type Own = BTreeMap<String, String>;

/// The pods' annotations, and what became of them.
pub struct Resizes {
    agent: Arc<Agent>,
    /// By the pod's UID.
    pods: HashMap<String, Own>,
    /// The annotations of each lease at which nothing was left to do, by its id.
    held: HashMap<i64, Own>,
    /// What was told last of a lease that could not be changed.
    refused: HashMap<i64, String>,
    /// When leases were looked at.
    looked: Instant,
    /// When leases are looked at next.
    due: Instant,
}

/// The time between two looks at least: annotations can be changed faster than leases are read.
const BETWEEN: Duration = Duration::from_millis(500);

/// What became of one lease.
struct Outcome {
    lease: i64,
    /// The container that was asked.
    name: PodContainer,
    result: Result<Option<String>>,
}

impl Resizes {
    /// No pod is known yet.
    pub fn of(agent: &Arc<Agent>) -> Self {
        let (pods, held, refused) = Default::default();
        let now = Instant::now();
        Self { agent: Arc::clone(agent), pods, held, refused, looked: now, due: now }
    }

    /// What a pod is now. Returns whether it was not known before.
    pub fn learn(&mut self, pod: &Pod) -> bool {
        let Some(uid) = pod.metadata.uid.clone() else { return false };
        let own = cut(own(pod.metadata.annotations.as_ref()));
        let known = self.pods.insert(uid, own.clone());
        if known.as_ref().is_some_and(|known| *known != own) {
            self.due = self.due.min(self.looked + BETWEEN);
        }
        known.is_none()
    }

    /// The pod has ended.
    pub fn forget(&mut self, pod: &Pod) {
        if let Some(uid) = &pod.metadata.uid {
            self.pods.remove(uid);
        }
    }

    /// When to look next.
    pub fn next(&self) -> Instant {
        self.due
    }

    /// Looks at all leases of pods.
    pub async fn look(&mut self) {
        self.looked = Instant::now();
        self.due = self.looked + Duration::from_secs(self.agent.options.period.max(1));
        let (agent, pods, held) = (Arc::clone(&self.agent), self.pods.clone(), self.held.clone());
        let looked = spawn_blocking(move || look(&agent, &pods, held));
        let (held, outcomes) = match looked.await.map_err(anyhow::Error::from).and_then(|looked| looked) {
            Ok(looked) => looked,
            Err(error) => {
                let error = format!("{error:#}");
                return tracing::warn!(error, "cannot see whether shares are to be changed");
            }
        };
        self.held = held;
        self.refused.retain(|lease, _| outcomes.iter().any(|outcome| outcome.lease == *lease));
        for Outcome { lease, name, result } in outcomes {
            let is_done = result.is_ok();
            let subject = Subject {
                kind: "Pod",
                api_version: "v1",
                namespace: name.namespace.clone(),
                name: name.pod.clone(),
                uid: name.uid.clone(),
            };
            let (reason, text) = match result {
                Ok(None) => continue,
                Ok(Some(text)) => (Reason::Resized, text),
                Err(error) => (Reason::NotResized, told(&error)),
            };
            let text = format!("container {}: {text}", name.container);
            if is_done {
                self.refused.remove(&lease);
            } else if self.refused.insert(lease, text.clone()).is_some_and(|before| before == text) {
                continue;
            }
            self.agent.metrics.resized(is_done);
            tracing::info!(container = %name, text, is_done, "the pod's annotations changed");
            self.agent.events.tell(subject, reason, text);
        }
    }
}

/// The first of them up to a few more bytes than [`fit`] takes, which refuses them then as it refuses all: a
/// pod may have annotations of 256 KiB.
fn cut(own: Own) -> Own {
    let mut room = LONGEST + 1;
    let mut kept = Own::new();
    for (key, value) in own {
        if room == 0 {
            break;
        }
        let value: String = value.chars().take(room).collect();
        room = room.saturating_sub(key.len() + value.len());
        kept.insert(key, value);
    }
    kept
}

/// gpushare's own annotations of all.
fn own(all: Option<&BTreeMap<String, String>>) -> Own {
    let all = all.into_iter().flatten();
    let own = all.filter(|(key, _)| key.starts_with(gpushare_request::POD_ANNOTATION));
    own.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The error in one line, for an event.
fn told(error: &anyhow::Error) -> String {
    one_line(error.as_ref())
}

/// Changes the leases whose pods' annotations changed. Returns to what each lease is held now, and what
/// became of those that were to change.
fn look(
    agent: &Agent,
    pods: &HashMap<String, Own>,
    mut held: HashMap<i64, Own>,
) -> Result<(HashMap<i64, Own>, Vec<Outcome>)> {
    let settings = agent.settings();
    let store = open_measured(&agent.state)?;
    let leases = store.leases()?;
    held.retain(|id, _| leases.iter().any(|lease| lease.id == *id));
    let mut outcomes = Vec::new();
    for lease in &leases {
        // A claim's share is what the claim says.
        let is_claims = lease.members().any(|member| member.holder.is_agent());
        let named = lease.members().find_map(|member| Some((member, member.name.clone()?)));
        let Some((member, name)) = named.filter(|_| !is_claims) else { continue };
        let Some(wanted) = pods.get(&name.uid) else { continue };
        if held.get(&lease.id) == Some(wanted) {
            continue;
        }
        let key = member.key.clone();
        let lease = lease.clone().asked_by(|other| *other == key).unwrap_or_else(|| lease.clone());
        let result = match Restated::of(&lease, wanted) {
            // The container is being created, or has just ended.
            Err(error) if error.is_absent() => continue,
            // What a hook prepared has no bundle to compare with: what is seen first is what it was started
            // with.
            Err(RestateError::NoRoot(_)) if !held.contains_key(&lease.id) => {
                held.insert(lease.id, wanted.clone());
                continue;
            }
            Err(error) => Err(error.into()),
            Ok(None) => Ok(None),
            Ok(Some(restated)) => restated.follow(agent, &settings, &store, &lease),
        };
        let is_done = result.is_ok();
        if is_done {
            held.insert(lease.id, wanted.clone());
        }
        outcomes.push(Outcome { lease: lease.id, name, result });
    }
    Ok((held, outcomes))
}

/// A container's configuration with the annotations of before, and with those of now.
struct Restated {
    before: Value,
    after: Value,
    wanted: Own,
}

impl Restated {
    /// `None` where both are the same. Before the lease was changed for the first time they are what the
    /// bundle says.
    fn of(lease: &Lease, wanted: &Own) -> Result<Option<Self>, RestateError> {
        let mut before = living_configuration(&lease.member.key)?;
        if !lease.restated.is_empty() {
            restate(&mut before, &lease.restated);
        }
        if own_annotations(&before) == *wanted {
            return Ok(None);
        }
        fit(wanted)?;
        let mut after = before.clone();
        restate(&mut after, wanted);
        Ok(Some(Self { before, after, wanted: wanted.clone() }))
    }

    /// Changes the share. Returns what it is then, in words; `None` where nothing of it was to change.
    fn follow(
        &self,
        agent: &Agent,
        settings: &Settings,
        store: &Store,
        lease: &Lease,
    ) -> Result<Option<String>> {
        let node = known_node(&agent.state, settings)?;
        let before = request(agent, &self.before, &node).context("the container's words of before")?;
        let after = request(agent, &self.after, &node)?;
        let mut changes = changes(lease, &before, &after, &node.gpus)?;
        if changes.is_empty() {
            return Ok(None);
        }
        changes.push(Change {
            restated: Some(self.wanted.clone()),
            pod_request: Some(words(&after, &node.gpus)?),
            ..Change::default()
        });
        let (_, new) = change_share(&agent.state, store, lease, &changes, &node, settings)?;
        Ok(Some(share(&new)))
    }
}

/// What a container with this configuration asks for.
fn request(agent: &Agent, configuration: &Value, node: &Node) -> Result<Request> {
    let policy = &agent.config.request;
    let container = agent.config.container(configuration);
    let allocated = known_allocation(&container, &agent.state, policy.kubelet)?;
    let container = allocated.as_ref().unwrap_or(&container);
    Ok(read(container, policy, &node.gpus)?.ok_or(RequestError::NoShare)?)
}

/// A share in words.
fn share(lease: &Lease) -> String {
    let grants = lease.grants.iter().map(|grant| {
        let cores = grant.cores.map_or_else(|| "no limit".to_owned(), |cores| cores.to_string());
        format!("{} and compute {cores} of GPU {}", grant.memory, grant.gpu)
    });
    grants.collect::<Vec<_>>().join("; ")
}
