//! Answers kube-scheduler's calls.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use http::{Method, StatusCode};
use hyper::body::Bytes;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::messages::{
    Arguments, Binding, Bound, Filtered, MetaPod, MetaVictims, NodeList, Preempted, Preemption, Priority,
};
use super::state::{Tracked, Unfit, Wanted};
use super::{Extender, PAUSE, Ready, words};
use crate::serve::Answer;

/// The highest score of an extender (kube-scheduler, extender/v1, MaxExtenderPriority).
const BEST: i64 = 10;
/// How long the API server may take to bind a pod.
const BINDING: Duration = Duration::from_secs(5);
/// How long after a binding the watch may take to tell of it.
const TOLD: Duration = Duration::from_secs(10);

/// Answers one call.
pub async fn answer(extender: Arc<Extender>, method: Method, path: String, body: Bytes) -> Answer {
    let get = method == Method::GET;
    match path.trim_end_matches('/').rsplit('/').next().unwrap_or_default() {
        "healthz" | "livez" if get => Answer::text(StatusCode::OK, "ok\n"),
        "readyz" if get => match extender.ready_to_lead().await {
            Ready::Yes => Answer::text(StatusCode::OK, "ok\n"),
            Ready::No(why) => Answer::text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
        },
        "metrics" if get => extender.metrics.answer(),
        "filter" if method == Method::POST => {
            extender.when_ready(body, |extender, asked| filter(&extender, asked)).await
        }
        "prioritize" if method == Method::POST => {
            extender.when_ready(body, |extender, asked| prioritize(&extender, asked)).await
        }
        "preempt" if method == Method::POST => {
            extender.when_ready(body, |extender, asked| preempt(&extender, &asked)).await
        }
        "bind" if method == Method::POST => bind_call(extender, body).await,
        _ => Answer::text(
            StatusCode::NOT_FOUND,
            "there are POST filter, prioritize, preempt and bind, and GET healthz, readyz and metrics\n",
        ),
    }
}

impl Extender {
    /// Answers a call that changes nothing: 503 where this extender does not decide now. kube-scheduler then
    /// fails the pod's try, or goes on without the extender where it is told to (`ignorable`).
    async fn when_ready<Q: DeserializeOwned, A: Serialize>(
        self: Arc<Self>,
        body: Bytes,
        decide: impl FnOnce(Arc<Self>, Q) -> A,
    ) -> Answer {
        let asked: Q = match serde_json::from_slice(&body) {
            Ok(asked) => asked,
            Err(error) => {
                return Answer::text(
                    StatusCode::BAD_REQUEST,
                    format!("no call of a kube-scheduler: {error}\n"),
                );
            }
        };
        match self.ready().await {
            Ready::No(why) => Answer::text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
            Ready::Yes => {
                let timer = self.metrics.started();
                let answer = Answer::json(StatusCode::OK, &decide(Arc::clone(&self), asked));
                self.metrics.decided(timer);
                answer
            }
        }
    }
}

/// Which nodes a pod gets on.
fn filter(extender: &Extender, asked: Arguments) -> Filtered {
    let wanted = Wanted::of(&asked.pod);
    if wanted.asking.is_empty() {
        let all = vec![true; asked.names().len()];
        return kept(asked, &all, BTreeMap::new(), BTreeMap::new());
    }
    let uid = asked.pod.metadata.uid.clone().unwrap_or_default();
    let mut state = extender.state();
    if let Some(node) = state.pod(&uid).filter(|pod| pod.is_assumed).and_then(|pod| pod.node.clone()) {
        let error = format!("whether the pod is bound to {node} is not known yet");
        return Filtered { error, ..Filtered::default() };
    }
    let names = asked.names();
    let mut decided = state.worths(&wanted, &names);
    let namespace = asked.pod.metadata.namespace.as_deref().unwrap_or_default();
    let refusals = extender.over_quota(&state, namespace, &uid, &wanted, &names);
    drop(state);
    for (decided, refusal) in decided.iter_mut().zip(refusals) {
        if let (Ok(_), Some(why)) = (&decided, refusal) {
            *decided = Err(Unfit { why, is_full: false });
        }
    }
    let stays: Vec<bool> = decided.iter().map(Result::is_ok).collect();
    let (mut full, mut never) = (BTreeMap::new(), BTreeMap::new());
    for (name, decided) in names.iter().zip(decided) {
        if let Err(Unfit { why, is_full }) = decided {
            let of = if is_full { &mut full } else { &mut never };
            of.insert((*name).to_owned(), why);
        }
    }
    kept(asked, &stays, full, never)
}

