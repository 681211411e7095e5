//! Shows this node's GPUs to the cluster's scheduler, as devices whose memory and compute it hands out in
//! parts.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use gpushare_inject::{GrantError, can_supervise, known_node};
use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid, Node, NodeError};
use gpushare_quota::Admission;
use gpushare_request::{MemoryRequest, Policy};
use k8s_openapi::api::core::v1::Node as ClusterNode;
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, DeviceTaint,
    ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{ListParams, ObjectMeta, PostParams};
use tokio::task::spawn_blocking;

use super::metrics::number;
use super::{Agent, DRIVER, health};

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

/// The taint of a GPU that was seen in this boot and cannot be given now.
const OUT_OF_SERVICE: &str = "gpu.gpushare.io/out-of-service";
/// The taint of a GPU that the settings name as `quota.cordoned`.
const CORDONED: &str = "gpu.gpushare.io/cordoned";

/// What was last to be written to the API server, and what it made of it. A server that does not know
/// consumable capacity or taints drops those fields.
pub struct Published {
    wanted: Vec<Device>,
    stored: Vec<Device>,
}

/// Writes the node's slice if the API server has another one. The scheduler counts no slice of an older
/// generation than the newest that it sees. A GPU that is not to be given stays in it with a taint, as long
/// as the API server keeps taints.
///
/// # Errors
/// When the node cannot be read, or the API server refuses.
pub async fn publish(agent: &Arc<Agent>) -> Result<()> {
    let read = Arc::clone(agent);
    let shown = spawn_blocking(move || Shown::of(&read)).await??;
    agent.metrics.gpus.set(number(shown.devices.len()));
    let api = Api::<ResourceSlice>::all(agent.api.clone());
    let known = match own(agent, &api).await {
        // A cluster without claims, to which GPUs are shown as countable resources.
        Err(kube::Error::Api(status)) if status.code == 404 && !agent.resources.is_empty() => return Ok(()),
        known => known.context("cannot read the ResourceSlice")?,
    };
    let old = known.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).cloned().collect::<Vec<_>>();
    let wanted = shown.beside(&old);
    let mut published = agent.published.lock().await;
    let last = published.as_ref().filter(|last| last.wanted == wanted).map_or(&wanted, |last| &last.stored);
    if known.is_some() && old == *last {
        return Ok(());
    }
    let mut sent = wanted.clone();
    if sent.iter().any(is_tainted) {
        // A GPU that is not to be given must not be shown without its taint, for not even a moment.
        let kept = write(agent, &api, known.as_ref(), &sent, Run::Dry).await?;
        if !kept.iter().any(is_tainted) {
            tracing::warn!(
                "the API server drops taints of devices (feature DRADeviceTaints, on by default from Kubernetes 1.36): \
                 GPUs that are not to be given are left out instead"
            );
            sent.retain(|device| !is_tainted(device));
        }
    }
    let stored = match known.is_some() && old == sent {
        true => old,
        false => write(agent, &api, known.as_ref(), &sent, Run::Real).await?,
    };
    match stored.iter().all(|device| device.allow_multiple_allocations == Some(true)) {
        true => tracing::info!(gpus = sent.len(), "the node's GPUs are shown to the scheduler"),
        false => tracing::error!(
            "the API server drops what a share of a GPU is: turn on the feature DRAConsumableCapacity of API server, \
             scheduler and kubelet (on by default from Kubernetes 1.36)"
        ),
    }
    *published = Some(Published { wanted, stored });
    Ok(())
}

/// The node's slice, by what it says and not by its name: whoever may write slices of another node may take
/// any name.
async fn own(agent: &Agent, api: &Api<ResourceSlice>) -> Result<Option<ResourceSlice>, kube::Error> {
    let node = &agent.options.node_name;
    let fields = format!("spec.nodeName={node},spec.driver={DRIVER}");
    let listed = api.list(&ListParams::default().fields(&fields)).await?;
    let is_own = |slice: &ResourceSlice| {
        let spec = &slice.spec;
        spec.driver == DRIVER && spec.node_name.as_ref() == Some(node) && spec.pool.name == *node
    };
    Ok(listed.items.into_iter().find(is_own))
}

