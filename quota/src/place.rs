//! Admission and placement: chooses the GPUs for a request, or returns the reason for a refusal. Pure
//! functions, without I/O.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use gpushare_claims::{ComputePolicy, Cores, Devices, MemoryRequest, Mode, NodeGpus, Request, find_gpu};
use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};

use crate::enforcement::{Company, Enforcement};
use crate::lease::{Grant, Lease};
use crate::update::Compute;
pub use refusal::Refusal;

/// The administrator's rules for admission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// How to choose among several GPUs that fit.
    pub placement: Placement,
    /// Memory of each GPU, in bytes, that is never granted.
    pub reserve: DeviceMemory,
    /// Upper bound on the memory of all leases together, in percent of a GPU's memory less the reserve; 100
    /// means no over-commit.
    pub memory_percent: u16,
    /// Upper bound on the compute of all leases on a GPU together, in percent; 100 means no over-commit.
    pub cores_percent: u16,
    /// Compute of a GPU, in percent, that windows must leave free while a container without a window uses the
    /// GPU. Applies where supervisors enforce compute.
    pub compute_reserve: u8,
    /// GPUs that get no new leases, unless the cluster's scheduler chose them. Existing leases stay and may
    /// change.
    pub cordoned: BTreeSet<GpuUuid>,
    /// Maximum number of time-slice leases on one GPU; 0 allows none.
    pub replicas: u16,
    /// Host memory, in bytes, that all leases together may use instead of GPU memory.
    pub host_memory: DeviceMemory,
}

impl Default for Admission {
    fn default() -> Self {
        Self {
            placement: Placement::Binpack,
            reserve: DeviceMemory::ZERO,
            memory_percent: 100,
            cores_percent: 100,
            compute_reserve: 5,
            cordoned: BTreeSet::new(),
            replicas: 10,
            host_memory: DeviceMemory::ZERO,
        }
    }
}

impl Admission {
    /// Returns the largest share that one lease may have on a GPU with this much memory.
    pub fn per_lease(&self, memory: DeviceMemory) -> DeviceMemory {
        memory.saturating_sub(self.reserve)
    }

    /// Whether the GPU is closed to new leases, either itself or through the card of its instance.
    pub fn is_cordoned(&self, gpu: &Gpu) -> bool {
        is_cordoned(gpu, &self.cordoned)
    }

    /// Returns the memory that all leases together may have on a GPU with this much memory.
    pub fn total(&self, memory: DeviceMemory) -> DeviceMemory {
        let bytes = u128::from(self.per_lease(memory).bytes()) * u128::from(self.memory_percent) / 100;
        DeviceMemory::from_bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

/// How to choose a GPU when several fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// The GPU with the least free memory.
    #[default]
    Binpack,
    /// The GPU with the most free memory.
    Spread,
}

/// The grants that a GPU already has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuLoad {
    /// Sum of the leases' memory.
    pub memory: DeviceMemory,
    /// Sum of the leases' compute in percent; a lease without a limit counts 0.
    pub cores: u64,
    /// Number of leases.
    pub leases: u64,
    /// How the leases share the GPU; `None` if there are no leases.
    pub company: Option<Company>,
    /// Number of leases on the GPU's MIG instances. They may outlive the instances.
    pub of_instances: u64,
    /// Sum of the compute, in percent, of leases that run in windows of a supervisor.
    pub windows: u64,
    /// Number of leases that a supervisor lets run between windows.
    pub between: u64,
    /// How many of them are answered before others (compute policy `latency`).
    pub latency: u64,
}

/// When a lease runs if a supervisor schedules it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    /// In a window of this many percent.
    InWindow(u64),
    /// Between the windows of others.
    Between,
}

impl Runs {
    /// Returns when a lease with this much compute runs; `None` if no supervisor schedules it.
    pub(crate) fn of(enforcement: Enforcement, policy: ComputePolicy, cores: Option<Cores>) -> Option<Self> {
        let is_held = enforcement == Enforcement::Scheduled;
        is_held.then(|| match cores.filter(|_| policy == ComputePolicy::Fixed) {
            Some(cores) => Self::InWindow(cores.percent().into()),
            None => Self::Between,
        })
    }
}

