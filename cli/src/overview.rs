//! The node at one moment, as `top`, the metrics and the page show it: its GPUs, who holds shares of them,
//! and what was refused lately.

use std::collections::{HashMap, HashSet};
use std::fs::File;

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inject::{MemoryUse, out_of_service};
use gpushare_inventory::{DeviceMemory, Faults, Gpu, GpuUuid, Node, NodeError, SickGpu};
use gpushare_quota::{
    Following, GpuLoad, HeldBy, Lease, Loads, Reason, Refused, Running, StateFolder, Store,
};
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock as GpuClock, TemperatureSensor};
use schemars::JsonSchema;
use serde::Serialize;

use crate::container::{containers, name, short};
use crate::metrics::Totals;
use crate::ps::{self, Seen};
use crate::violation::{self, Violation};
use crate::{inventory, lock, meter, node, table};

/// How many of the latest refusals are shown.
const REFUSALS: usize = 50;

/// A node at one moment. It is also the form of `top --json` and of the page's data.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct Overview {
    /// When it was looked at, in seconds since 1970.
    pub at: u64,
    /// Whether `gpushare meter` runs. Without it, GPU time and what the driver counts are unknown.
    pub is_metered: bool,
    /// The driver's version; empty where there is none.
    pub driver: String,
    /// GPUs and MIG instances, by their numbers.
    pub gpus: Vec<GpuView>,
    /// Leases, oldest first.
    pub shares: Vec<ShareView>,
    /// The latest refusals, newest first.
    pub refusals: Vec<RefusalView>,
    /// What is done against shares.
    pub violations: Vec<Violation>,
}

/// A GPU or MIG instance.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct GpuView {
    /// Its number: `0`, or `0:1` for an instance.
    pub number: String,
    /// Its UUID.
    pub uuid: String,
    /// Its model.
    pub model: String,
    /// Its memory in bytes; `None` where that is not known.
    pub memory_bytes: Option<u64>,
    /// Memory that leases hold, in bytes.
    pub granted_bytes: u64,
    /// Memory that is in use by the driver's count, in bytes; else by the containers' books.
    pub used_bytes: u64,
    /// Compute that leases hold, in percent.
    pub granted_cores: u64,
    /// How many leases there are on it.
    pub shares: u64,
    /// Its use of time, in percent.
    pub utilisation_percent: Option<u32>,
    /// Its temperature in degrees Celsius.
    pub celsius: Option<u32>,
    /// What it draws, in watts.
    pub watts: Option<f64>,
    /// Clock of its multiprocessors in MHz.
    pub sm_megahertz: Option<u32>,
    /// Whether it takes no new shares by an administrator's word.
    pub is_cordoned: bool,
    /// Why it is out of service; `None` while it is well.
    pub fault: Option<String>,
}

/// What a lease holds, and what its containers use of it.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct ShareView {
    /// The lease's id.
    pub lease: i64,
    /// All its containers by name.
    pub name: String,
    /// The id of the container that holds it longest.
    pub id: String,
    /// That container's name, without its pod.
    pub container: String,
    /// Its pod; empty outside of a cluster.
    pub pod: String,
    /// The pod's namespace; empty outside of a cluster.
    pub namespace: String,
    /// The image; empty where it is not known.
    pub image: String,
    /// The compose project; empty where there is none.
    pub project: String,
    /// `share`, `mps`, `time-slice` or `exclusive`.
    pub mode: &'static str,
    /// Holder of its memory within the limit: `supervisor`, `library`, `driver` or `nobody`.
    pub held_by: &'static str,
    /// Holder of its part of compute, likewise.
    pub compute_held_by: &'static str,
    /// `reserved`, `active`, `paused` or `gone`.
    pub state: &'static str,
    /// Seconds since 1970.
    pub granted_at: u64,
    /// The first process of the container on the host.
    pub pid: Option<i32>,
    /// Host memory in use in place of GPUs', in bytes.
    pub host_used_bytes: u64,
    /// Host memory that may be used in place of GPUs', in bytes.
    pub host_memory_bytes: u64,
    /// Allocations that the limit refused.
    pub allocations_refused: u64,
    /// The most memory that the meter saw in use over all GPUs, in bytes.
    pub peak_bytes: Option<u64>,
    /// What it does against its share.
    pub violations: Vec<String>,
    /// One for each GPU of the lease.
    pub parts: Vec<PartView>,
}

