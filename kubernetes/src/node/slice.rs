//! Shows this node's GPUs to the cluster's scheduler, as devices whose memory and compute it hands out in
//! parts.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use gpushare_inject::{GrantError, known_node};
use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid, Node, NodeError};
use gpushare_quota::Admission;
use gpushare_request::{MemoryRequest, Policy};
use k8s_openapi::api::core::v1::Node as ClusterNode;
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, ResourcePool,
    ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use tokio::task::spawn_blocking;

use super::metrics::number;
use super::{Agent, DRIVER};

/// The capacity of device memory.
pub const MEMORY: &str = "memory";
/// The capacity of compute, in percent of the GPU.
pub const CORES: &str = "cores";
/// The attribute by which drivers of other devices name a PCI address too, so that a claim can match on it
/// (k8s.io/dynamic-resource-allocation, deviceattribute).
const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
/// The step of memory, in bytes.
const MIB: u64 = 1 << 20;
/// The share of a GPU's memory that a request without an amount gets where the settings name none, as
/// `1 / DEFAULT_PART`.
const DEFAULT_PART: u64 = 4;

/// The name of a GPU's device in the node's pool: a DNS label.
pub fn device_name(gpu: GpuUuid) -> String {
    gpu.to_string().to_lowercase()
}

/// What was last written to the API server, and what it made of it. A server that does not know consumable
/// capacity drops those fields.
pub struct Published {
    sent: Vec<Device>,
    stored: Vec<Device>,
}

/// Writes the node's slice if the API server has another one. The scheduler counts no slice of an older
/// generation than the newest that it sees. A node that has no GPU any more shows none.
///
/// # Errors
/// When the node cannot be read, or the API server refuses.
pub async fn publish(agent: &Arc<Agent>) -> Result<()> {
    let read = Arc::clone(agent);
    let sent = spawn_blocking(move || devices_of(&read)).await??;
    agent.metrics.gpus.set(number(sent.len()));
    let node = &agent.options.node_name;
    let api = Api::<ResourceSlice>::all(agent.api.clone());
    let name = format!("{node}-{DRIVER}");
    let known = api.get_opt(&name).await.context("cannot read the ResourceSlice")?;
    let mut published = agent.published.lock().await;
    let last = published.as_ref().filter(|last| last.sent == sent).map_or(&sent, |last| &last.stored);
    let written = match known {
        Some(known) if known.spec.devices.as_ref().unwrap_or(&Vec::new()) == last => return Ok(()),
        Some(known) => {
            let generation = known.spec.pool.generation + 1;
            let slice =
                ResourceSlice { metadata: known.metadata, spec: spec(node, generation, sent.clone()) };
            api.replace(&name, &PostParams::default(), &slice)
                .await
                .context("cannot write the ResourceSlice")?
        }
        None => {
            let owner = owner(agent).await.context("cannot read the cluster's node")?;
            let metadata =
                ObjectMeta { name: Some(name), owner_references: Some(vec![owner]), ..ObjectMeta::default() };
            let slice = ResourceSlice { metadata, spec: spec(node, 0, sent.clone()) };
            api.create(&PostParams::default(), &slice).await.context("cannot make the ResourceSlice")?
        }
    };
    let stored = written.spec.devices.unwrap_or_default();
    match stored.iter().all(|device| device.allow_multiple_allocations == Some(true)) {
        true => tracing::info!(gpus = sent.len(), "the node's GPUs are shown to the scheduler"),
        false => tracing::error!(
            "the API server drops what a share of a GPU is: turn on the feature DRAConsumableCapacity of API server, \
             scheduler and kubelet (on by default from Kubernetes 1.36)"
        ),
    }
    *published = Some(Published { sent, stored });
    Ok(())
}

/// The devices of this node; none where it has no GPU to give.
fn devices_of(agent: &Agent) -> Result<Vec<Device>> {
    match known_node(&agent.state, &agent.settings()) {
        Ok(node) => Ok(devices(&node, &agent.config.quota, &agent.config.request)),
        Err(GrantError::Node(
            why @ (NodeError::NoDriver { .. } | NodeError::NoGpu { .. } | NodeError::NoneInService { .. }),
        )) => {
            tracing::warn!(%why, "the node has no GPU to show");
            Ok(Vec::new())
        }
        Err(error) => Err(error.into()),
    }
}

/// The node as the slice's owner: the slice goes with the node.
async fn owner(agent: &Agent) -> Result<OwnerReference, kube::Error> {
    let node = Api::<ClusterNode>::all(agent.api.clone()).get(&agent.options.node_name).await?;
    Ok(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: agent.options.node_name.clone(),
        uid: node.metadata.uid.unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    })
}

fn spec(node: &str, generation: i64, devices: Vec<Device>) -> ResourceSliceSpec {
    ResourceSliceSpec {
        driver: DRIVER.to_owned(),
        node_name: Some(node.to_owned()),
        pool: ResourcePool { name: node.to_owned(), generation, resource_slice_count: 1 },
        devices: Some(devices),
        ..ResourceSliceSpec::default()
    }
}