/// Whether a lease is answered before others. Only a supervisor can do that.
pub(crate) fn is_before_others(enforcement: Enforcement, policy: ComputePolicy) -> bool {
    enforcement == Enforcement::Scheduled && policy == ComputePolicy::Latency
}

impl GpuLoad {
    /// Adds one lease's grant.
    pub(crate) fn add(&mut self, grant: &Grant, enforcement: Enforcement, policy: ComputePolicy) {
        let company = enforcement.terms().company;
        self.memory = self.memory.saturating_add(grant.memory);
        self.cores += grant.cores.map_or(0, |cores| u64::from(cores.percent()));
        self.leases += 1;
        // Admission never mixes two companies on a GPU. If it happens anyway, admit no further lease.
        let is_other = self.company.is_some_and(|held| held != company);
        self.company = Some(if is_other { Company::Nobody } else { company });
        match Runs::of(enforcement, policy, grant.cores) {
            Some(Runs::InWindow(percent)) => self.windows += percent,
            Some(Runs::Between) => self.between += 1,
            None => {}
        }
        self.latency += u64::from(is_before_others(enforcement, policy));
    }

    /// Subtracts one lease's grant.
    pub(crate) fn remove(&mut self, grant: &Grant, enforcement: Enforcement, policy: ComputePolicy) {
        self.memory = self.memory.saturating_sub(grant.memory);
        self.cores = self.cores.saturating_sub(grant.cores.map_or(0, |cores| u64::from(cores.percent())));
        self.leases = self.leases.saturating_sub(1);
        self.company = self.company.filter(|_| self.leases > 0);
        match Runs::of(enforcement, policy, grant.cores) {
            Some(Runs::InWindow(percent)) => self.windows = self.windows.saturating_sub(percent),
            Some(Runs::Between) => self.between = self.between.saturating_sub(1),
            None => {}
        }
        self.latency = self.latency.saturating_sub(is_before_others(enforcement, policy).into());
    }
}

/// A GPU that the request could use.
#[derive(Clone, Debug)]
struct Candidate<'a> {
    gpu: &'a Gpu,
    load: GpuLoad,
    /// The most that one lease may have: the GPU's memory less the reserve.
    per_lease: DeviceMemory,
    /// The most that all leases together may have; more than `per_lease` if over-commit is configured.
    total: DeviceMemory,
}

impl Candidate<'_> {
    /// Returns the memory that is free for a lease of the same company.
    fn free(&self) -> DeviceMemory {
        match self.load.company {
            Some(Company::Nobody) => DeviceMemory::ZERO,
            _ => self.total.saturating_sub(self.load.memory).min(self.per_lease),
        }
    }
}

fn names(gpus: &[&Gpu]) -> String {
    gpus.iter().map(|gpu| gpu.to_string()).collect::<Vec<_>>().join(", ")
}

/// Whether the administrator closed the GPU, or the card of the instance, to new leases.
fn is_cordoned(gpu: &Gpu, cordoned: &BTreeSet<GpuUuid>) -> bool {
    cordoned.contains(&gpu.uuid) || cordoned.contains(&gpu.card())
}

/// Maximum number of GPUs per container: the limits file has this many lines.
const MOST: usize = 16;

