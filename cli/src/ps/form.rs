//! `ps --json`: the form in which scripts read living leases.

use gpushare_inventory::DeviceMemory;
use gpushare_quota::{Grant, Lease, Member, ResourceClaim};
use schemars::JsonSchema;
use serde::Serialize;

use super::{Seen, first_pid, is_limited, pid, state};
use crate::container::PodName;
use crate::violation::Violation;

/// The living leases.
#[derive(Serialize, JsonSchema)]
pub struct Shares {
    /// One for each lease, oldest first.
    pub shares: Vec<Share>,
    /// Processes on shared GPUs that no lease explains.
    pub strangers: Vec<Violation>,
}

/// A lease, and what its containers use of it.
#[derive(Serialize, JsonSchema)]
pub struct Share {
    /// The runtime root of the container that holds it longest; empty where the engine named none.
    root: String,
    /// The id of that container.
    pub id: String,
    /// All containers that hold it.
    containers: Vec<Container>,
    /// The resource claim that holds it.
    claim: Option<Claim>,
    /// `reserved`, `active`, `paused` or `gone`.
    state: &'static str,
    /// `share`, `mps`, `time-slice` or `exclusive`.
    mode: &'static str,
    /// Holder of its memory within the limit: `supervisor`, `library`, `driver` or `nobody`.
    held_by: &'static str,
    compute_held_by: &'static str,
    /// The first process of the container on the host.
    pid: Option<i32>,
    /// 0 (low) to 9.
    priority: u8,
    /// `fixed`, `burst` or `none`.
    compute_policy: &'static str,
    /// The most compute that a bursting container uses, in percent.
    burst_ceiling: u8,
    /// Host memory that may stand in for the GPUs', in bytes.
    host_memory_bytes: u64,
    /// What the memory may grow to on each GPU, in bytes; null where it does not grow.
    memory_limit_bytes: Option<u64>,
    /// What is promised of a memory that grows, in bytes; null where it does not grow.
    memory_promised_bytes: Option<u64>,
    /// Host memory in use in place of the GPUs', in bytes.
    host_used_bytes: Option<u64>,
    /// Seconds since 1970.
    granted_at: u64,
    /// `ok`, or `damaged` where the container's books say what cannot be.
    books: &'static str,
    /// What the containers do against their share.
    violations: Vec<Violation>,
    /// One for each GPU of the lease.
    pub gpus: Vec<Part>,
}

/// A lease's part of one GPU.
#[derive(Serialize, JsonSchema)]
pub struct Part {
    /// UUID of the GPU or MIG instance.
    pub uuid: String,
    /// The limit in bytes; null where memory is not limited.
    pub memory_bytes: Option<u64>,
    /// What the container says that it needs, in bytes, where memory is not limited.
    needed_bytes: Option<u64>,
    /// Bytes that the container holds, by its own books or its supervisor's.
    pub used_bytes: Option<u64>,
    /// What it holds by the driver's count, in bytes; null where no meter runs or the driver does not tell.
    driver_bytes: Option<u64>,
    /// The driver's count less the books, in bytes.
    drift: Option<i64>,
    /// The part of the driver's count that contexts and their code take, in bytes; null where it is unknown.
    context_bytes: Option<u64>,
    /// What the books charge for contexts, in bytes.
    context_charged_bytes: Option<u64>,
    /// Memory that the books do not explain, in bytes; null where no meter runs.
    unbooked_bytes: Option<u64>,
    /// Compute share in percent; null without one.
    pub cores: Option<u8>,
    /// GPU time so far, in nanoseconds; null where it was never measured.
    pub gpu_nanoseconds: Option<u64>,
    /// What tells that time: `record`, the card's own record of context switches, or `samples`, NVML's; null
    /// where nothing does.
    gpu_time_by: Option<&'static str>,
    /// How long launches were held back so far, in nanoseconds.
    pub throttled_nanoseconds: u64,
}

/// A container that holds a lease.
#[derive(Serialize, JsonSchema)]
struct Container {
    id: String,
    /// `reserved`, `active`, `paused` or `gone`.
    state: &'static str,
    /// Its first process on the host.
    pid: Option<i32>,
    /// What the cluster calls it.
    pod: Option<PodName>,
    /// What its engine calls it.
    name: Option<String>,
    image: Option<String>,
    /// The compose project.
    project: Option<String>,
}

/// A resource claim of Kubernetes.
#[derive(Serialize, JsonSchema)]
struct Claim {
    namespace: String,
    name: String,
    uid: String,
}

