//! Serves GPUs to kubelet as countable resources, by its device plugin API (pkg/apis/deviceplugin/v1beta1,
//! api.proto), for clusters and pods that know no resource claims.
//!
//! Each resource has a socket of its own. What is allocated reaches the runtime as annotations of the
//! container, which no pod can write. A node gives its GPUs in one way: where resources are served, its slice
//! is empty.

mod allocated;
mod messages;
pub mod offer;
pub mod placements;
mod service;

use std::collections::BTreeSet;
use std::future::Future;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use gpushare_rpc as rpc;
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

use super::Agent;
use super::podresources::Devices;
use crate::resource::{Counted, Resource};
use messages::{Empty, Options, Register};
use offer::Offer;
use service::{Paired, Plugin};

/// The version of the API.
const VERSION: &str = "v1beta1";
/// The time between two looks at kubelet's socket, which it makes anew when it starts. It removes all others
/// of the folder then.
const LOOK: Duration = Duration::from_secs(1);
/// After so many looks without a list that kubelet follows, the plugin registers again.
const UNFOLLOWED: u32 = 10;
/// After so many looks it is seen again whether another plugin serves the resource.
const FOREIGN: u32 = 30;
/// How long to wait after an error.
const PAUSE: Duration = Duration::from_secs(4);
/// How long kubelet may take for an answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Serves the resources that the settings name, until `end` is over.
pub async fn keep(agent: &Arc<Agent>, end: impl Future<Output = ()>) {
    let serving = async {
        match agent.resources.is_empty() {
            true => std::future::pending().await,
            false => serve_all(agent).await,
        }
    };
    tokio::select! {
        () = end => {}
        () = serving => {}
    }
}

/// Serves all of them. The plugins' tasks end with their set, which is dropped with this.
async fn serve_all(agent: &Arc<Agent>) {
    let mut told = String::new();
    let first = loop {
        match look(agent, Offer::default()).await {
            Ok(offer) => break offer,
            Err(error) => tell_once(&mut told, "no resource is served", &error),
        }
        sleep(PAUSE).await;
    };
    let (offers, offered) = watch::channel(Arc::new(first));
    let paired = Paired::default();
    let mut plugins = JoinSet::new();
    let by_kubelet = agent.resources.iter().filter(|resource| resource.counted() == Counted::ByKubelet);
    for resource in by_kubelet.cloned() {
        let plugin = Plugin::new(Arc::clone(agent), resource.clone(), offered.clone(), paired.clone());
        plugins.spawn(keep_resource(Arc::clone(agent), resource, plugin, offered.clone()));
    }
    loop {
        sleep(Duration::from_secs(agent.options.period.max(1))).await;
        let before = Offer::clone(&offers.borrow());
        match look(agent, before).await {
            Ok(offer) if offer != **offers.borrow() => drop(offers.send(Arc::new(offer))),
            Ok(_) => {}
            Err(error) => tell_once(&mut told, "the node's GPUs are offered as before", &error),
        }
    }
}

/// Logs an error that is another one than the last.
fn tell_once(told: &mut String, what: &str, error: &anyhow::Error) {
    let error = format!("{error:#}");
    if error != *told {
        tracing::error!(error, "{what}");
        *told = error;
    }
}

/// What the node has to offer now. GPUs of before that it does not show any more are unhealthy.
async fn look(agent: &Arc<Agent>, before: Offer) -> Result<Offer> {
    let agent = Arc::clone(agent);
    spawn_blocking(move || Offer::of(&agent, &before)).await?
}

/// Serves one resource, again and again.
async fn keep_resource(
    agent: Arc<Agent>,
    resource: Resource,
    plugin: Plugin,
    offered: watch::Receiver<Arc<Offer>>,
) {
    let mut told = String::new();
    loop {
        match serve(&agent, &resource, &plugin, &offered).await {
            // It was, and the next failure is a new one.
            Ok(()) => told.clear(),
            Err(error) => {
                tell_once(&mut told, &format!("resource {} is not served", resource.name), &error);
                sleep(PAUSE).await;
            }
        }
    }
}

