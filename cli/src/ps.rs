//! `gpushare ps`: the living leases, and what each container uses of its share. There are three sources: the
//! store, the driver by way of the meter, and the container's own books. Only the books can lie, so they are
//! shown under a name of their own.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inject::{Region, UsageError};
use gpushare_inventory::DeviceMemory;
use gpushare_quota::{Enforcement, Grant, Holder, Lease, Member, ResourceClaim, Running};
use gpushare_region::{MAX_DEVICES, Measurement, Throttle, Usage};
use gpushare_request::{ComputePolicy, Cores, Mode};
use serde_json::{Value, json};

use crate::clock::Clock;
use crate::container::{is_claim, named};
use crate::node::GpuNames;
use crate::table::age;
use crate::violation::{self, Violation};
use crate::{node, table};

/// A measurement older than this, in nanoseconds, is of a meter that has ended.
const STALE: u64 = 3_000_000_000;

/// Prints the living leases.
pub fn ps(as_json: bool) -> Result<()> {
    let config = Config::load()?;
    let (state, store) = node::store(&config)?;
    let (leases, claims) = (store.leases()?, store.claims()?);
    let claim_of = |lease: &Lease| {
        let its = |claim: &&_| lease.members().any(|member| is_claim(member, claim));
        claims.iter().map(|(claim, _)| claim).rfind(its)
    };
    let running = Running::default();
    let seen = leases.iter().map(|lease| (lease, Seen::of(state.path(), lease, &running)));
    let violations = violation::read(state.path());
    let of = |lease: &Lease| -> Vec<&Violation> {
        violations.iter().filter(|violation| violation.lease == Some(lease.id)).collect()
    };
    if as_json {
        let list = seen.map(|(lease, seen)| entry(lease, &seen, &of(lease), claim_of(lease)));
        return Ok(table::json(&Value::Array(list.collect()))?);
    }
    if leases.is_empty() {
        return Ok(table::line("no shares held")?);
    }
    let names = GpuNames::of(&config);
    let headings = ["CONTAINER", "STATE", "PID", "GPU", "MEMORY", "USED", "COMPUTE", "GPU TIME", "AGE"];
    let rows = seen.flat_map(|(lease, seen)| {
        let cheats = !of(lease).is_empty();
        rows(&held_by(lease, claim_of(lease)), lease, &seen, &names, cheats)
    });
    table::print(headings, rows)?;
    for violation in &violations {
        let word = if violation.lease.is_some() { "CHEATING" } else { "STRANGER" };
        table::line(&format!("{word}: {violation}"))?;
    }
    Ok(())
}

/// What can be seen of a container's use of its share.
pub struct Seen {
    /// The container's own books.
    books: Result<Usage, UsageError>,
    throttles: [Throttle; MAX_DEVICES],
    measured: [Measurement; MAX_DEVICES],
    now: Clock,
}

impl Seen {
    /// Reads what can be seen of `lease`, whose region lies below the folder `state`. `running` tells living
    /// processes from those that ended.
    pub fn of(state: &Path, lease: &Lease, running: &Running) -> Self {
        let region = Region::of(state, lease.id);
        Self {
            // Host memory has the line after the GPUs'.
            books: region.read_usage(running, lease.grants.len() + usize::from(lends(lease))),
            throttles: region.read_throttles().unwrap_or_default(),
            measured: region.measured().unwrap_or_default(),
            now: Clock::now(),
        }
    }

    /// As [`Seen::of`], with the books' file kept open in `files` from look to look.
    pub fn kept(state: &Path, lease: &Lease, running: &Running, files: &mut HashMap<i64, File>) -> Self {
        let region = Region::of(state, lease.id);
        if !files.contains_key(&lease.id)
            && let Ok(file) = region.open_books()
        {
            files.insert(lease.id, file);
        }
        let Some(file) = files.get(&lease.id) else { return Self::of(state, lease, running) };
        Self {
            books: Region::usage_in(file, running, lease.grants.len() + usize::from(lends(lease))),
            throttles: Region::throttles_in(file).unwrap_or_default(),
            measured: region.measured().unwrap_or_default(),
            now: Clock::now(),
        }
    }