/// Chooses GPUs for `request`, given the existing grants. Among GPUs that fit equally well, those in `near`
/// come first: other containers of the pod have shares of them.
///
/// # Errors
/// When the request cannot be met now, or can never be met. The refusal names the figures.
pub fn place(
    request: &Request,
    gpus: &[Gpu],
    load: impl Fn(GpuUuid) -> GpuLoad,
    near: &[GpuUuid],
    rules: &Admission,
) -> Result<Vec<Grant>, Refusal> {
    let (named, wanted) = named(&request.devices, gpus, &rules.cordoned)?;
    let mut candidates = Vec::new();
    let explicit = !matches!(request.devices, Devices::Any(_) | Devices::Among(..));
    let mut unknown = None;
    if request.memory_limit.is_some() && !Enforcement::of(request).terms().is_intercepted {
        return Err(Refusal::ForeignMemoryLimit);
    }
    let is_mps = request.mode == Mode::Mps;
    if let Some(instance) = named.iter().find(|gpu| gpu.instance.is_some()).filter(|_| is_mps) {
        return Err(Refusal::MpsOnInstance { place: instance.to_string() });
    }
    if wanted > MOST {
        return Err(Refusal::TooMany { wanted });
    }
    if named.is_empty() {
        return Err(Refusal::TooFewGpus { wanted, here: 0 });
    }
    for gpu in named.iter().copied().filter(|gpu| request.model.takes(&gpu.model)) {
        // Leases on both sides exist if MIG mode changed while containers used the card or its instances.
        let beside = match gpu.instance.is_some() {
            true => load(gpu.card()).leases,
            false => load(gpu.uuid).of_instances,
        };
        let found = match beside {
            0 => candidate(gpu, load(gpu.uuid), rules),
            _ => Err(Refusal::Divided { place: gpu.to_string() }),
        };
        match found {
            Ok(candidate) => candidates.push(candidate),
            Err(refusal) if explicit => return Err(refusal),
            Err(refusal) => unknown = unknown.or(Some(refusal)),
        }
    }
    // A GPU of unknown size is a reason to refuse only if too few other GPUs remain.
    if let Some(refusal) = unknown.filter(|_| candidates.len() < wanted) {
        return Err(refusal);
    }
    if candidates.is_empty() || (explicit && candidates.len() < named.len()) {
        let models: Vec<&str> = named.iter().map(|gpu| gpu.model.as_str()).collect();
        return Err(Refusal::Model { filter: request.model.to_string(), here: models.join(", ") });
    }
    if candidates.len() < wanted {
        return Err(Refusal::TooFewGpus { wanted, here: candidates.len() });
    }
    let chosen = match request.mode {
        Mode::Exclusive => empty(candidates, wanted, matches!(request.devices, Devices::These(_)))?,
        Mode::TimeSlice if rules.replicas == 0 => return Err(Refusal::NoReplicas),
        Mode::Share | Mode::Mps | Mode::TimeSlice => fitting(request, candidates, wanted, near, rules)?,
    };
    Ok(chosen.into_iter().map(|(candidate, memory)| grant(request, &candidate, memory)).collect())
}

/// Checks that the node has enough host memory for the request in addition to `held`, the host memory of its
/// leases.
///
/// # Errors
/// When the request exceeds the memory that is left.
pub(crate) fn admit_host_memory(
    request: &Request,
    held: DeviceMemory,
    rules: &Admission,
) -> Result<(), Refusal> {
    let (asked, total) = (request.host_memory, rules.host_memory);
    let free = total.saturating_sub(held);
    match asked {
        DeviceMemory::ZERO => Ok(()),
        _ if !Enforcement::of(request).terms().is_intercepted => Err(Refusal::ForeignHostMemory),
        _ if total == DeviceMemory::ZERO => Err(Refusal::NoHostMemory),
        _ if asked > free => Err(Refusal::HostMemory { asked, free, total }),
        _ => Ok(()),
    }
}

fn grant(request: &Request, candidate: &Candidate, memory: DeviceMemory) -> Grant {
    let gpu = candidate.gpu.uuid;
    let card = candidate.gpu.instance.as_ref().map(|instance| instance.card);
    Grant { gpu, card, memory, cores: request.on(gpu).cores }
}

fn candidate<'a>(gpu: &'a Gpu, load: GpuLoad, rules: &Admission) -> Result<Candidate<'a>, Refusal> {
    let memory = gpu.memory.ok_or_else(|| Refusal::UnknownSize { place: gpu.to_string() })?;
    let (per_lease, total) = (rules.per_lease(memory), rules.total(memory));
    Ok(Candidate { gpu, load, per_lease, total })
}

