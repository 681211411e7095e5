//! `delete`: releases the lease of a container that has ended, before the low-level runtime deletes it.
//!
//! The poststop hook, which that runtime runs next, then finds nothing to release. After a failed `create`
//! engines call only `delete --force`, and crun runs no hook then. A container that the runtime does not know
//! is killed first ([`orphan`]). The lease of a running container stays: if it were released early, the same
//! share would be granted twice.

use std::convert::Infallible;

use anyhow::{Result, bail};
use gpushare_config::Config;
use gpushare_inject::{Whose, give_back};
use gpushare_quota::{LeaseKey, ReleaseReason, StateFolder, Store};

use crate::args::Args;
use crate::{create, exec, orphan};

/// Releases the lease if its holder is proved to have ended, and becomes the low-level runtime in any case.
/// An id that is a path is refused.
pub fn delete(args: &Args, config: &Config) -> Result<Infallible> {
    if let Some(id) = args.id.as_deref().filter(|id| leads_elsewhere(id)) {
        bail!("container id {id:?} is a path, and no name of a container");
    }
    if let Ok(key) = create::key(args)
        && let Err(error) = release(&key, args, config)
    {
        tracing::warn!(container = %key.container, error = %format!("{error:#}"), "lease left for the sweep");
    }
    exec::low_level(exec::find(config)?)
}

/// Whether the id is a path. crun 1.8 deletes the folder to which such an id leads from its root: any folder
/// of the host.
fn leads_elsewhere(id: &str) -> bool {
    id.contains('/') || matches!(id, "" | "." | "..")
}

fn release(key: &LeaseKey, args: &Args, config: &Config) -> Result<()> {
    let Some(store) = Store::find(&config.paths.state)? else { return Ok(()) };
    let state = StateFolder::open(&config.paths.state)?;
    let Some(lease) = store.lease(key)? else { return Ok(()) };
    if args.force {
        orphan::end(&lease.member, args, exec::find(config)?);
    }
    give_back(&state, &store, lease.id, key, ReleaseReason::Ended, Whose::GoneOnes)?;
    Ok(())
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