/// The answer in the form in which the nodes came, of which those stay that `stays` says.
fn kept(
    asked: Arguments,
    stays: &[bool],
    failed_nodes: BTreeMap<String, String>,
    failed_and_unresolvable_nodes: BTreeMap<String, String>,
) -> Filtered {
    fn those<T>(all: Vec<T>, stays: &[bool]) -> Vec<T> {
        all.into_iter().zip(stays).filter(|(_, stays)| **stays).map(|(one, _)| one).collect()
    }
    let node_names = asked.node_names.map(|names| those(names, stays));
    let nodes = asked.nodes.filter(|_| node_names.is_none());
    let nodes = nodes.map(|NodeList { items, rest }| NodeList { items: those(items, stays), rest });
    Filtered { nodes, node_names, failed_nodes, failed_and_unresolvable_nodes, error: String::new() }
}

/// What the nodes are worth: the best one 10, others in proportion and less.
fn prioritize(extender: &Extender, asked: Arguments) -> Vec<Priority> {
    let wanted = Wanted::of(&asked.pod);
    let names = asked.names();
    let worths: Vec<Option<f64>> = match wanted.asking.is_empty() {
        true => vec![None; names.len()],
        false => extender.state().worths(&wanted, &names).into_iter().map(Result::ok).collect(),
    };
    let scores = scores(&worths);
    names.iter().zip(scores).map(|(name, score)| Priority { host: (*name).to_owned(), score }).collect()
}

/// Whole numbers of 0 to 10. The first of the best nodes alone gets 10, so that equals are filled one after
/// the other.
pub fn scores(worths: &[Option<f64>]) -> Vec<i64> {
    let known = || worths.iter().flatten().copied();
    let (least, most) = (known().fold(f64::INFINITY, f64::min), known().fold(f64::NEG_INFINITY, f64::max));
    let best = worths.iter().position(|worth| *worth == Some(most));
    let score = |worth: f64| {
        let part = if most > least { (worth - least) / (most - least) } else { 1.0 };
        // 0 to 9 for all but the best.
        (0..BEST).rev().find(|step| part * 9.0 >= f64::from(i32::try_from(*step).unwrap_or(0))).unwrap_or(0)
    };
    let of = |(at, worth): (usize, &Option<f64>)| match worth {
        Some(_) if Some(at) == best => BEST,
        Some(worth) => score(*worth),
        None => 0,
    };
    worths.iter().enumerate().map(of).collect()
}

/// Which pods have to end on each node for the pod to get there. What kube-scheduler has chosen may leave too
/// little on every single GPU: then less important pods of the node are added.
fn preempt(extender: &Extender, asked: &Preemption) -> Preempted {
    let wanted = Wanted::of(&asked.pod);
    let priority = asked.pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    let mut state = extender.state();
    let mut kept = BTreeMap::new();
    for (node, victims) in asked.victims() {
        let mut gone: BTreeSet<String> = victims.pods.iter().flatten().map(|pod| pod.uid.clone()).collect();
        let mut fits = wanted.asking.is_empty() || state.place(&wanted, &node, &gone).is_ok();
        if !fits {
            let chosen = gone.clone();
            for (_, uid) in state.below(&node, priority) {
                gone.insert(uid);
                fits = state.place(&wanted, &node, &gone).is_ok();
                if fits {
                    break;
                }
            }
            // Those that were added and do not matter stay, the more important ones first.
            if fits {
                for (_, uid) in state.below(&node, priority).into_iter().rev() {
                    if !chosen.contains(&uid)
                        && gone.remove(&uid)
                        && state.place(&wanted, &node, &gone).is_err()
                    {
                        gone.insert(uid);
                    }
                }
            }
        }
        if fits {
            // kube-scheduler takes the first for the most important one.
            let given = victims.pods.iter().flatten().map(|pod| pod.uid.clone());
            let added: Vec<String> =
                gone.into_iter().filter(|uid| !given.clone().any(|its| its == *uid)).collect();
            let mut all: Vec<String> = given.chain(added).collect();
            all.sort_by_key(|uid| Reverse(state.pod(uid).map_or(0, |pod| pod.priority)));
            let pods = all.into_iter().map(|uid| MetaPod { uid }).collect();
            kept.insert(node, MetaVictims { pods: Some(pods), ..victims });
        }
    }
    Preempted { node_name_to_meta_victims: kept }
}

