//! Tells the cluster of GPUs that are counted by resources, in a ConfigMap of this node: kubelet tells
//! numbers of resources alone, and a scheduler has to know what is free on single GPUs.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use gpushare_inventory::DeviceMemory;
use gpushare_request::{KubeletPolicy, MemoryRequest};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use super::Agent;
use super::device_plugin::offer::Offer;
use super::podresources::Devices;
use super::slice;
use crate::gpus::{LABEL, NodeGpus, Placed, ShownGpu};

/// The time between two looks at whether pods came or went.
const LOOK: Duration = Duration::from_millis(500);
/// How long after pods came or went it is looked again: kubelet's list may lag behind.
const AGAIN: Duration = Duration::from_secs(5);

/// Keeps the ConfigMap as the node is, until `end` is over.
pub async fn keep(agent: &Arc<Agent>, end: impl Future<Output = ()>) {
    tokio::select! {
        () = end => {}
        () = announce(agent) => {}
    }
}

async fn announce(agent: &Arc<Agent>) {
    let period = Duration::from_secs(agent.options.period.max(1));
    let (mut written, mut offer, mut told) = (None, Offer::default(), String::new());
    let (mut placed, mut changes, mut due) = (Placed::new(), 0, Instant::now());
    loop {
        let now = agent.placements.changes();
        if now != changes || due <= Instant::now() {
            let has_changed = now != changes;
            if !has_changed && !agent.resources.is_empty() {
                // It may have gone with a node that was made anew under its name.
                written = None;
            }
            match look(agent, &mut offer, &mut placed, &mut written).await {
                Ok(()) => told.clear(),
                Err(error) => {
                    let error = format!("{error:#}");
                    if error != told {
                        tracing::warn!(error, "schedulers are not told of this node's GPUs");
                        told = error;
                    }
                }
            }
            changes = now;
            due = Instant::now() + if has_changed { AGAIN.min(period) } else { period };
        }
        sleep(LOOK).await;
    }
}

/// Writes what has changed since `written`.
async fn look(
    agent: &Arc<Agent>,
    offer: &mut Offer,
    placed: &mut Placed,
    written: &mut Option<NodeGpus>,
) -> Result<()> {
    let api = Api::<ConfigMap>::namespaced(agent.api.clone(), &agent.options.namespace);
    let name = NodeGpus::name_of(&agent.options.node_name);
    if agent.resources.is_empty() {
        // From a time before the settings were others.
        if written.is_none() {
            match api.delete(&name, &DeleteParams::default()).await {
                Ok(_) => {}
                // A cluster in which nothing is counted by resources needs no right to this.
                Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => {}
                Err(error) => return Err(error).context("cannot delete the ConfigMap of before"),
            }
            *written = Some(NodeGpus::default());
        }
        return Ok(());
    }
    let (reading, before) = (Arc::clone(agent), offer.clone());
    let (seen, mut shown) = spawn_blocking(move || {
        let offer = Offer::of(&reading, &before)?;
        let shown = shown(&reading, &offer)?;
        anyhow::Ok((offer, shown))
    })
    .await??;
    *offer = seen;
    let devices = Devices::asked(&agent.options.kubelet_dir).await;
    // Without kubelet's word what it said last stays.
    shown.placed = match devices {
        Ok(devices) => agent.placements.moved(&devices, offer, &agent.resources),
        Err(_) => placed.clone(),
    };
    placed.clone_from(&shown.placed);
    if written.as_ref() == Some(&shown) {
        return Ok(());
    }
    write(agent, &api, &name, shown.data()?).await?;
    *written = Some(shown);
    Ok(())
}

async fn write(
    agent: &Agent,
    api: &Api<ConfigMap>,
    name: &str,
    data: BTreeMap<String, String>,
) -> Result<()> {
    if name.len() > 253 {
        bail!("the node's name is too long for a ConfigMap of its own ({name})");
    }
    let labels = BTreeMap::from([(LABEL.to_owned(), "true".to_owned())]);
    let owner = slice::owner(agent).await.context("cannot read the cluster's node")?;
    match api.get_opt(name).await {
        Ok(Some(known)) => {
            let owners = known.metadata.owner_references.unwrap_or_default();
            if known.data.as_ref() == Some(&data) && owners == [owner.clone()] {
                return Ok(());
            }
            let change = json!({"metadata": {"labels": labels, "ownerReferences": [owner]}, "data": data});
            let patched = api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await;
            return patched.map(drop).with_context(|| format!("cannot write the ConfigMap {name}"));
        }
        Ok(None) => {}
        Err(error) => return Err(error).with_context(|| format!("cannot read the ConfigMap {name}")),
    }
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some(labels),
        owner_references: Some(vec![owner]),
        ..ObjectMeta::default()
    };
    let map = ConfigMap { metadata, data: Some(data), ..ConfigMap::default() };
    let made = api.create(&PostParams::default(), &map).await;
    made.map(drop).with_context(|| format!("cannot make the ConfigMap {name}"))
}

/// The node's GPUs. One that is lost is still told, as one that gives nothing.
fn shown(agent: &Agent, offer: &Offer) -> Result<NodeGpus> {
    let node = gpushare_inject::known_node(&agent.state, &agent.settings());
    let node = node.ok();
    let policy = &agent.config.request;
    let gpus = offer.gpus().map(|(uuid, gpu)| {
        let known = node.iter().flat_map(|node| &node.gpus).find(|known| known.uuid == uuid);
        ShownGpu {
            uuid: uuid.to_string(),
            index: gpu.index,
            minor: known.map_or(gpu.index, |known| known.minor),
            model: known.map(|known| known.model.clone()).unwrap_or_default(),
            memory: gpu.memory.bytes(),
            per_share: gpu.per_share.bytes(),
            default_memory: default_memory(policy.default_memory, gpu.per_share),
            cores: gpu.percent,
            nvlink_group: known.map(|known| known.place.nvlink_group.clone()).unwrap_or_default(),
            is_open: gpu.is_open,
        }
    });
    let mut gpus: Vec<ShownGpu> = gpus.collect();
    gpus.sort_by_key(|gpu| gpu.index);
    let default_cores = policy.default_cores.map_or(0, |cores| u16::from(cores.percent()));
    let resources = agent.resources.clone();
    let gives_split = policy.kubelet == KubeletPolicy::Refuse;
    Ok(NodeGpus { gpus, resources, default_cores, gives_split, placed: BTreeMap::new() })
}

/// What a container gets that names no memory: without a setting all that is left, which is counted as all.
fn default_memory(default: Option<MemoryRequest>, per_share: DeviceMemory) -> u64 {
    match default {
        Some(MemoryRequest::Bytes(memory)) => memory.bytes(),
        Some(MemoryRequest::Percent(percent)) => {
            let bytes = u128::from(per_share.bytes()) * u128::from(percent) / 100;
            u64::try_from(bytes).unwrap_or(u64::MAX) >> 20 << 20
        }
        Some(MemoryRequest::Rest) | None => per_share.bytes(),
    }
}