/// A lease's part of one GPU.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct PartView {
    /// The GPU's number; its UUID where the driver does not show it any more.
    pub gpu: String,
    /// The GPU's UUID.
    pub uuid: String,
    /// The GPU's model.
    pub model: String,
    /// Granted memory in bytes; `None` where memory is not limited.
    pub memory_bytes: Option<u64>,
    /// What the memory may grow to, in bytes.
    pub limit_bytes: Option<u64>,
    /// Memory in use, in bytes: by the driver's count where that is known, else by the container's books.
    pub used_bytes: u64,
    /// The part of it that contexts and their code take, in bytes; `None` where it is not known.
    pub context_bytes: Option<u64>,
    /// Memory that the books do not explain, in bytes.
    pub unbooked_bytes: u64,
    /// Compute share in percent; `None` where compute is not limited.
    pub cores: Option<u8>,
    /// GPU time so far, in nanoseconds; `None` where it was never measured.
    pub gpu_nanoseconds: Option<u64>,
    /// Source of that time: the card's `record` or NVML's `samples`; `None` where it was never measured.
    pub gpu_time_by: Option<&'static str>,
    /// The end of the last window in that time, in nanoseconds since the boot.
    pub gpu_time_until: u64,
    /// How long launches were held back so far, in nanoseconds.
    pub throttled_nanoseconds: u64,
}

impl PartView {
    /// Whether hardly anything is left of its memory: 19 parts of 20 are in use.
    pub fn is_full(&self) -> bool {
        self.limit_bytes.is_some_and(|limit| self.used_bytes.saturating_mul(20) >= limit.saturating_mul(19))
    }
}

/// A process of a container.
#[derive(Serialize, JsonSchema)]
pub struct Process {
    /// Its pid on the host.
    pub pid: u32,
    /// Its name, as the kernel has it.
    pub name: String,
}

/// A container that was refused.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RefusalView {
    /// The container's id.
    pub id: String,
    /// What it was called, or its id.
    pub name: String,
    /// Seconds since 1970.
    pub at: u64,
    /// Why.
    pub reason: String,
    /// `room`, `rules`, `request`, `image`, `settings` or `node`; null in notes of earlier versions.
    pub kind: Option<&'static str>,
}

/// Looks at a node again and again.
pub struct Looker {
    config: Config,
    state: StateFolder,
    store: Store,
    node: Option<Node>,
    /// The driver, while a container holds a share: an open driver keeps a card awake.
    nvml: Option<Nvml>,
    /// GPUs out of service.
    sick: Vec<GpuView>,
    /// GPUs and instances in service.
    well: HashSet<GpuUuid>,
    /// The open files of containers' books, by lease: to open one takes a thread, for its mount namespace.
    usage: HashMap<i64, File>,
    /// The latest refusals.
    refused: Vec<Refused>,
    /// Counts what is noted.
    following: Following,
    /// The store's number of grants at the last look.
    grants: u64,
    totals: Totals,
}

/// More grants than there are between two looks: the store was made anew, and its numbers begin elsewhere.
const ANEW: u64 = 1_000_000;

impl Looker {
    /// Opens the node.
    ///
    /// # Errors
    /// When state or store cannot be used.
    pub fn open(config: Config) -> Result<Self> {
        let (state, store) = node::store(&config)?;
        let grants = store.grants()?;
        let refused = latest(&state);
        let following = Following::of(&state);
        let (sick, well) = (Vec::new(), HashSet::new());
        let (usage, totals) = (HashMap::new(), Totals::default());
        let (node, nvml) = (None, None);
        Ok(Self { config, state, store, node, nvml, sick, well, usage, refused, following, grants, totals })
    }

    /// What was counted since this began to look.
    pub const fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Counts what was noted since the last look.
    fn count(&mut self) {
        let (news, totals) = (self.following.news(&self.state), &mut self.totals);
        if !news.refused.is_empty() {
            self.refused = latest(&self.state);
        }
        news.refused.iter().for_each(|refused| totals.count_refusal(refused.kind));
        news.ended.iter().for_each(|lease| totals.count_release(&lease.reason));
        news.found.iter().for_each(|found| totals.count_violation(&found.kind));
        news.made.into_iter().for_each(|took| totals.makes.add(took));
    }

    fn count_grants(&mut self) {
        let Ok(now) = self.store.grants() else { return };
        let new = now.saturating_sub(self.grants);
        self.totals.grants += if new < ANEW { new } else { 0 };
        self.grants = now;
    }