async fn bind_call(extender: Arc<Extender>, body: Bytes) -> Answer {
    let asked: Binding = match serde_json::from_slice(&body) {
        Ok(asked) => asked,
        Err(error) => {
            return Answer::text(StatusCode::BAD_REQUEST, format!("no call of a kube-scheduler: {error}\n"));
        }
    };
    let epoch = extender.election.epoch();
    let bound = match extender.ready().await {
        Ready::No(why) => Err(anyhow::anyhow!(why)),
        // A caller that gives up must not leave a binding half noted.
        Ready::Yes => tokio::spawn(bind(Arc::clone(&extender), asked, epoch))
            .await
            .unwrap_or_else(|error| Err(error.into())),
    };
    extender.metrics.bound(bound.is_ok());
    let error = bound.err().map(|error| format!("{error:#}")).unwrap_or_default();
    Answer::json(StatusCode::OK, &Bound { error })
}

/// Chooses GPUs of the node, and has the API server bind the pod with their names in one call, where no other
/// extender may have decided since `epoch`.
async fn bind(extender: Arc<Extender>, asked: Binding, epoch: u64) -> Result<()> {
    let _binding = Arc::clone(&extender.bindings).read_owned().await;
    let Binding { pod_name, pod_namespace, pod_uid, node } = asked;
    let api = Api::<Pod>::namespaced(extender.api.clone(), &pod_namespace);
    let pod = timeout(BINDING, api.get(&pod_name)).await.context("the API server does not answer")??;
    if pod.metadata.uid.as_deref() != Some(&*pod_uid) {
        anyhow::bail!("pod {pod_namespace}/{pod_name} is another one by now");
    }
    let has_ended = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(has_ended, Some("Succeeded" | "Failed")) {
        anyhow::bail!("pod {pod_namespace}/{pod_name} has ended");
    }
    let wanted = Wanted::of(&pod);
    let (annotations, placement) = {
        let mut state = extender.state();
        // What was known when this extender was ready may not be all any more.
        if extender.election.epoch() != epoch {
            anyhow::bail!("another extender may have decided meanwhile");
        }
        if let Ready::No(why) = extender.knows_all() {
            anyhow::bail!(why);
        }
        if state.pod(&pod_uid).is_some_and(|known| known.is_assumed) {
            anyhow::bail!("it is being bound already");
        }
        let told = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
        let known = state.pod(&pod_uid).and_then(|known| known.node.as_ref());
        // That it is there the watch tells, and also when it is gone.
        if let Some(other) = told.filter(|name| !name.is_empty()).or(known) {
            anyhow::bail!("it is bound to {other} already");
        }
        if wanted.asking.is_empty() {
            (BTreeMap::new(), None)
        } else {
            if let Some(why) =
                extender.over_quota(&state, &pod_namespace, &pod_uid, &wanted, &[&node]).pop().flatten()
            {
                anyhow::bail!(why);
            }
            let placed = state.place(&wanted, &node, &BTreeSet::new());
            let placement =
                placed.map_err(|unfit| anyhow::anyhow!("{} (they were when it was chosen)", unfit.why))?;
            let gpus = state.gpus(&node).cloned().unwrap_or_default();
            let spec = pod.spec.iter();
            let containers: Vec<String> =
                spec.flat_map(|spec| &spec.containers).map(|container| container.name.clone()).collect();
            state.assume(&pod, &node, placement.clone());
            let now = Timestamp::now();
            let annotations = words::annotations(&wanted.asking, &containers, &placement, &node, &gpus, now);
            (annotations, Some(placement))
        }
    };
    let body = json!({
        "apiVersion": "v1", "kind": "Binding",
        "metadata": {"name": pod_name, "namespace": pod_namespace, "uid": pod_uid, "annotations": annotations},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    });
    let Some(left) = extender.election.left() else {
        extender.state().disclaim(&pod_uid);
        anyhow::bail!("another extender decides by now");
    };
    let limit = BINDING.min(left);
    let path = format!(
        "/api/v1/namespaces/{pod_namespace}/pods/{pod_name}/binding?timeout={}s",
        limit.as_secs().max(1)
    );
    let request = http::Request::post(path)
        .header("Content-Type", "application/json")
        .body(body.to_string().into_bytes())?;
    let done = timeout(limit, extender.api.request::<serde_json::Value>(request)).await;
    match done {
        Ok(Ok(_)) => {
            tracing::info!(pod = format!("{pod_namespace}/{pod_name}"), node, "bound");
            tokio::spawn(settle(extender, pod_namespace, pod_name, pod_uid, TOLD));
            Ok(())
        }
        // The client may have tried before, and the API server have bound it then.
        Ok(Err(kube::Error::Api(status))) if (400..500).contains(&status.code) && status.code != 408 => {
            match settled(&extender, &api, &pod_name, &pod_uid).await {
                Ok(Some(known)) if known.node.as_ref() == Some(&node) && known.placement == placement => {
                    Ok(())
                }
                Ok(_) => Err(anyhow::anyhow!("the API server does not bind it: {}", status.message)),
                Err(error) => {
                    tokio::spawn(settle(extender, pod_namespace, pod_name, pod_uid, PAUSE));
                    Err(error.context(status.message.clone()))
                }
            }
        }
        // It may have been bound, or be bound until the call has run out at the API server.
        undone => {
            let why = match undone {
                Ok(Err(error)) => error.to_string(),
                _ => "the API server did not answer in time".to_owned(),
            };
            tokio::spawn(settle(extender, pod_namespace, pod_name, pod_uid, BINDING + PAUSE));
            Err(anyhow::anyhow!("{why}; it is asked again whether the pod is bound"))
        }
    }
}