/// Returns the GPUs that the request names (all of them, for a count), and how many of them it wants. None of
/// them is cordoned: a count is met by the other GPUs, and a request that names a cordoned GPU, alone or
/// through `all`, is refused.
fn named<'a>(
    devices: &Devices,
    gpus: &'a [Gpu],
    cordoned: &BTreeSet<GpuUuid>,
) -> Result<(Vec<&'a Gpu>, usize), Refusal> {
    let is_open = |gpu: &&Gpu| !is_cordoned(gpu, cordoned);
    let open = |among: Vec<&'a Gpu>| {
        let open: Vec<&Gpu> = among.iter().copied().filter(is_open).collect();
        match open.is_empty() && !among.is_empty() {
            true => Err(Refusal::Cordoned { place: names(&among) }),
            false => Ok(open),
        }
    };
    match devices {
        Devices::Any(count) => Ok((open(NodeGpus(gpus).unnamed())?, usize::from(*count))),
        Devices::Among(count, of) => {
            let among = gpus.iter().filter(|gpu| of.contains(&gpu.uuid));
            Ok((open(among.collect())?, usize::from(*count)))
        }
        Devices::All => {
            let all = NodeGpus(gpus).unnamed();
            let closed: Vec<&Gpu> = all.iter().copied().filter(|gpu| !is_open(gpu)).collect();
            match closed.is_empty() {
                true => Ok((all.clone(), all.len())),
                false => Err(Refusal::Cordoned { place: names(&closed) }),
            }
        }
        Devices::These(selectors) => {
            let mut found: Vec<&Gpu> = Vec::new();
            for selector in selectors {
                let gpu = find_gpu(selector, gpus)?;
                if is_cordoned(gpu, cordoned) {
                    return Err(Refusal::Cordoned { place: gpu.to_string() });
                }
                if found.iter().any(|other| other.uuid == gpu.uuid) {
                    return Err(Refusal::NamedTwice { selector: selector.to_string() });
                }
                found.push(gpu);
            }
            let wanted = found.len();
            Ok((found, wanted))
        }
    }
}

type Chosen<'a> = Vec<(Candidate<'a>, DeviceMemory)>;

/// Chooses `wanted` GPUs without a lease that are close together, each with all the memory that one lease may
/// have.
fn empty(candidates: Vec<Candidate>, wanted: usize, is_list: bool) -> Result<Chosen, Refusal> {
    let empty: Vec<_> = candidates.into_iter().filter(|candidate| candidate.load.leases == 0).collect();
    if empty.len() < wanted {
        return Err(Refusal::NotEmpty { wanted, empty: empty.len() });
    }
    let chosen = nearest(empty, wanted, is_list);
    Ok(chosen.into_iter().map(|candidate| (candidate.clone(), candidate.per_lease)).collect())
}

/// Chooses `wanted` GPUs that are close together, the best ones first if several choices are equally close.
/// If `as_they_are` is set, takes the first ones.
fn nearest(of: Vec<Candidate>, wanted: usize, as_they_are: bool) -> Vec<Candidate> {
    if as_they_are || of.len() <= wanted {
        return of.into_iter().take(wanted).collect();
    }
    let gpus: Vec<&Gpu> = of.iter().map(|candidate| candidate.gpu).collect();
    near::together(&gpus, wanted).into_iter().map(|at| of[at].clone()).collect()
}

/// Returns the GPUs with room for the share: those in `near` first, then in the order of `rules.placement`. A
/// request for all remaining memory takes the emptiest GPU first. A list of GPUs keeps its order.
fn fitting<'a>(
    request: &Request,
    candidates: Vec<Candidate<'a>>,
    wanted: usize,
    near: &[GpuUuid],
    rules: &Admission,
) -> Result<Chosen<'a>, Refusal> {
    let count = candidates.len();
    let (mut fit, misfit): (Vec<_>, Vec<_>) =
        candidates.into_iter().partition(|candidate| misfit(request, candidate, rules).is_none());
    if fit.len() < wanted {
        return Err(match (wanted, refusal(request, &misfit, rules)) {
            (1, Some(refusal)) | (_, Some(refusal @ Refusal::LargerThanGpu { .. })) => refusal,
            (_, Some(refusal)) if matches!(request.devices, Devices::These(_)) => refusal,
            _ => Refusal::Count { wanted, fitting: fit.len(), candidates: count },
        });
    }
    // The container numbers its GPUs in the order of the list.
    if !matches!(request.devices, Devices::These(_)) {
        let takes_rest = request.memory == MemoryRequest::Rest && request.mode == Mode::Share;
        let is_spread = rules.placement == Placement::Spread;
        match rules.placement == Placement::Spread || takes_rest {
            true => fit.sort_by_key(|candidate| (Reverse(candidate.free()), candidate.gpu.index)),
            false => fit.sort_by_key(|candidate| (candidate.free(), candidate.gpu.index)),
        }
        if request.mode == Mode::TimeSlice {
            let order = |leases: u64| if is_spread { leases } else { u64::MAX - leases };
            fit.sort_by_key(|candidate| order(candidate.load.leases));
        }
        if !takes_rest {
            fit.sort_by_key(|candidate| !near.contains(&candidate.gpu.uuid));
        }
        // A share on one GPU, or of all remaining memory, is placed by free memory. Shares on several GPUs
        // are placed close together, unless the pod already has a share nearby.
        let is_near = fit.iter().any(|candidate| near.contains(&candidate.gpu.uuid));
        fit = nearest(fit, wanted, wanted == 1 || takes_rest || is_near);
        fit.sort_by_key(|candidate| candidate.gpu.index);
    }
    let memory = |candidate: &Candidate| match request.on(candidate.gpu.uuid).memory {
        MemoryRequest::Rest if request.mode == Mode::TimeSlice => DeviceMemory::ZERO,
        memory => asked(memory, candidate),
    };
    Ok(fit.into_iter().map(|candidate| (candidate.clone(), memory(&candidate))).collect())
}