    /// What the container's living processes hold on the GPU of grant `line`, by the container's books.
    pub fn used(&self, line: usize) -> Option<DeviceMemory> {
        let books = self.books.as_ref().ok()?;
        books.devices.get(line).map(|device| DeviceMemory::from_bytes(device.bytes))
    }

    /// Host memory that the container's living processes hold in place of GPUs', by the container's books.
    pub fn host_used(&self, lease: &Lease) -> Option<DeviceMemory> {
        self.used(lease.grants.len()).filter(|_| lends(lease))
    }

    /// What the meter says of the GPU of grant `line`; `None` where no meter runs.
    pub fn fresh(&self, line: usize) -> Option<&Measurement> {
        let ago = |written: u64| self.now.monotonic.checked_sub(written);
        self.measured.get(line).filter(|value| ago(value.written).is_some_and(|ago| ago < STALE))
    }

    /// Allocations that the limit refused, by the container's own books.
    pub fn refused(&self) -> u64 {
        self.books.as_ref().map_or(0, |usage| usage.refused)
    }

    /// How long launches were held back on the GPU of grant `line`, in nanoseconds.
    pub fn throttled(&self, line: usize) -> u64 {
        self.throttles.get(line).map_or(0, |words| words.throttled)
    }

    /// GPU time in nanoseconds on the GPU of grant `line`; `None` if it was never measured.
    pub fn gpu_time(&self, line: usize) -> Option<u64> {
        self.measured.get(line).filter(|value| value.until > 0).map(|value| value.own_nanoseconds)
    }

    fn is_damaged(&self) -> bool {
        matches!(self.books, Err(UsageError::Damaged(_)))
    }
}

/// Who holds a lease: the containers, and the resource claim by its name in the cluster.
fn held_by(lease: &Lease, claim: Option<&ResourceClaim>) -> String {
    let claims = |member: &Member| claim.filter(|claim| is_claim(member, claim));
    let holder = |member: &Member| match claims(member) {
        Some(claim) => format!("claim {} ({})", claim.name, claim.name.uid),
        None => named(member),
    };
    lease.members().map(holder).collect::<Vec<_>>().join(", ")
}

/// Whether host memory may stand in for the GPUs'.
fn lends(lease: &Lease) -> bool {
    lease.host_memory > DeviceMemory::ZERO
}

/// Whether the memory of a grant is a limit, and not what the container says that it needs.
pub fn is_limited(lease: &Lease) -> bool {
    lease.enforcement != Enforcement::TimeSliced
}

fn memory(lease: &Lease, grant: &Grant) -> String {
    match grant.memory {
        memory if let Some(bounds) = lease.elastic => {
            let host = if lends(lease) { format!(" + {} host", lease.host_memory) } else { String::new() };
            format!("{memory} ({} to {}){host}", bounds.least, bounds.most)
        }
        memory if lends(lease) => format!("{memory} + {} host", lease.host_memory),
        memory if is_limited(lease) => memory.to_string(),
        DeviceMemory::ZERO => "no limit".to_owned(),
        needed => format!("no limit ({needed})"),
    }
}

fn rows(holders: &str, lease: &Lease, seen: &Seen, names: &GpuNames, cheats: bool) -> Vec<[String; 9]> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let rows = lease.grants.iter().enumerate().map(|(line, grant)| {
        let host = seen.host_used(lease).filter(|_| line == 0);
        let host = host.map_or_else(String::new, |host| format!(" + {host} host"));
        let used = seen.used(line).map(|used| format!("{used}{host}"));
        let seconds = seen.gpu_time(line).map(|time| Duration::from_nanos(time).as_secs_f64());
        [
            holders.to_owned(),
            if cheats { "CHEATING".to_owned() } else { state(lease).to_owned() },
            or_dash(first_pid(lease).map(|pid| pid.to_string())),
            names.name(grant.gpu),
            memory(lease, grant),
            if seen.is_damaged() { "damaged".to_owned() } else { or_dash(used) },
            match (lease.enforcement, grant.cores) {
                (unlimited @ (Enforcement::WholeGpu | Enforcement::TimeSliced), _) => {
                    unlimited.terms().company.mode().name().to_owned()
                }
                (Enforcement::Mps, None) => Mode::Mps.name().to_owned(),
                (Enforcement::Mps, Some(cores)) => format!("{cores} {}", Mode::Mps.name()),
                (_, None) => "no limit".to_owned(),
                (_, Some(cores)) => match lease.compute_policy {
                    ComputePolicy::Fixed => cores.to_string(),
                    ComputePolicy::Burst if lease.ceiling < Cores::ALL => {
                        format!("{cores} burst {}", lease.ceiling)
                    }
                    ComputePolicy::Burst => format!("{cores} burst"),
                    // The percent is granted to nobody else, and does not limit the container.
                    ComputePolicy::None => format!("{cores} kept"),
                },
            },
            or_dash(seconds.map(|seconds| format!("{seconds:.1}s"))),
            age(lease.granted_at),
        ]
    });
    rows.collect()
}