/// All GPUs of the node whose size is known.
pub fn devices(node: &Node, rules: &Admission, policy: &Policy) -> Vec<Device> {
    let sized = node.gpus.iter().filter_map(|gpu| Some((gpu, gpu.memory?)));
    sized.map(|(gpu, memory)| device(gpu, memory, node, rules, policy)).collect()
}

fn device(gpu: &Gpu, memory: DeviceMemory, node: &Node, rules: &Admission, policy: &Policy) -> Device {
    let text = |text: &str| DeviceAttribute { string: Some(shortened(text)), ..DeviceAttribute::default() };
    let number = |number: u32| DeviceAttribute { int: Some(number.into()), ..DeviceAttribute::default() };
    let version =
        |semantic: String| DeviceAttribute { version: Some(semantic), ..DeviceAttribute::default() };
    let totals = node.totals.as_ref();
    let place = node.places.iter().find(|(uuid, _)| *uuid == gpu.uuid).map(|(_, place)| place);
    let of_gpu = totals.and_then(|totals| totals.gpus.iter().find(|one| one.uuid == gpu.uuid.to_string()));
    let attributes = [
        ("uuid", Some(text(&gpu.uuid.to_string()))),
        ("model", Some(text(&gpu.model))),
        ("index", Some(number(gpu.index))),
        ("minor", Some(number(gpu.minor))),
        ("driverVersion", Some(text(&node.driver.version))),
        (
            "architecture",
            of_gpu.map(|gpu| gpu.architecture.as_str()).filter(|text| !text.is_empty()).map(text),
        ),
        ("cudaVersion", totals.and_then(|totals| semantic(&totals.cuda_version)).map(version)),
        (PCI_BUS_ID, place.map(|place| text(&place.pci_bus_id))),
        ("numaNode", place.and_then(|place| place.numa_node).map(number)),
    ];
    let attributes = attributes.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    let capacity = [
        (MEMORY.to_owned(), memory_capacity(memory, rules, policy)),
        (CORES.to_owned(), cores_capacity(rules, policy)),
    ];
    Device {
        name: device_name(gpu.uuid),
        allow_multiple_allocations: Some(true),
        attributes: Some(attributes.collect()),
        capacity: Some(BTreeMap::from(capacity)),
        ..Device::default()
    }
}

/// The memory that all shares together may have, in steps of 1 MiB. One share has at most what is one GPU's.
fn memory_capacity(memory: DeviceMemory, rules: &Admission, policy: &Policy) -> DeviceCapacity {
    let whole = |memory: DeviceMemory| memory.bytes() / MIB * MIB;
    let (all, most) =
        (whole(rules.total(memory)), whole(rules.per_lease(memory)).min(whole(rules.total(memory))));
    let stated = match policy.default_memory {
        Some(MemoryRequest::Bytes(bytes)) => bytes.bytes(),
        Some(MemoryRequest::Percent(percent)) => memory.bytes() / 100 * u64::from(percent),
        Some(MemoryRequest::Rest) | None => most / DEFAULT_PART,
    };
    let default = stated.next_multiple_of(MIB).clamp(MIB, most.max(MIB));
    capacity(bytes(all), bytes(default), bytes(MIB), Some(bytes(most.max(MIB))), bytes(MIB))
}

/// Compute in percent. A share that states none gets the node's default. Where that is none, it has no limit
/// and takes nothing of it.
fn cores_capacity(rules: &Admission, policy: &Policy) -> DeviceCapacity {
    let percent = |percent: u16| Quantity(percent.to_string());
    let most = rules.cores_percent.min(100);
    let default = policy.default_cores.map_or(0, |cores| u16::from(cores.percent()).min(most));
    capacity(percent(rules.cores_percent), percent(default), percent(0), Some(percent(most)), percent(1))
}

fn capacity(
    value: Quantity,
    default: Quantity,
    min: Quantity,
    max: Option<Quantity>,
    step: Quantity,
) -> DeviceCapacity {
    let range = CapacityRequestPolicyRange { min, max, step: Some(step) };
    let policy =
        CapacityRequestPolicy { default: Some(default), valid_range: Some(range), valid_values: None };
    DeviceCapacity { value, request_policy: Some(policy) }
}

/// Bytes as the API server writes them: what it stores is then compared with equal text.
fn bytes(bytes: u64) -> Quantity {
    let units = [(1 << 40, "Ti"), (1 << 30, "Gi"), (MIB, "Mi")];
    let unit = units.into_iter().find(|(unit, _)| bytes > 0 && bytes.is_multiple_of(*unit));
    Quantity(unit.map_or_else(|| bytes.to_string(), |(unit, name)| format!("{}{name}", bytes / unit)))
}

/// A version `MAJOR.MINOR` in the three numbers that a semantic version has; `None` for anything else, which
/// the API server would refuse with the whole slice.
fn semantic(version: &str) -> Option<String> {
    let (major, minor) = version.split_once('.')?;
    let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
    Some(format!("{major}.{minor}.0"))
}

/// An attribute has at most 64 bytes.
fn shortened(text: &str) -> String {
    let mut end = text.len().min(64);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
