//! Answers kubelet's calls for claims (pkg/apis/dra/v1/api.proto). Both calls may come again at any time,
//! after a restart of kubelet, of this agent or of the node; the second does what the first did.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use gpushare_inject::{forget_swept, known_node, one_line, open_measured, out_of_service};
use gpushare_quota::{Admission, ClaimName, Release};
use http::Request;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::OwnedMutexGuard;
use tokio::task::spawn_blocking;
use tonic::body::Body;

use super::allotment::Allotment;
use super::consumers::note_consumers;
use super::messages::{Claim, Claims, Device, Prepared, PreparedClaims, Unprepared, UnpreparedClaims};
use super::{Agent, cdi, claim, engine, resize};
use gpushare_rpc::{self as rpc, Answer, Calls};

/// The driver, as kubelet calls it.
#[derive(Clone)]
pub struct Driver(Arc<Agent>);

impl Driver {
    /// The driver of this agent.
    pub fn of(agent: Arc<Agent>) -> Self {
        Self(agent)
    }
}

impl Calls for Driver {
    const NAME: &'static str = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin";

    fn call(self, method: &str, request: Request<Body>) -> Answer {
        match method {
            "NodePrepareResources" => rpc::answer(request, |asked: Claims| async move {
                let mut claims = HashMap::new();
                for claim in asked.claims {
                    let since = Instant::now();
                    let done = prepare(&self.0, &claim).await;
                    self.0.metrics.prepared(done.is_ok(), since.elapsed());
                    let prepared = match done {
                        Ok(devices) => Prepared { devices, error: String::new() },
                        Err(error) => {
                            Prepared { devices: Vec::new(), error: told("prepare", &claim, &error) }
                        }
                    };
                    claims.insert(claim.uid, prepared);
                }
                Ok(PreparedClaims { claims })
            }),
            "NodeUnprepareResources" => rpc::answer(request, |asked: Claims| async move {
                let mut claims = HashMap::new();
                for claim in asked.claims {
                    let done = release(&self.0, &claim.uid).await;
                    self.0.metrics.unprepared(done.is_ok());
                    let error = done.err().map(|error| told("unprepare", &claim, &error)).unwrap_or_default();
                    claims.insert(claim.uid, Unprepared { error });
                }
                Ok(UnpreparedClaims { claims })
            }),
            _ => rpc::unknown(),
        }
    }
}

/// Logs the error, and returns it in one line: kubelet shows it in the pod's events.
fn told(what: &str, claim: &Claim, error: &anyhow::Error) -> String {
    let text = one_line(error.as_ref());
    tracing::warn!(
        namespace = claim.namespace,
        name = claim.name,
        uid = claim.uid,
        error = text,
        "cannot {what}"
    );
    text
}

/// Reserves what the scheduler placed here, and writes the claim's CDI file.
async fn prepare(agent: &Arc<Agent>, asked: &Claim) -> Result<Vec<Device>> {
    if !agent.options.assume_cdi {
        engine::check(agent).await?;
    }
    let name =
        ClaimName { uid: asked.uid.clone(), namespace: asked.namespace.clone(), name: asked.name.clone() };
    let claim = claim::find(&agent.api, &name).await?;
    let claim = claim.context("the claim is gone, or was made anew under the same name; delete the pod")?;
    let (reserving, turn) = (Arc::clone(agent), agent.turn().await);
    let (its, of_it) = (name.clone(), claim.clone());
    let devices = spawn_blocking(move || reserve(&reserving, &its, &of_it, &turn)).await??;
    note_consumers(agent, &name, &claim, None).await?;
    // The lease may be a new one, to which the annotations have not been applied.
    agent.stated.lock().await.remove(&name.uid);
    resize::claim::follow(agent, &name, &claim).await;
    Ok(devices)
}

/// The turn to change claims. Held by the work itself, not by whoever waits for it.
pub type Turn = OwnedMutexGuard<()>;

/// The part of [`prepare`] that waits for the disk.
fn reserve(agent: &Agent, name: &ClaimName, claim: &ResourceClaim, _turn: &Turn) -> Result<Vec<Device>> {
    let settings = agent.settings();
    let node = known_node(&agent.state, &settings)?;
    let strict = settings.policy.strict;
    let of_sick = |error: anyhow::Error| match node.sick.is_empty() {
        true => error,
        false => {
            let sick: Vec<String> = node.sick.iter().map(out_of_service).collect();
            anyhow!("{error:#}; {}", sick.join("; "))
        }
    };
    let allotment = Allotment::of(claim, &agent.options.node_name, &node.gpus, strict);
    let allotment = allotment.map_err(|error| of_sick(error.into()))?;
    if allotment.devices.is_empty() {
        bail!("the claim has no device of this driver on node {}", agent.options.node_name);
    }
    let store = open_measured(&agent.state)?;
    let forget = |swept: &_| forget_swept(&agent.state, swept);
    let (pods, request) = (claim::pods(claim), &allotment.request);
    // A taint tells the scheduler of a cordoned GPU: who was placed there was so before, or tolerates it.
    let rules = Admission { cordoned: BTreeSet::new(), ..settings.admission.clone() };
    let reserved = store.reserve_claim(name, pods.as_deref(), request, &node.gpus, &rules, forget);
    let (reserved, lease) = reserved.map_err(|error| of_sick(error.into()))?;
    cdi::write(agent, &reserved, &lease)?;
    Ok(allotment
        .devices
        .into_iter()
        .map(|device| device.named(&name.uid, &agent.options.node_name))
        .collect())
}

/// Gives a claim's share back, and removes its CDI file. Containers that hold the share keep it until they
/// end.
async fn release(agent: &Arc<Agent>, uid: &str) -> Result<()> {
    let (turn, agent, uid) = (agent.turn().await, Arc::clone(agent), uid.to_owned());
    agent.shareable.lock().await.retain(|name| name.uid != uid);
    spawn_blocking(move || give_back(&agent, &uid, &turn)).await?
}

/// The part of [`release`] that waits for the disk.
///
/// # Errors
/// When the store fails. The next call does what is left.
pub fn give_back(agent: &Agent, uid: &str, _turn: &Turn) -> Result<()> {
    // The file goes first: no container may be created with a token that holds nothing.
    cdi::remove(agent, uid)?;
    let store = open_measured(&agent.state)?;
    // Its containers have ended; whoever was killed before it could tell is swept now.
    store.sweep()?.iter().for_each(|swept| forget_swept(&agent.state, swept));
    if let Some(swept) = store.release_claim(uid)? {
        forget_swept(&agent.state, &swept);
        if swept.left == Release::Left {
            tracing::warn!(
                uid,
                lease = swept.lease,
                "containers hold the share of a claim that was given back (gpushare ps)"
            );
        }
    }
    Ok(())
}