/// Converts the requested memory to bytes on this GPU.
fn asked(memory: MemoryRequest, candidate: &Candidate) -> DeviceMemory {
    match memory {
        MemoryRequest::Bytes(memory) => memory,
        MemoryRequest::Percent(percent) => candidate.per_lease.percent(percent),
        MemoryRequest::Rest => candidate.free(),
    }
}

/// Returns why the share does not fit on this GPU; `None` if it fits.
fn misfit(request: &Request, candidate: &Candidate, rules: &Admission) -> Option<Refusal> {
    let share = request.on(candidate.gpu.uuid);
    if let Some(refusal) = company_misfit(request, candidate) {
        return Some(refusal);
    }
    if request.mode == Mode::TimeSlice {
        let (most, place) = (rules.replicas, candidate.gpu.to_string());
        let is_full = candidate.load.leases >= most.into();
        let named = (share.memory != MemoryRequest::Rest).then(|| memory_misfit(share.memory, candidate));
        return named.flatten().or(is_full.then_some(Refusal::Replicas { most, place }));
    }
    let limit = request.memory_limit.filter(|limit| *limit > candidate.per_lease);
    limit_misfit(limit, candidate)
        .or_else(|| memory_misfit(share.memory, candidate))
        .or_else(|| cores_misfit(share.cores?, candidate, rules))
        .or_else(|| {
            let runs = Runs::of(Enforcement::of(request), request.compute_policy, share.cores);
            reserve_misfit(runs?, candidate.load, rules, candidate.gpu)
        })
        .or_else(|| {
            let is_before = is_before_others(Enforcement::of(request), request.compute_policy);
            latency_misfit(is_before, candidate.load, candidate.gpu)
        })
}

/// Checks that a reserved lease that was unused until now can be used with `enforcement` from now on. The
/// enforcement was unknown when the lease was reserved.
///
/// # Errors
/// The same as for a new lease with this enforcement.
pub(crate) fn check_begun(
    lease: &Lease,
    enforcement: Enforcement,
    gpus: &[Gpu],
    load: impl Fn(GpuUuid) -> GpuLoad,
    rules: &Admission,
) -> Result<(), Refusal> {
    for grant in &lease.grants {
        let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == grant.gpu) else { continue };
        let mut others = load(grant.gpu);
        others.remove(grant, lease.enforcement, lease.compute_policy);
        let runs = Runs::of(enforcement, lease.compute_policy, grant.cores);
        let is_before = is_before_others(enforcement, lease.compute_policy);
        let misfit = runs.and_then(|runs| reserve_misfit(runs, others, rules, gpu));
        misfit.or_else(|| latency_misfit(is_before, others, gpu)).map_or(Ok(()), Err)?;
    }
    Ok(())
}

/// Refuses a second lease with the latency policy on one GPU: two such leases would wait for each other.
pub(crate) fn latency_misfit(is_before_others: bool, load: GpuLoad, gpu: &Gpu) -> Option<Refusal> {
    (is_before_others && load.latency > 0).then(|| Refusal::Latency { place: gpu.to_string() })
}

/// Shares see leases of whole GPUs as memory that is not free, which is the more useful message.
fn company_misfit(request: &Request, candidate: &Candidate) -> Option<Refusal> {
    let asked = Enforcement::of(request).terms().company;
    let is_told_as_memory = |held| (asked, held) == (Company::Shares, Company::Nobody);
    let held = candidate.load.company.filter(|held| *held != asked && !is_told_as_memory(*held))?;
    let place = candidate.gpu.to_string();
    Some(Refusal::Company { asked: asked.mode().name(), held: held.mode().name(), place })
}

