//! `gpushare ps`, `history`, `sweep` and `release`: the leases and their ends.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use gpushare_config::Config;
use gpushare_inject::Region;
use gpushare_inventory::DeviceMemory;
use gpushare_quota::{Lease, ReleaseReason, Store};
use gpushare_region::{USAGE_LEN, Usage, read_usage};
use gpushare_request::Mode;
use serde_json::{Value, json};

use crate::{node, table};

/// Prints the living leases.
pub fn ps(as_json: bool) -> Result<()> {
    let (state, store) = node::store(&Config::load()?)?;
    let leases = store.leases()?;
    if as_json {
        let list = leases.iter().map(|lease| entry(lease, usage(state.path(), lease).as_ref()));
        return Ok(table::json(&Value::Array(list.collect()))?);
    }
    let headings = ["CONTAINER", "STATE", "PID", "GPU", "MEMORY", "USED", "COMPUTE", "AGE"];
    let rows = leases.iter().flat_map(|lease| rows(lease, usage(state.path(), lease).as_ref()));
    Ok(table::print(headings, rows)?)
}

/// Prints past leases.
pub fn history(as_json: bool) -> Result<()> {
    let (_, store) = node::store(&Config::load()?)?;
    let past = store.history()?;
    if as_json {
        let list = past.iter().map(|lease| {
            json!({
                "root": lease.key.root,
                "id": lease.key.container,
                "grants": lease.grants,
                "granted_at": lease.granted_at,
                "released_at": lease.released_at,
                "reason": lease.reason,
            })
        });
        return Ok(table::json(&Value::Array(list.collect()))?);
    }
    let rows = past.iter().map(|lease| {
        let held = Duration::from_secs(lease.released_at.saturating_sub(lease.granted_at));
        let held = humantime::format_duration(held).to_string();
        [
            short(&lease.key.container),
            lease.grants.clone(),
            held,
            age(lease.released_at),
            lease.reason.clone(),
        ]
    });
    Ok(table::print(["CONTAINER", "SHARE", "HELD", "ENDED AGO", "REASON"], rows)?)
}

/// Releases what nobody holds any more, and takes away region folders without a lease.
pub fn sweep(as_json: bool) -> Result<()> {
    let (state, store) = node::store(&Config::load()?)?;
    let swept = store.sweep()?;
    let regions = Region::existing(state.path());
    let living: Vec<i64> = store.leases()?.iter().map(|lease| lease.id).collect();
    for id in regions.into_iter().filter(|id| !living.contains(id)) {
        Region::of(state.path(), id).remove();
    }
    if as_json {
        let list = swept.iter().map(|lease| json!({"root": lease.key.root, "id": lease.key.container}));
        return Ok(table::json(&Value::Array(list.collect()))?);
    }
    let rows = swept.iter().map(|lease| [short(&lease.key.container), lease.key.root.clone()]);
    Ok(table::print(["SWEPT", "ROOT"], rows)?)
}

/// Releases one container's lease.
pub fn release(id: &str, root: Option<&str>, force: bool) -> Result<()> {
    let (state, store) = node::store(&Config::load()?)?;
    let lease = find(&store, id, root)?;
    if !force && !lease.holder.is_gone() {
        bail!(
            "container {} lives: end it, or use --force, after which its memory may be granted twice",
            short(id)
        );
    }
    store.release(lease.id, &lease.key, ReleaseReason::Forced)?;
    Region::of(state.path(), lease.id).remove();
    Ok(())
}

fn find(store: &Store, id: &str, root: Option<&str>) -> Result<Lease> {
    let begins = |lease: &Lease| {
        !id.is_empty()
            && lease.key.container.starts_with(id)
            && root.is_none_or(|root| lease.key.root == root)
    };
    let mut found: Vec<Lease> = store.leases()?.into_iter().filter(begins).collect();
    if found.iter().any(|lease| lease.key.container == id) {
        found.retain(|lease| lease.key.container == id);
    }
    match (found.pop(), found.len()) {
        (Some(lease), 0) => Ok(lease),
        (Some(_), _) => {
            bail!("several containers fit {id:?}; give more of the id, or --root (`gpushare ps --json`)")
        }
        (None, _) => bail!("no container {id:?} holds a share (`gpushare ps`)"),
    }
}

/// The container's own books. It can write the file, so this is what it says, for display and nothing else.
fn usage(state: &Path, lease: &Lease) -> Option<Usage> {
    let file = File::open(Region::of(state, lease.id).usage()).ok()?;
    let mut bytes = Vec::new();
    file.take(u64::try_from(USAGE_LEN).ok()?).read_to_end(&mut bytes).ok()?;
    read_usage(&bytes).ok()
}

fn used(usage: Option<&Usage>, position: usize) -> Option<DeviceMemory> {
    usage.and_then(|usage| usage.devices.get(position)).map(|device| DeviceMemory::from_bytes(device.bytes))
}

fn rows(lease: &Lease, usage: Option<&Usage>) -> Vec<[String; 8]> {
    let rows = lease.grants.iter().enumerate().map(|(position, grant)| {
        let exclusive = lease.mode == Mode::Exclusive;
        let used = used(usage, position).filter(|_| !exclusive);
        [
            short(&lease.key.container),
            state(lease).to_owned(),
            lease.holder.pid.to_string(),
            grant.gpu.to_string().chars().take(12).collect(),
            grant.memory.to_string(),
            used.map_or_else(|| "-".to_owned(), |used| used.to_string()),
            match grant.cores {
                _ if exclusive => "exclusive".to_owned(),
                Some(cores) => cores.to_string(),
                None => "no limit".to_owned(),
            },
            age(lease.granted_at),
        ]
    });
    rows.collect()
}

fn entry(lease: &Lease, usage: Option<&Usage>) -> Value {
    let gpus = lease.grants.iter().enumerate().map(|(position, grant)| {
        json!({
            "uuid": grant.gpu.to_string(),
            "memory_bytes": grant.memory.bytes(),
            "used_bytes": used(usage, position).map(DeviceMemory::bytes),
            "cores": grant.cores.map(|cores| cores.percent()),
        })
    });
    json!({
        "root": lease.key.root,
        "id": lease.key.container,
        "state": state(lease),
        "mode": if lease.mode == Mode::Exclusive { "exclusive" } else { "share" },
        "pid": lease.holder.pid,
        "priority": lease.priority.level(),
        "granted_at": lease.granted_at,
        "gpus": gpus.collect::<Vec<_>>(),
    })
}

/// The lease's state; "gone" for one whose container is, until the next sweep.
fn state(lease: &Lease) -> &'static str {
    if lease.holder.is_gone() { "gone" } else { lease.state.name() }
}

/// Engines' ids have 64 digits, of which people use the first 12.
fn short(id: &str) -> String {
    if id.len() == 64 { id.chars().take(12).collect() } else { id.to_owned() }
}

fn age(since: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    humantime::format_duration(Duration::from_secs(now.saturating_sub(since))).to_string()
}