impl Share {
    /// The form of `lease`.
    pub fn of(lease: &Lease, seen: &Seen, violations: Vec<Violation>, claim: Option<&ResourceClaim>) -> Self {
        let parts = lease.grants.iter().enumerate().map(|(line, grant)| Part::of(lease, line, grant, seen));
        Self {
            root: lease.member.key.root.clone(),
            id: lease.member.key.container.clone(),
            containers: lease.members().map(Container::of).collect(),
            claim: claim.map(|claim| Claim {
                namespace: claim.name.namespace.clone(),
                name: claim.name.name.clone(),
                uid: claim.name.uid.clone(),
            }),
            state: state(lease, seen.is_paused()),
            mode: lease.enforcement.terms().company.mode().name(),
            held_by: lease.held_by().name(),
            compute_held_by: lease.compute_held_by().name(),
            pid: first_pid(lease),
            priority: lease.priority.level(),
            compute_policy: lease.compute_policy.name(),
            burst_ceiling: lease.ceiling.percent(),
            host_memory_bytes: lease.host_memory.bytes(),
            memory_limit_bytes: lease.elastic.map(|bounds| bounds.most.bytes()),
            memory_promised_bytes: lease.elastic.map(|bounds| bounds.least.bytes()),
            host_used_bytes: seen.host_used(lease).map(DeviceMemory::bytes),
            granted_at: lease.granted_at,
            books: if seen.is_damaged() { "damaged" } else { "ok" },
            violations,
            gpus: parts.collect(),
        }
    }

    /// The name of the container that holds it longest; empty where nobody gave it one.
    pub fn name(&self) -> &str {
        self.containers.first().and_then(|one| one.name.as_deref()).unwrap_or_default()
    }

    /// One row for each GPU, under [`CSV`].
    pub fn rows(&self) -> impl Iterator<Item = Vec<String>> {
        let first = self.containers.first();
        let of_first = |value: Option<&String>| value.cloned().unwrap_or_default();
        let image = of_first(first.and_then(|one| one.image.as_ref()));
        let pod = first.and_then(|one| one.pod.as_ref());
        let number = |number: Option<u64>| number.map_or_else(String::new, |number| number.to_string());
        self.gpus.iter().map(move |part| {
            vec![
                self.id.clone(),
                self.name().to_owned(),
                image.clone(),
                pod.map(|pod| pod.namespace.clone()).unwrap_or_default(),
                pod.map(|pod| pod.name.clone()).unwrap_or_default(),
                self.state.to_owned(),
                self.mode.to_owned(),
                number(self.pid.and_then(|pid| u64::try_from(pid).ok())),
                part.uuid.clone(),
                number(part.memory_bytes),
                number(part.used_bytes),
                number(part.cores.map(u64::from)),
                number(part.gpu_nanoseconds),
                part.throttled_nanoseconds.to_string(),
                self.granted_at.to_string(),
            ]
        })
    }
}

/// The columns of `ps --format csv`.
pub const CSV: [&str; 15] = [
    "id",
    "name",
    "image",
    "namespace",
    "pod",
    "state",
    "mode",
    "pid",
    "gpu",
    "memory_bytes",
    "used_bytes",
    "cores",
    "gpu_nanoseconds",
    "throttled_nanoseconds",
    "granted_at",
];

impl Part {
    fn of(lease: &Lease, line: usize, grant: &Grant, seen: &Seen) -> Self {
        let fresh = seen.fresh(line);
        let used = seen.used(line).map(DeviceMemory::bytes);
        // 0 means nothing is held, or that the driver does not tell.
        let driver = fresh.map(|value| value.memory_bytes).filter(|bytes| *bytes > 0);
        let drift = driver.zip(used).map(|(driver, used)| i128::from(driver) - i128::from(used));
        let bytes = |is_told: bool| is_told.then(|| grant.memory.bytes());
        Self {
            uuid: grant.gpu.to_string(),
            memory_bytes: bytes(is_limited(lease)),
            needed_bytes: bytes(!is_limited(lease)),
            used_bytes: used,
            driver_bytes: driver,
            drift: drift.and_then(|drift| i64::try_from(drift).ok()),
            context_bytes: seen.contexts(line).map(DeviceMemory::bytes),
            context_charged_bytes: seen.contexts_charged(line).map(DeviceMemory::bytes),
            unbooked_bytes: fresh.map(|value| value.unbooked_bytes),
            cores: grant.cores.map(|cores| cores.percent()),
            gpu_nanoseconds: seen.gpu_time(line),
            gpu_time_by: seen.gpu_time_by(line),
            throttled_nanoseconds: seen.throttled(line),
        }
    }
}

impl Container {
    fn of(member: &Member) -> Self {
        let called = &member.called;
        Self {
            id: member.key.container.clone(),
            state: if member.holder.is_gone() { "gone" } else { member.state.name() },
            pid: pid(&member.holder),
            pod: member.name.as_ref().map(PodName::of),
            name: called.name.clone(),
            image: called.image.clone(),
            project: called.project.clone(),
        }
    }
}