fn limit_misfit(limit: Option<DeviceMemory>, candidate: &Candidate) -> Option<Refusal> {
    let (place, total) = (candidate.gpu.to_string(), candidate.per_lease);
    limit.map(|asked| Refusal::LargerThanGpu { asked, place, total })
}

fn memory_misfit(memory: MemoryRequest, candidate: &Candidate) -> Option<Refusal> {
    let (asked, free, total) = (asked(memory, candidate), candidate.free(), candidate.total);
    let place = candidate.gpu.to_string();
    if asked > candidate.per_lease {
        return Some(Refusal::LargerThanGpu { asked, place, total: candidate.per_lease });
    }
    if asked > free || free == DeviceMemory::ZERO || asked == DeviceMemory::ZERO {
        let asked = match memory {
            MemoryRequest::Percent(percent) => format!("{asked} ({percent}%)"),
            other => other.to_string(),
        };
        return Some(Refusal::Memory { asked, free, place, total });
    }
    None
}

fn cores_misfit(asked: Cores, candidate: &Candidate, rules: &Admission) -> Option<Refusal> {
    let free = u64::from(rules.cores_percent).saturating_sub(candidate.load.cores);
    let misfit = u64::from(asked.percent()) > free;
    misfit.then(|| Refusal::Cores { asked, free, place: candidate.gpu.to_string() })
}

/// Returns why a lease with `runs` does not fit in addition to `load`: windows would take all of the GPU's
/// time, although a lease runs between them.
pub(crate) fn reserve_misfit(runs: Runs, load: GpuLoad, rules: &Admission, gpu: &Gpu) -> Option<Refusal> {
    let (asked, windows, between) = match runs {
        Runs::InWindow(percent) => (Some(percent), load.windows + percent, load.between),
        Runs::Between => (None, load.windows, load.between + 1),
    };
    let most = 100u64.saturating_sub(rules.compute_reserve.into());
    let misfit = between > 0 && windows > most;
    misfit.then(|| Refusal::ComputeReserve {
        asked,
        free: most.saturating_sub(load.windows),
        held: load.windows,
        reserve: rules.compute_reserve,
        place: gpu.to_string(),
    })
}

/// Computes the grant of a living lease on `gpu` with new `memory` and `cores` (`None` leaves them
/// unchanged), given the `load` of all other leases. Checks only growth: a lease may shrink even on a node
/// that has granted too much.
pub(crate) fn resize(
    old: &Grant,
    memory: Option<MemoryRequest>,
    cores: Option<Compute>,
    gpu: &Gpu,
    load: GpuLoad,
    rules: &Admission,
) -> Result<Grant, Refusal> {
    let candidate = candidate(gpu, load, rules)?;
    let new = memory.map_or(old.memory, |memory| asked(memory, &candidate));
    let memory_misfit = memory.filter(|_| new > old.memory || new == DeviceMemory::ZERO);
    let held = old.cores.map_or(0, Cores::percent);
    let cores = cores.map_or(old.cores, Compute::cores);
    let cores_misfit = cores.filter(|cores| cores.percent() > held);
    let refusal = memory_misfit
        .and_then(|memory| self::memory_misfit(memory, &candidate))
        .or_else(|| self::cores_misfit(cores_misfit?, &candidate, rules));
    match refusal {
        Some(refusal) => Err(refusal),
        None => Ok(Grant { gpu: old.gpu, card: old.card, memory: new, cores }),
    }
}

/// Chooses the refusal to show: that of the GPU that comes nearest. A GPU that is large enough comes first,
/// then the one with the most free memory, then the one with the most memory in total.
fn refusal(request: &Request, misfits: &[Candidate], rules: &Admission) -> Option<Refusal> {
    let nearest = |candidate: &&Candidate| {
        let refusal = misfit(request, candidate, rules);
        (!matches!(refusal, Some(Refusal::LargerThanGpu { .. })), candidate.free(), candidate.total)
    };
    misfits.iter().max_by_key(nearest).and_then(|candidate| misfit(request, candidate, rules))
}

mod near;
mod refusal;

#[cfg(test)]
mod instances;
#[cfg(test)]
pub(crate) mod tests;
