//! `gpushare history`, `sweep` and `release`: the ends of leases.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use gpushare_config::Config;
use gpushare_inject::{Region, forget, one_line};
use gpushare_quota::{Lease, LeaseKey, Release, ReleaseReason, Store};
use gpushare_request::Mode;
use serde_json::{Value, json};

use crate::node::GpuNames;
use crate::{meter, node, table};

/// How many of the last refusals are shown.
const REFUSALS: usize = 100;

/// Prints past leases and what was refused of late.
pub fn history(as_json: bool) -> Result<()> {
    let config = Config::load()?;
    let (state, store) = node::store(&config)?;
    let past = store.history()?;
    let mut refusals = state.refusals();
    refusals.truncate(REFUSALS);
    if as_json {
        let refused = refusals.iter().map(|refused| {
            json!({
                "id": refused.container,
                "released_at": refused.at,
                "reason": "refused",
                "text": refused.reason,
            })
        });
        let ended = past.iter().map(|lease| {
            json!({
                "root": lease.key.root,
                "id": lease.key.container,
                "others": lease.others,
                "grants": lease.grants,
                "granted_at": lease.granted_at,
                "released_at": lease.released_at,
                "reason": lease.reason,
            })
        });
        return Ok(table::json(&Value::Array(ended.chain(refused).collect()))?);
    }
    if past.is_empty() && refusals.is_empty() {
        return Ok(table::line("no share was given back yet, and none refused")?);
    }
    let names = GpuNames::of(&config);
    let ended = past.iter().map(|lease| {
        let held = Duration::from_secs(lease.released_at.saturating_sub(lease.granted_at));
        let held = humantime::format_duration(held).to_string();
        let others = lease.others.iter().map(String::as_str);
        let row = [
            listed([lease.key.container.as_str()].into_iter().chain(others)),
            names.in_text(&lease.grants),
            held,
            age(lease.released_at),
            lease.reason.clone(),
        ];
        (lease.released_at, row)
    });
    let refused = refusals.iter().map(|refused| {
        let none = || "-".to_owned();
        let reason = format!("refused: {}", refused.reason);
        (refused.at, [short(&refused.container), none(), none(), age(refused.at), reason])
    });
    let mut rows: Vec<_> = ended.chain(refused).collect();
    rows.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    let rows = rows.into_iter().map(|(_, row)| row);
    Ok(table::print(["CONTAINER", "SHARE", "HELD", "ENDED AGO", "REASON"], rows)?)
}

/// Releases what nobody holds any more, takes away region folders without a lease, and mends limits files that differ from
/// their leases.
pub fn sweep(as_json: bool) -> Result<()> {
    let config = Config::load()?;
    config.log.start();
    let (state, store) = node::store(&config)?;
    let swept = store.sweep()?;
    swept.iter().for_each(|swept| forget(&state, swept.lease, &swept.key, swept.left));
    let regions = Region::existing(state.path());
    let living = store.leases()?;
    for id in regions.into_iter().filter(|id| !living.iter().any(|lease| lease.id == *id)) {
        Region::of(state.path(), id).remove();
    }
    for lease in living.iter().filter(|lease| lease.mode == Mode::Share) {
        let container = containers(lease);
        match meter::mend(&store, &Region::of(state.path(), lease.id), lease) {
            Ok(false) => {}
            Ok(true) => {
                eprintln!("gpushare: the limits file of {container} differed from its lease: rewritten")
            }
            Err(error) => eprintln!("gpushare: the limits file of {container}: {}", one_line(error.as_ref())),
        }
    }
    if as_json {
        let list = swept.iter().map(|swept| json!({"root": swept.key.root, "id": swept.key.container}));
        return Ok(table::json(&Value::Array(list.collect()))?);
    }
    if swept.is_empty() {
        return Ok(table::line("nothing to give back")?);
    }
    let rows = swept.iter().map(|swept| [short(&swept.key.container), swept.key.root.clone()]);
    Ok(table::print(["SWEPT", "ROOT"], rows)?)
}

/// Takes one container out of its lease, which ends if no other container holds it.
pub fn release(id: &str, root: Option<&str>, force: bool) -> Result<()> {
    let config = Config::load()?;
    config.log.start();
    let (state, store) = node::store(&config)?;
    let lease = find(&store, id, root)?;
    let key = &lease.member.key;
    if !force && !lease.member.holder.is_gone() {
        bail!(
            "container {} lives: end it, or use --force, after which its memory may be granted twice",
            short(id)
        );
    }
    let left = store.release(lease.id, key, ReleaseReason::Forced)?;
    forget(&state, lease.id, key, left);
    let others = listed(lease.others.iter().map(|member| member.key.container.as_str()));
    Ok(table::line(&match left {
        Release::Left => format!("{} holds its share no more; it is left to {others}", short(&key.container)),
        _ => format!("gave back the share of {}", short(&key.container)),
    })?)
}

/// The living lease of the container whose id is or begins with `id`, asked by that container.
pub fn find(store: &Store, id: &str, root: Option<&str>) -> Result<Lease> {
    let fits = |key: &LeaseKey| {
        !id.is_empty() && key.container.starts_with(id) && root.is_none_or(|root| key.root == root)
    };
    let leases = store.leases()?;
    let all = leases.iter().flat_map(|lease| lease.members().map(move |member| (lease, &member.key)));
    let mut found: Vec<(&Lease, &LeaseKey)> = all.filter(|(_, key)| fits(key)).collect();
    if found.iter().any(|(_, key)| key.container == id) {
        found.retain(|(_, key)| key.container == id);
    }
    let asked = found.pop().and_then(|(lease, key)| lease.clone().asked_by(|other| other == key));
    match (asked, found.len()) {
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

/// The ids of all containers that hold a lease.
pub fn ids(lease: &Lease) -> Vec<&str> {
    lease.members().map(|member| member.key.container.as_str()).collect()
}

/// The same for people.
pub fn containers(lease: &Lease) -> String {
    listed(ids(lease))
}

fn listed<'a>(ids: impl IntoIterator<Item = &'a str>) -> String {
    ids.into_iter().map(short).collect::<Vec<_>>().join(", ")
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