/// Has an assumed pod be what the API server says that it is, where the watch has not told after this time.
async fn settle(extender: Arc<Extender>, namespace: String, name: String, uid: String, after: Duration) {
    let api = Api::<Pod>::namespaced(extender.api.clone(), &namespace);
    sleep(after).await;
    while extender.state().pod(&uid).is_some_and(|pod| pod.is_assumed) {
        if settled(&extender, &api, &name, &uid).await.is_ok() {
            return;
        }
        sleep(PAUSE).await;
    }
}

/// Has an assumed pod be what the API server says that it is now; `None` where there is no such pod.
async fn settled(extender: &Extender, api: &Api<Pod>, name: &str, uid: &str) -> Result<Option<Tracked>> {
    let told = timeout(BINDING, api.get_opt(name)).await.context("the API server does not answer")??;
    let mut state = extender.state();
    // The watch may have told more since: that the pod is bound, or gone.
    if !state.pod(uid).is_some_and(|pod| pod.is_assumed) {
        return Ok(state.pod(uid).cloned());
    }
    match told.filter(|pod| pod.metadata.uid.as_deref() == Some(uid)) {
        Some(pod) if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) => state.learn_pod(&pod),
        Some(_) => state.disclaim(uid),
        None => state.forget_pod(uid),
    }
    Ok(state.pod(uid).cloned())
}
