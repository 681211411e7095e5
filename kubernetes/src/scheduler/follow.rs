//! Follows nodes, their agents' ConfigMaps and pods: lists them, and learns every change.

use std::collections::HashSet;
use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::serde::de::DeserializeOwned;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource};
use tokio_stream::StreamExt;

use super::Extender;
use super::state::Uid;
use crate::gpus::{LABEL, NodeGpus};

/// Objects that the extender follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nodes of the cluster.
    Nodes,
    /// What agents tell of their nodes.
    Gpus,
    /// Pods of all namespaces.
    Pods,
    /// What namespaces may have.
    Quota,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Nodes, Self::Gpus, Self::Pods, Self::Quota];
}

/// One change of an object.
enum Change<K> {
    /// It is so.
    Is(K),
    /// It is gone.
    Gone(K),
    /// All of them are listed now: those that were not are gone.
    Listed,
}

/// Follows objects of one kind, until they have to be listed anew: forever, but for errors, which are told.
pub async fn follow(extender: &Arc<Extender>, kind: Kind) {
    loop {
        let followed = match kind {
            Kind::Nodes => nodes(extender).await,
            Kind::Gpus => gpus(extender).await,
            Kind::Pods => pods(extender).await,
            Kind::Quota => quota(extender).await,
        };
        let Err(error) = followed;
        tracing::info!(?kind, why = format!("{error:#}"), "listed anew");
    }
}

async fn nodes(extender: &Arc<Extender>) -> Result<Infallible> {
    let api = Api::<Node>::all(extender.api.clone());
    let mut listed: Option<HashSet<String>> = Some(HashSet::new());
    each(api, watching(), |change| match change {
        Change::Is(node) => {
            extender.state().learn_node(&node);
            if let (Some(listed), Some(name)) = (&mut listed, node.metadata.name) {
                listed.insert(name);
            }
        }
        // Its pods go by themselves; until then they hold what they held.
        Change::Gone(node) => extender.state().forget_node(&node.metadata.name.unwrap_or_default()),
        Change::Listed => {
            if let Some(listed) = listed.take() {
                let mut state = extender.state();
                let gone = state.nodes_there().filter(|name| !listed.contains(*name)).map(str::to_owned);
                gone.collect::<Vec<_>>().iter().for_each(|name| state.forget_node(name));
            }
            extender.listed(Kind::Nodes);
        }
    })
    .await
}

async fn gpus(extender: &Arc<Extender>) -> Result<Infallible> {
    let api = Api::<ConfigMap>::namespaced(extender.api.clone(), &extender.options.namespace);
    let mut listed: Option<HashSet<String>> = Some(HashSet::new());
    each(api, watching().labels(LABEL), |change| match change {
        Change::Is(map) => {
            let name = map.metadata.name.clone().unwrap_or_default();
            if let Err(error) = extender.state().learn_gpus(&map) {
                tracing::error!(name = name.clone(), %error, "the ConfigMap is none of an agent of this version");
            }
            if let Some(listed) = &mut listed {
                listed.insert(name);
            }
        }
        Change::Gone(map) => extender.state().forget_gpus(&map.metadata.name.unwrap_or_default()),
        Change::Listed => {
            if let Some(listed) = listed.take() {
                let known: Vec<String> = extender.state().nodes_with_gpus().map(NodeGpus::name_of).collect();
                for name in known.iter().filter(|name| !listed.contains(*name)) {
                    extender.state().forget_gpus(name);
                }
            }
            extender.listed(Kind::Gpus);
        }
    })
    .await
}

/// Follows pods until another extender may have bound some.
async fn pods(extender: &Arc<Extender>) -> Result<Infallible> {
    let epoch = extender.election.epoch();
    let api = Api::<Pod>::all(extender.api.clone());
    // Those that were told before the list began: one that is bound meanwhile is not in it.
    let before: HashSet<Uid> = extender.state().told_pods().cloned().collect();
    let mut listed: Option<HashSet<Uid>> = Some(HashSet::new());
    let following = each(api, watching(), |change| match change {
        Change::Is(pod) => {
            extender.state().learn_pod(&pod);
            if let (Some(listed), Some(uid)) = (&mut listed, pod.metadata.uid) {
                listed.insert(uid);
            }
        }
        Change::Gone(pod) => extender.state().forget_pod(&pod.metadata.uid.unwrap_or_default()),
        Change::Listed => {
            if let Some(listed) = listed.take() {
                let mut state = extender.state();
                before.difference(&listed).for_each(|uid| state.forget_pod(uid));
            }
            extender.listed_in(Kind::Pods, epoch);
        }
    });
    tokio::select! {
        never = following => never,
        () = extender.election.next_epoch(epoch) => bail!("another extender may have bound some"),
    }
}

async fn quota(extender: &Arc<Extender>) -> Result<Infallible> {
    let Some((namespace, name)) = extender.options.quota() else {
        extender.listed(Kind::Quota);
        return std::future::pending().await;
    };
    let api = Api::<ConfigMap>::namespaced(extender.api.clone(), namespace);
    let fields = format!("metadata.name={name}");
    let mut is_there = false;
    each(api, watching().fields(&fields), |change| match change {
        Change::Is(map) => {
            is_there = true;
            extender.learn_quota(Some(&map));
        }
        Change::Gone(_) => extender.learn_quota(None),
        Change::Listed => {
            if !is_there {
                extender.learn_quota(None);
            }
            extender.listed(Kind::Quota);
        }
    })
    .await
}

/// A watch that the API server ends and begins anew before the client takes it for dead.
fn watching() -> watcher::Config {
    watcher::Config::default().timeout(15)
}

/// Has `learn` hear of every object, and of every change. Ends with an error after which all are to be listed
/// anew.
async fn each<K>(api: Api<K>, config: watcher::Config, mut learn: impl FnMut(Change<K>)) -> Result<Infallible>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let events = watcher(api, config);
    tokio::pin!(events);
    let mut has_begun = false;
    loop {
        let event = events.next().await.context("the watch ended")?;
        match event {
            // A second list may lack what was deleted unheard, and what a first one that broke off had.
            Ok(Event::Init) if has_begun => bail!("it was interrupted"),
            Ok(Event::Init) => has_begun = true,
            Ok(Event::InitApply(object) | Event::Apply(object)) => learn(Change::Is(object)),
            Ok(Event::InitDone) => learn(Change::Listed),
            Ok(Event::Delete(object)) => learn(Change::Gone(object)),
            Err(error) => {
                tracing::warn!(error = error.to_string(), "the API server cannot be watched");
                tokio::time::sleep(super::PAUSE).await;
            }
        }
    }
}
