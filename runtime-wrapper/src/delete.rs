//! `delete`: gives back the share of a container that has ended, and lets the low-level runtime delete it.
//!
//! The share of a container that has ended is given back first. One that still lives may be ended by the
//! low-level runtime (`delete --force`), so its share is given back after that. A container that the runtime
//! does not know is killed first ([`orphan`]). The share of a container that lives on stays: if it were
//! given back early, it would be granted twice.

use std::convert::Infallible;
use std::os::unix::process::ExitStatusExt;
use std::process::exit;

use anyhow::{Result, bail};
use gpushare_config::Config;
use gpushare_inject::{Whose, give_back};
use gpushare_quota::{Lease, LeaseKey, Release, ReleaseReason, StateFolder, Store};

use crate::args::Args;
use crate::{create, exec, orphan};

/// Gives the share back if its holder is proved to have ended, before or after the low-level runtime's work,
/// and ends as that runtime does. An id that is a path is refused.
pub fn delete(args: &Args, config: &Config) -> Result<Infallible> {
    if let Some(id) = args.id.as_deref().filter(|id| leads_elsewhere(id)) {
        bail!("container id {id:?} is a path, and no name of a container");
    }
    let held = create::key(args).ok().and_then(|key| Held::find(&key, args, config));
    let runtime = exec::find(config)?;
    let Some(held) = held else { return exec::low_level(runtime) };
    let ended = exec::low_level_to_its_end(runtime)?;
    if ended.success() {
        held.lease.member.holder.await_end(orphan::DEADLINE);
    }
    held.give_back();
    exit(ended.code().or_else(|| ended.signal().map(|signal| 128 + signal)).unwrap_or(1))
}

/// Whether the id is a path. crun 1.8 deletes the folder to which such an id leads from its root: any folder
/// of the host.
fn leads_elsewhere(id: &str) -> bool {
    id.contains('/') || matches!(id, "" | "." | "..")
}

/// The share of a container that may still live.
struct Held {
    state: StateFolder,
    store: Store,
    lease: Lease,
}

impl Held {
    /// The container's share, unless it holds none, or could be given back at once.
    fn find(key: &LeaseKey, args: &Args, config: &Config) -> Option<Self> {
        let held = Self::open(key, config).unwrap_or_else(|error| {
            left_for_the_sweep(key, &error);
            None
        })?;
        if args.force
            && let Ok(runtime) = exec::find(config)
        {
            orphan::end(&held.lease.member, args, runtime);
        }
        (held.give_back() == Release::Nothing).then_some(held)
    }

    fn open(key: &LeaseKey, config: &Config) -> Result<Option<Self>> {
        let Some(store) = Store::find(&config.paths.state)? else { return Ok(None) };
        let state = StateFolder::open(&config.paths.state)?;
        Ok(store.lease(key)?.map(|lease| Self { state, store, lease }))
    }

    /// Gives it back if the container is proved gone.
    fn give_back(&self) -> Release {
        let (lease, key) = (self.lease.id, &self.lease.member.key);
        give_back(&self.state, &self.store, lease, key, ReleaseReason::Ended, Whose::GoneOnes).unwrap_or_else(
            |error| {
                left_for_the_sweep(key, &error.into());
                Release::Nothing
            },
        )
    }
}

fn left_for_the_sweep(key: &LeaseKey, error: &anyhow::Error) {
    tracing::warn!(container = %key.container, error = %format!("{error:#}"), "lease left for the sweep");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_is_a_path_leads_elsewhere() {
        for id in ["", ".", "..", "/etc", "../x", "a/b"] {
            assert!(leads_elsewhere(id), "{id:?}");
        }
        for id in ["a", ".hidden", "...", "4f1c", "a.b_c+d-e"] {
            assert!(!leads_elsewhere(id), "{id:?}");
        }
    }
}
