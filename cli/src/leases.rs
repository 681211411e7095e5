//! `gpushare history`, `sweep` and `release`: the ends of leases.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use gpushare_config::Config;
use gpushare_inject::{Region, one_line};
use gpushare_quota::{Lease, ReleaseReason, Store};
use gpushare_request::Mode;
use serde_json::{Value, json};

use crate::node::GpuNames;
use crate::{meter, node, table};

/// Prints past leases.
pub fn history(as_json: bool) -> Result<()> {
    let config = Config::load()?;
    let (_, store) = node::store(&config)?;
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
    if past.is_empty() {
        return Ok(table::line("no share was given back yet")?);
    }
    let names = GpuNames::of(&config);
    let rows = past.iter().map(|lease| {
        let held = Duration::from_secs(lease.released_at.saturating_sub(lease.granted_at));
        let held = humantime::format_duration(held).to_string();
        [
            short(&lease.key.container),
            names.in_text(&lease.grants),
            held,
            age(lease.released_at),
            lease.reason.clone(),
        ]
    });
    Ok(table::print(["CONTAINER", "SHARE", "HELD", "ENDED AGO", "REASON"], rows)?)
}

/// Releases what nobody holds any more, takes away region folders without a lease, and mends limits files that differ from
/// their leases.
pub fn sweep(as_json: bool) -> Result<()> {
    let config = Config::load()?;
    config.log.start();
    let (state, store) = node::store(&config)?;
    let swept = store.sweep()?;
    let regions = Region::existing(state.path());
    let living = store.leases()?;
    for id in regions.into_iter().filter(|id| !living.iter().any(|lease| lease.id == *id)) {
        Region::of(state.path(), id).remove();
    }
    for lease in living.iter().filter(|lease| lease.mode == Mode::Share) {
        let container = short(&lease.key.container);
        match meter::mend(&store, &Region::of(state.path(), lease.id), lease) {
            Ok(false) => {}
            Ok(true) => {
                eprintln!("gpushare: the limits file of {container} differed from its lease: rewritten")
            }
            Err(error) => eprintln!("gpushare: the limits file of {container}: {}", one_line(error.as_ref())),
        }
    }
    if as_json {
        let list = swept.iter().map(|lease| json!({"root": lease.key.root, "id": lease.key.container}));
        return Ok(table::json(&Value::Array(list.collect()))?);
    }
    if swept.is_empty() {
        return Ok(table::line("nothing to give back")?);
    }
    let rows = swept.iter().map(|lease| [short(&lease.key.container), lease.key.root.clone()]);
    Ok(table::print(["SWEPT", "ROOT"], rows)?)
}

/// Releases one container's lease.
pub fn release(id: &str, root: Option<&str>, force: bool) -> Result<()> {
    let config = Config::load()?;
    config.log.start();
    let (state, store) = node::store(&config)?;
    let lease = find(&store, id, root)?;
    if !force && !lease.holder.is_gone() {
        bail!(
            "container {} lives: end it, or use --force, after which its memory may be granted twice",
            short(id)
        );
    }
    store.release(lease.id, &lease.key, ReleaseReason::Forced)?;
    Region::of(state.path(), lease.id).remove();
    Ok(table::line(&format!("gave back the share of {}", short(&lease.key.container)))?)
}

/// The living lease of the container whose id is or begins with `id`.
pub fn find(store: &Store, id: &str, root: Option<&str>) -> Result<Lease> {
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
        (None, _) => bail!(
            "no container {id:?} holds a share; give its id or the beginning of it, as `gpushare ps` shows it, and no name of \
             docker's"
        ),
    }
}

/// Engines' ids have 64 digits, of which people use the first 12.
pub fn short(id: &str) -> String {
    if id.len() == 64 { id.chars().take(12).collect() } else { id.to_owned() }
}

/// How long ago `since`, in seconds since 1970, was.
pub fn age(since: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    humantime::format_duration(Duration::from_secs(now.saturating_sub(since))).to_string()
}