    /// The node now.
    ///
    /// # Errors
    /// When the store fails.
    pub fn look(&mut self) -> Result<Overview> {
        let leases = self.store.leases()?;
        self.count();
        self.count_grants();
        self.usage.retain(|id, _| leases.iter().any(|lease| lease.id == *id));
        if self.node.is_none() {
            self.open_node();
        }
        let Some(node) = &self.node else {
            let gpus = self.sick.clone();
            return Ok(Overview { at: table::now(), gpus, ..Overview::default() });
        };
        if leases.is_empty() {
            self.nvml = None;
        } else if self.nvml.is_none() {
            self.nvml = inventory::nvml_of(node).ok();
        }
        let state = self.state.path();
        let violations = violation::read(state);
        let (running, memory) = (Running::default(), MemoryUse::read(state));
        let shares = leases.iter().map(|lease| {
            let seen = Seen::kept(state, lease, &running, &mut self.usage);
            ShareView {
                peak_bytes: memory.get(&lease.id).map(|use_| use_.peak),
                ..share(lease, &seen, node, &violations)
            }
        });
        let mut shares: Vec<ShareView> = shares.collect();
        // Whoever is gone still holds its share until it is swept, as its own line says.
        let loads = self.store.loads()?;
        let sees = |gpu: &Gpu| self.gpu(gpu, &loads, &shares);
        let is_well = |gpu: &&Gpu| self.well.contains(&gpu.uuid);
        let mut gpus: Vec<GpuView> = node.gpus.iter().filter(is_well).map(sees).collect();
        count_whole(&mut shares, &gpus);
        gpus.extend(self.sick.iter().cloned());
        let refusals = self.refused.iter().cloned().map(refusal).collect();
        let is_metered = lock::is_held(&meter::lock_file(state));
        let driver = node.driver.version.clone();
        Ok(Overview { at: table::now(), is_metered, driver, gpus, shares, refusals, violations })
    }

    /// Forgets what was known of the GPUs, which may have changed.
    pub fn renew(&mut self) {
        self.node = None;
    }

    /// The processes of a lease's containers; none where the lease is gone.
    ///
    /// # Errors
    /// When the store fails.
    pub fn processes(&self, lease: i64) -> Result<Vec<Process>> {
        let leases = self.store.leases()?;
        let members = leases.iter().filter(|found| found.id == lease).flat_map(Lease::members);
        let mut pids: Vec<u32> = members.flat_map(|member| member.holder.contained()).collect();
        pids.sort_unstable();
        pids.dedup();
        // A process names itself as it likes.
        let name = |pid: u32| std::fs::read(format!("/proc/{pid}/comm")).ok();
        let process = |pid: u32| {
            Some(Process { pid, name: String::from_utf8_lossy(&name(pid)?).trim_end().to_owned() })
        };
        Ok(pids.into_iter().filter_map(process).collect())
    }

    fn gpu(&self, gpu: &Gpu, loads: &Loads, shares: &[ShareView]) -> GpuView {
        let load = loads.get(&gpu.uuid).copied().unwrap_or_default();
        let uuid = gpu.uuid.to_string();
        let booked = shares.iter().flat_map(|share| &share.parts).filter(|part| part.uuid == uuid);
        let booked = booked.map(|part| part.used_bytes).sum();
        let view = GpuView {
            is_cordoned: self.config.quota.is_cordoned(gpu),
            used_bytes: booked,
            ..plain(gpu, &load)
        };
        let device = self.nvml.as_ref().and_then(|nvml| nvml.device_by_uuid(&*uuid).ok());
        let Some(device) = device else { return view };
        GpuView {
            used_bytes: device.memory_info().map_or(booked, |memory| memory.used),
            utilisation_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
            celsius: device.temperature(TemperatureSensor::Gpu).ok(),
            watts: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1000.0),
            sm_megahertz: device.clock_info(GpuClock::SM).ok(),
            ..view
        }
    }

    /// Looks for the GPUs, and for those that are out of service. A card in MIG mode may be there once for
    /// each of its instances.
    fn open_node(&mut self) {
        let all = || -> Result<Node> {
            node::all(&self.config, &self.state).or_else(|_| Ok(node::shown(&self.config)?))
        };
        let faults = Faults::load(self.state.path());
        let in_service = all().and_then(|node| Ok(node.without_faulty(&faults)?));
        self.well.clear();
        let sick = match in_service {
            Ok(node) => {
                self.well.extend(node.gpus.iter().map(|gpu| gpu.uuid));
                node.sick
            }
            Err(error) => match error.downcast() {
                Ok(NodeError::NoneInService { sick }) => sick,
                _ => Vec::new(),
            },
        };
        self.node = all().ok();
        let gpus = self.node.iter().flat_map(|node| node.gpus.iter().chain(&node.divided));
        let known: Vec<&Gpu> = gpus.filter(|gpu| gpu.instance.is_none()).collect();
        let view = |sick: &SickGpu| {
            let gpu = known.iter().find(|gpu| gpu.index == sick.index);
            GpuView {
                number: sick.index.to_string(),
                uuid: gpu.map(|gpu| gpu.uuid.to_string()).unwrap_or_default(),
                model: gpu.map(|gpu| gpu.model.clone()).unwrap_or_default(),
                fault: Some(out_of_service(sick)),
                ..GpuView::default()
            }
        };
        let mut views: Vec<GpuView> = sick.iter().map(view).collect();
        views.sort_by(|a, b| a.number.cmp(&b.number));
        views.dedup_by(|a, b| a.number == b.number);
        self.sick = views;
    }
}

