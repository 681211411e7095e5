//! `gpushare sweep` and `release`: the ends of leases.

use std::time::{Duration, SystemTime};

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inject::{Region, Whose, forget_ended, forget_swept, give_back, one_line};
use gpushare_quota::{Release, ReleaseReason, Swept};
use schemars::JsonSchema;
use serde::Serialize;

use crate::container::{containers, find, named, short};
use crate::failure::Failure;
use crate::{answer, meter, node, table};

/// What the history has from before is forgotten: 400 days ago, so that a year can be compared with the last.
const OLDEST: Duration = Duration::from_secs(400 * 24 * 3600);

/// The shares of containers that were gone.
#[derive(Serialize, JsonSchema)]
pub struct SweptShares {
    swept: Vec<SweptShare>,
}

/// A share that was given back.
#[derive(Serialize, JsonSchema)]
struct SweptShare {
    /// The runtime root; empty where the engine named none.
    root: String,
    /// The container's id.
    id: String,
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
    state.forget_history_before(SystemTime::now().checked_sub(OLDEST).unwrap_or(SystemTime::UNIX_EPOCH));
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
        let share =
            |swept: &Swept| SweptShare { root: swept.key.root.clone(), id: swept.key.container.clone() };
        return Ok(answer::print(SweptShares { swept: swept.iter().map(share).collect() })?);
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
        return Err(Failure::refused(format!(
            "{} is a resource claim of Kubernetes: it is given back when its pods are deleted; without the cluster's agent use \
             --force, after which no container joins it any more",
            named(&lease.member)
        ))
        .into());
    }
    if !force && !lease.member.holder.is_gone() {
        return Err(Failure::refused(format!(
            "container {} lives: end it, or use --force, after which its memory may be granted twice",
            named(&lease.member)
        ))
        .into());
    }
    let left = give_back(&state, &store, lease.id, key, ReleaseReason::Forced, Whose::Anyones)?;
    let others = lease.others.iter().map(named).collect::<Vec<_>>().join(", ");
    Ok(table::line(&match left {
        Release::Left => format!("{} holds its share no more; it is left to {others}", named(&lease.member)),
        _ => format!("gave back the share of {}", named(&lease.member)),
    })?)
}
