//! `gpushare history`, `sweep` and `release`: the ends of leases.

use std::time::Duration;

use anyhow::{Result, bail};
use gpushare_config::Config;
use gpushare_inject::{Region, Whose, forget_ended, forget_swept, give_back, one_line};
use gpushare_quota::{Release, ReleaseReason};
use serde_json::{Value, json};

use crate::container::{containers, find, listed, named, short};
use crate::node::GpuNames;
use crate::table::age;
use crate::{meter, node, table};

/// How many of the last refusals are shown.
const REFUSALS: usize = 100;

/// Prints past leases and the latest refusals.
pub fn history(as_json: bool) -> Result<()> {
    let config = Config::load()?;
    let (state, store) = node::store(&config)?;
    let past = store.history();
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

/// Releases the leases of containers that are gone, removes region folders without a lease, and rewrites
/// limits files that differ from their leases.
pub fn sweep(as_json: bool) -> Result<()> {
    let config = Config::load()?;
    config.log.start();
    let (state, store) = node::store(&config)?;
    let swept = store.sweep()?;
    swept.iter().for_each(|swept| forget_swept(&state, swept));
    forget_ended(&state, &store)?;
    let living = store.leases()?;
    for lease in living.iter().filter(|lease| lease.enforcement.terms().has_region) {
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
    if !force && lease.member.holder.is_agent() {
        bail!(
            "{} is a resource claim of Kubernetes: it is given back when its pods are deleted; without the cluster's agent use \
             --force, after which no container joins it any more",
            named(&lease.member)
        );
    }
    if !force && !lease.member.holder.is_gone() {
        bail!(
            "container {} lives: end it, or use --force, after which its memory may be granted twice",
            named(&lease.member)
        );
    }
    let left = give_back(&state, &store, lease.id, key, ReleaseReason::Forced, Whose::Anyones)?;
    let others = lease.others.iter().map(named).collect::<Vec<_>>().join(", ");
    Ok(table::line(&match left {
        Release::Left => format!("{} holds its share no more; it is left to {others}", named(&lease.member)),
        _ => format!("gave back the share of {}", named(&lease.member)),
    })?)
}