/// The latest refusals, newest first.
fn latest(state: &StateFolder) -> Vec<Refused> {
    let mut refusals = state.refusals();
    refusals.truncate(REFUSALS);
    refusals
}

fn plain(gpu: &Gpu, load: &GpuLoad) -> GpuView {
    GpuView {
        number: gpu.number(),
        uuid: gpu.uuid.to_string(),
        model: gpu.model.clone(),
        memory_bytes: gpu.memory.map(DeviceMemory::bytes),
        granted_bytes: load.memory.bytes(),
        granted_cores: load.cores,
        shares: load.leases,
        ..GpuView::default()
    }
}

/// Who holds memory, and who holds compute where that is somebody else.
pub fn holders(memory: &str, compute: &str) -> String {
    if compute == memory || compute == HeldBy::Nobody.name() {
        return memory.to_owned();
    }
    format!("{memory}, compute by {compute}")
}

fn share(lease: &Lease, seen: &Seen, node: &Node, violations: &[Violation]) -> ShareView {
    let member = &lease.member;
    let pod = member.name.as_ref();
    let is_its = |one: &&Violation| one.lease == Some(lease.id) && one.is_cheating();
    let its = violations.iter().filter(is_its);
    ShareView {
        lease: lease.id,
        name: containers(lease),
        id: member.key.container.clone(),
        container: match pod {
            Some(pod) => pod.container.clone(),
            None => name(None, &member.called, &member.key.container),
        },
        pod: pod.map(|pod| pod.pod.clone()).unwrap_or_default(),
        namespace: pod.map(|pod| pod.namespace.clone()).unwrap_or_default(),
        image: member.called.image.clone().unwrap_or_default(),
        project: member.called.project.clone().unwrap_or_default(),
        mode: lease.enforcement.terms().company.mode().name(),
        held_by: lease.held_by().name(),
        compute_held_by: lease.compute_held_by().name(),
        state: ps::state(lease, seen.is_paused()),
        granted_at: lease.granted_at,
        pid: ps::first_pid(lease),
        host_used_bytes: seen.host_used(lease).map_or(0, DeviceMemory::bytes),
        host_memory_bytes: lease.host_memory.bytes(),
        allocations_refused: seen.refused(),
        peak_bytes: None,
        violations: its.map(|violation| violation.text.clone()).collect(),
        parts: (0..lease.grants.len()).filter_map(|line| part(lease, line, seen, node)).collect(),
    }
}

fn part(lease: &Lease, line: usize, seen: &Seen, node: &Node) -> Option<PartView> {
    let grant = lease.grants.get(line)?;
    let gpu = node.gpus.iter().find(|gpu| gpu.uuid == grant.gpu);
    let fresh = seen.fresh(line);
    let booked = seen.used(line).map_or(0, DeviceMemory::bytes);
    Some(PartView {
        gpu: gpu.map_or_else(|| grant.gpu.to_string(), Gpu::number),
        uuid: grant.gpu.to_string(),
        model: gpu.map(|gpu| gpu.model.clone()).unwrap_or_default(),
        memory_bytes: ps::is_limited(lease).then(|| grant.memory.bytes()),
        limit_bytes: ps::is_limited(lease)
            .then(|| lease.elastic.map_or(grant.memory, |bounds| bounds.most).bytes()),
        // The driver counts 0 where it does not tell.
        used_bytes: fresh.map(|value| value.memory_bytes).filter(|bytes| *bytes > 0).unwrap_or(booked),
        context_bytes: seen.contexts(line).map(DeviceMemory::bytes),
        unbooked_bytes: fresh.map_or(0, |value| value.unbooked_bytes),
        cores: grant.cores.map(|cores| cores.percent()),
        gpu_nanoseconds: seen.gpu_time(line),
        gpu_time_by: seen.gpu_time_by(line),
        gpu_time_until: fresh.map_or(0, |value| value.until),
        throttled_nanoseconds: seen.throttled(line),
    })
}

/// Who has a GPU alone keeps no books of it: what is in use there, is in use by him.
fn count_whole(shares: &mut [ShareView], gpus: &[GpuView]) {
    let whole = shares.iter_mut().filter(|share| share.mode == "exclusive");
    for part in whole.flat_map(|share| &mut share.parts) {
        if let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == part.uuid) {
            part.used_bytes = gpu.used_bytes;
        }
    }
}

fn refusal(refused: Refused) -> RefusalView {
    RefusalView {
        name: refused.name.unwrap_or_else(|| short(&refused.container)),
        id: refused.container,
        at: refused.at,
        reason: refused.reason,
        kind: refused.kind.map(Reason::name),
    }
}