/// Whether a call changes anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// It only tells what would be stored.
    Dry,
    /// It does.
    Real,
}

/// Writes a slice of these devices, in the place of `known`. Returns the devices as the server has them.
async fn write(
    agent: &Arc<Agent>,
    api: &Api<ResourceSlice>,
    known: Option<&ResourceSlice>,
    devices: &[Device],
    run: Run,
) -> Result<Vec<Device>> {
    let node = &agent.options.node_name;
    let name = format!("{node}-{DRIVER}");
    let params = PostParams { dry_run: run == Run::Dry, ..PostParams::default() };
    let written = match known.cloned() {
        Some(known) => {
            let generation = known.spec.pool.generation + 1;
            let slice =
                ResourceSlice { metadata: known.metadata, spec: spec(node, generation, devices.to_vec()) };
            let name = slice.metadata.name.clone().unwrap_or_default();
            api.replace(&name, &params, &slice).await.context("cannot write the ResourceSlice")?
        }
        None => {
            let owner = owner(agent).await.context("cannot read the cluster's node")?;
            let owner_references = Some(vec![owner]);
            let metadata = ObjectMeta { name: Some(name.clone()), owner_references, ..ObjectMeta::default() };
            let mut slice = ResourceSlice { metadata, spec: spec(node, 0, devices.to_vec()) };
            let made = match api.create(&params, &slice).await {
                // Another node's slice has the name.
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    tracing::warn!(name, "another node's ResourceSlice has this node's name");
                    slice.metadata.name = None;
                    slice.metadata.generate_name = Some(format!("{name}-"));
                    api.create(&params, &slice).await
                }
                made => made,
            };
            made.context("cannot make the ResourceSlice")?
        }
    };
    Ok(written.spec.devices.unwrap_or_default())
}

/// What this node has for the scheduler.
struct Shown {
    /// The GPUs that can be given.
    devices: Vec<Device>,
    /// The devices of GPUs that were seen in this boot.
    seen: Vec<String>,
    /// The devices of GPUs of which nothing new is to be given.
    cordoned: Vec<String>,
}

impl Shown {
    fn of(agent: &Agent) -> Result<Self> {
        let known = known_node(&agent.state, &agent.settings());
        let seen = health::seen(agent, known.as_ref());
        let names = |gpus: &mut dyn Iterator<Item = GpuUuid>| gpus.map(device_name).collect();
        let rules = &agent.config.quota;
        // Two schedulers that count the same GPU would both give it.
        if !agent.resources.is_empty() {
            return Ok(Self { devices: Vec::new(), seen: Vec::new(), cordoned: Vec::new() });
        }
        let devices = match known {
            Ok(node) => {
                let can_supervise =
                    can_supervise(agent.settings().programs.supervisor.program, &node).is_ok();
                devices(&node, rules, &agent.config.request, can_supervise)
            }
            Err(GrantError::Node(
                why
                @ (NodeError::NoDriver { .. } | NodeError::NoGpu { .. } | NodeError::NoneInService { .. }),
            )) => {
                tracing::warn!(%why, "the node has no GPU to show");
                Vec::new()
            }
            Err(error) => return Err(error.into()),
        };
        let cordoned = names(&mut rules.cordoned.iter().copied());
        Ok(Self { devices, seen: names(&mut seen.into_iter()), cordoned })
    }

    /// The devices that the slice is to have, where it has `old` now. Those of GPUs that cannot be given any
    /// more stay as they stand there. A taint that stands there keeps its time.
    fn beside(self, old: &[Device]) -> Vec<Device> {
        let is_here = |name: &String| self.devices.iter().any(|device| device.name == *name);
        let lost = old.iter().filter(|device| self.seen.contains(&device.name) && !is_here(&device.name));
        let lost: Vec<Device> = lost.cloned().collect();
        let (here, cordoned) = (self.devices.len(), self.cordoned);
        let mut all = self.devices;
        all.extend(lost);
        for (number, device) in all.iter_mut().enumerate() {
            let reasons = [(OUT_OF_SERVICE, number >= here), (CORDONED, cordoned.contains(&device.name))];
            let taints = reasons.into_iter().filter(|(_, holds)| *holds).map(|(key, _)| {
                let before = old.iter().filter(|old| old.name == device.name);
                let same = before.flat_map(|old| old.taints.iter().flatten()).find(|taint| taint.key == key);
                same.cloned().unwrap_or_else(|| taint(key))
            });
            device.taints = Some(taints.collect()).filter(|taints: &Vec<_>| !taints.is_empty());
        }
        all
    }
}