fn entry(lease: &Lease, seen: &Seen, violations: &[&Violation], claim: Option<&ResourceClaim>) -> Value {
    let gpus = lease.grants.iter().enumerate().map(|(line, grant)| {
        let fresh = seen.fresh(line);
        let used = seen.used(line).map(DeviceMemory::bytes);
        // 0 means nothing is held, or that the driver does not tell.
        let driver = fresh.map(|value| value.memory_bytes).filter(|bytes| *bytes > 0);
        let drift = driver.zip(used).map(|(driver, used)| i128::from(driver) - i128::from(used));
        json!({
            "uuid": grant.gpu.to_string(),
            "memory_bytes": is_limited(lease).then(|| grant.memory.bytes()),
            "needed_bytes": (!is_limited(lease)).then(|| grant.memory.bytes()),
            "used_bytes": used,
            "driver_bytes": driver,
            "drift": drift.and_then(|drift| i64::try_from(drift).ok()),
            "unbooked_bytes": fresh.map(|value| value.unbooked_bytes),
            "cores": grant.cores.map(|cores| cores.percent()),
            "burst_share": fresh.map(|value| f64::from(value.burst_share) / 100.0).filter(|share| *share > 0.0),
            "gpu_nanoseconds": seen.gpu_time(line),
            "throttled_nanoseconds": seen.throttles.get(line).map(|words| words.throttled),
        })
    });
    json!({
        "root": lease.member.key.root,
        "id": lease.member.key.container,
        "containers": lease.members().map(container).collect::<Vec<_>>(),
        "claim": claim.map(|claim| json!({
            "namespace": claim.name.namespace, "name": claim.name.name, "uid": claim.name.uid,
        })),
        "state": state(lease),
        "mode": lease.enforcement.terms().company.mode().name(),
        "pid": first_pid(lease),
        "priority": lease.priority.level(),
        "compute_policy": lease.compute_policy.name(),
        "burst_ceiling": lease.ceiling.percent(),
        "host_memory_bytes": lease.host_memory.bytes(),
        "memory_limit_bytes": lease.elastic.map(|bounds| bounds.most.bytes()),
        "memory_promised_bytes": lease.elastic.map(|bounds| bounds.least.bytes()),
        "host_used_bytes": seen.host_used(lease).map(DeviceMemory::bytes),
        "granted_at": lease.granted_at,
        "books": if seen.is_damaged() { "damaged" } else { "ok" },
        "violations": violations,
        "gpus": gpus.collect::<Vec<_>>(),
    })
}

fn container(member: &Member) -> Value {
    let state = if member.holder.is_gone() { "gone" } else { member.state.name() };
    let pod = member.name.as_ref().map(|name| {
        json!({"namespace": name.namespace, "name": name.pod, "uid": name.uid, "container": name.container})
    });
    let called = &member.called;
    json!({
        "id": member.key.container, "state": state, "pid": pid(&member.holder), "pod": pod,
        "name": called.name, "image": called.image, "project": called.project,
    })
}

/// The first process of the container that holds the lease longest; `None` for a claim without containers.
pub fn first_pid(lease: &Lease) -> Option<i32> {
    lease.members().find_map(|member| pid(&member.holder))
}

fn pid(holder: &Holder) -> Option<i32> {
    Some(holder.pid).filter(|_| !holder.is_agent())
}

/// The lease's state; "gone" once all its containers are, until the next sweep.
pub fn state(lease: &Lease) -> &'static str {
    if lease.is_gone() { "gone" } else { lease.state().name() }
}