/// Serves the resource and registers it, until kubelet starts anew.
async fn serve(
    agent: &Arc<Agent>,
    resource: &Resource,
    plugin: &Plugin,
    offered: &watch::Receiver<Arc<Offer>>,
) -> Result<()> {
    let folder = &agent.options.device_plugin_dir;
    let (kubelets, endpoint) = (folder.join("kubelet.sock"), resource.endpoint());
    let socket = folder.join(&endpoint);
    let started = inode(&kubelets)
        .await
        .with_context(|| format!("kubelet does not listen at {}", kubelets.display()))?;
    let own = offered.borrow().ids(resource);
    refuse_others(agent, resource, &own).await?;
    let (stop, stopped) = watch::channel(false);
    let calls = rpc::Services::default().with(plugin.clone());
    let until_stopped = {
        let mut stopped = stopped.clone();
        async move {
            let _ = stopped.wait_for(|stopped| *stopped).await;
        }
    };
    let serving = rpc::serve(&socket, calls, until_stopped);
    let registered = async {
        register(&kubelets, &endpoint, resource).await?;
        tracing::info!(resource = resource.name, "kubelet counts the resource");
        // kubelet empties the folder when it starts. It may also drop a plugin by itself.
        let mut unfollowed = 0;
        let mut looks = 0_u32;
        while inode(&kubelets).await == Some(started) && socket.exists() && unfollowed < UNFOLLOWED {
            sleep(LOOK).await;
            unfollowed = if plugin.is_followed() { 0 } else { unfollowed + 1 };
            looks += 1;
            if looks.is_multiple_of(FOREIGN) {
                let own = offered.borrow().ids(resource);
                refuse_others(agent, resource, &own).await?;
            }
        }
        tracing::info!(resource = resource.name, "kubelet started anew, or dropped the plugin");
        // Streams to the kubelet of before end with the server only by themselves.
        let _ = stop.send(true);
        anyhow::Ok(())
    };
    tokio::pin!(serving, registered);
    tokio::select! {
        served = &mut serving => served,
        done = &mut registered => done,
    }
}

async fn inode(path: &Path) -> Option<(u64, i64)> {
    let path: PathBuf = path.to_owned();
    let found = spawn_blocking(move || std::fs::metadata(path)).await.ok()?.ok()?;
    Some((found.ino(), found.ctime()))
}

/// Makes the plugin known to kubelet, which calls it then.
async fn register(kubelets: &Path, endpoint: &str, resource: &Resource) -> Result<()> {
    let register = Register {
        version: VERSION.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.name.clone(),
        options: Some(Options { pre_start_required: false, get_preferred_allocation_available: true }),
    };
    let calling = async {
        let mut client = rpc::client(kubelets)?;
        rpc::call::<_, Empty>(&mut client, "/v1beta1.Registration/Register", register).await
    };
    let done = timeout(ANSWER, calling).await.context("kubelet does not answer")?;
    done.map(drop).map_err(|status| anyhow::anyhow!("kubelet refuses the resource: {}", status.message()))
}

/// Refuses a resource of which kubelet has devices that are not the agent's own: another plugin serves it,
/// and the later one of two takes it from the other.
async fn refuse_others(agent: &Agent, resource: &Resource, own: &BTreeSet<String>) -> Result<()> {
    // A kubelet that has just started may not answer yet, and knows no plugin then.
    let Ok(devices) = Devices::asked(&agent.options.kubelet_dir).await else { return Ok(()) };
    let foreign = devices.allocatable(&resource.name).find(|id| !own.contains(*id) && !offer::is_id(id));
    if let Some(id) = foreign {
        bail!(
            "another device plugin serves {} (it has a device {id:?}): take that plugin off this node, or the name out of \
             kubernetes.resources in gpushare.toml",
            resource.name
        );
    }
    Ok(())
}
