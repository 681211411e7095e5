//! `gpushare pause` and `resume`: stops the programs of a share on their GPUs until they are resumed. They
//! keep their memory, and go on where they were.

use anyhow::{Context, Result};
use gpushare_config::Config;
use gpushare_inject::pause as set;

use crate::container::{containers, find};
use crate::failure::Failure;
use crate::ps::is_paused;
use crate::{node, table};

/// Names the container whose programs are meant.
#[derive(clap::Args)]
pub struct Named {
    /// The container's name, its id or the beginning of that; in a cluster NAMESPACE/POD/CONTAINER.
    /// Containers that share a lease are paused together.
    id: String,
    /// The runtime root, where the id alone is not unique.
    #[arg(long)]
    root: Option<String>,
}

/// Pauses the programs of a share, or lets them run again, and says so.
pub fn pause(named: &Named, pauses: bool) -> Result<()> {
    let config = Config::load()?;
    config.log.start();
    let (state, store) = node::store(&config)?;
    let lease = find(&store, &named.id, named.root.as_deref())?;
    let name = containers(&lease);
    if lease.is_gone() {
        let message = format!("container {name} is gone: its share goes with `gpushare sweep`");
        return Err(Failure::not_found(message).into());
    }
    let was_paused = is_paused(state.path(), &lease);
    let word = if pauses { "pause" } else { "resume" };
    set(state.path(), &lease, pauses).with_context(|| format!("cannot {word} container {name}"))?;
    let what = match (was_paused, pauses) {
        (true, true) => "was paused already",
        (false, false) => "was not paused",
        (_, true) => {
            "is paused: its programs stand still on their GPUs and keep their memory, until `gpushare resume`"
        }
        (_, false) => "runs again",
    };
    table::line(&format!("container {name} {what}"))?;
    Ok(())
}