/// Pods that hold a share stay: what is done for them is an administrator's decision (DeviceTaintRule).
fn taint(key: &str) -> DeviceTaint {
    DeviceTaint { effect: "NoSchedule".to_owned(), key: key.to_owned(), ..DeviceTaint::default() }
}

fn is_tainted(device: &Device) -> bool {
    device.taints.as_ref().is_some_and(|taints| !taints.is_empty())
}

/// The node as the owner of what tells of it, which goes with the node.
///
/// # Errors
/// When the API server does not tell the node.
pub async fn owner(agent: &Agent) -> Result<OwnerReference, kube::Error> {
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

/// All whole GPUs of the node whose size is known. A MIG instance is no device of the cluster's yet: a claim
/// that names none would get a small one as well as a GPU.
///
/// `can_supervise` says whether supervisors can hold containers of this node.
pub fn devices(node: &Node, rules: &Admission, policy: &Policy, can_supervise: bool) -> Vec<Device> {
    let whole = node.gpus.iter().filter(|gpu| gpu.instance.is_none());
    let sized = whole.filter_map(|gpu| Some((gpu, gpu.memory?)));
    let to_device = |(gpu, memory)| device(gpu, memory, node, (rules, policy), can_supervise);
    sized.map(to_device).collect()
}

fn device(
    gpu: &Gpu,
    memory: DeviceMemory,
    node: &Node,
    (rules, policy): (&Admission, &Policy),
    can_supervise: bool,
) -> Device {
    let text = |text: &str| DeviceAttribute { string: Some(shortened(text)), ..DeviceAttribute::default() };
    let number = |number: u32| DeviceAttribute { int: Some(number.into()), ..DeviceAttribute::default() };
    let version =
        |semantic: String| DeviceAttribute { version: Some(semantic), ..DeviceAttribute::default() };
    let totals = node.totals.as_ref();
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
        ("nvlinkGroup", Some(gpu.place.nvlink_group.as_str()).filter(|text| !text.is_empty()).map(text)),
        ("cudaVersion", totals.and_then(|totals| semantic(&totals.cuda_version)).map(version)),
        (PCI_BUS_ID, Some(gpu.place.pci_bus_id.as_str()).filter(|text| !text.is_empty()).map(text)),
        ("numaNode", gpu.place.numa_node.map(number)),
        ("supervisor", Some(DeviceAttribute { bool: Some(can_supervise), ..DeviceAttribute::default() })),
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

/// The memory that all shares together may have. One share has at most what is one GPU's.
///
/// There is no step: the scheduler of 1.36 rounds a request up to the next one without looking whether the
/// sum still is a number. 8Ei became -8Ei, which fits, and makes room on the GPU for whoever comes next. What
/// is no whole MiB is rounded down here.
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
    capacity(bytes(all), bytes(default), bytes(MIB), bytes(most.max(MIB)), None)
}

/// Compute in percent. A share that states none gets the node's default. Where that is none, it has no limit
/// and takes nothing of it.
fn cores_capacity(rules: &Admission, policy: &Policy) -> DeviceCapacity {
    let percent = |percent: u16| Quantity(percent.to_string());
    let most = rules.cores_percent.min(100);
    let default = policy.default_cores.map_or(0, |cores| u16::from(cores.percent()).min(most));
    // Where the node has a default, nobody asks to be without a limit.
    let least = u16::from(default > 0);
    let step = Some(percent(1));
    capacity(percent(rules.cores_percent), percent(default), percent(least), percent(most), step)
}

fn capacity(
    value: Quantity,
    default: Quantity,
    min: Quantity,
    max: Quantity,
    step: Option<Quantity>,
) -> DeviceCapacity {
    let range = CapacityRequestPolicyRange { min, max: Some(max), step };
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
