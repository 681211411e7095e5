//! `delete`: gives a lease back that nobody else will.
//!
//! In normal life the poststop hook does it. After a failed `create` engines call nothing but `delete --force`, and
//! crun runs no hook then; a container that the runtime has forgotten is ended first ([`orphan`]). The lease of a living container is left alone: released early it would be granted twice.

use std::convert::Infallible;

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inject::Region;
use gpushare_quota::{LeaseKey, ReleaseReason, StateFolder, Store};

use crate::args::Args;
use crate::{create, exec, orphan};

/// Releases the lease if its holder is proved gone, and becomes the low-level runtime whatever comes of it.
pub fn delete(args: &Args, config: &Config) -> Result<Infallible> {
    let quota = config.paths.state.join("quota.db");
    if let Ok(key) = create::key(args)
        && quota.exists()
        && let Err(error) = release(&key, args, config)
    {
        tracing::warn!(container = %key.container, error = %format!("{error:#}"), "lease left for the sweep");
    }
    exec::low_level(exec::find(config)?)
}

fn release(key: &LeaseKey, args: &Args, config: &Config) -> Result<()> {
    let state = StateFolder::open(&config.paths.state)?;
    let store = Store::open(state.path())?;
    let Some(lease) = store.lease(key)? else { return Ok(()) };
    if args.force {
        orphan::end(&lease, args, exec::find(config)?);
    }
    if store.release_if_gone(lease.id, key, ReleaseReason::Ended)? {
        Region::of(state.path(), lease.id).remove();
    }
    Ok(())
}
