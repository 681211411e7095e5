//! `delete`: releases the share of a container that has ended, and lets the low-level runtime delete the
//! container.
//!
//! The share of a container that has ended is released first. A container that still lives may be ended by
//! the low-level runtime (`delete --force`), so its share is released after that. A container that the
//! runtime does not know is killed first ([`orphan`]). The share of a container that lives on stays: if it
//! were released early, it would be granted twice.

use std::convert::Infallible;
use std::os::unix::process::ExitStatusExt;
use std::process::exit;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use gpushare_config::Config;
use gpushare_inject::{Bundle, Whose, give_back, give_back_ended, lease_of_previous_plan, measured};
use gpushare_quota::{Lease, LeaseKey, Release, ReleaseReason, StateFolder, Store, StoreError};

use crate::args::Args;
use crate::{create, exec, orphan};

/// Releases the share if its holder is proved to have ended, before or after the low-level runtime's work,
/// and exits with that runtime's status. Refuses an id that is a path.
pub fn delete(args: &Args, config: &Config) -> Result<Infallible> {
    if let Some(id) = args.id.as_deref().filter(|id| leads_elsewhere(id)) {
        bail!("container id {id:?} is a path, and no name of a container");
    }
    let key = create::key(args).ok();
    let share = key.as_ref().and_then(|key| Share::find(key, args, config));
    let runtime = exec::find(config)?;
    let (Some(key), Some(share)) = (key, share) else { return exec::low_level(runtime) };
    // `delete --force` also succeeds for a container that the runtime does not know.
    let is_known = orphan::is_known(&key, args, runtime);
    let ended = exec::low_level_to_its_end(runtime)?;
    share.give_back(&key, is_known && ended.success());
    exit(ended.code().or_else(|| ended.signal().map(|signal| 128 + signal)).unwrap_or(1))
}

/// Whether the id is a path. crun 1.8 deletes the folder at that path relative to its root, which may be any
/// folder of the host.
fn leads_elsewhere(id: &str) -> bool {
    id.contains('/') || matches!(id, "" | "." | "..")
}

/// The share of a container that the low-level runtime may be about to end.
enum Share {
    /// Its holder may still live.
    Held(Box<Held>),
    /// The store is gone or unreadable, but the bundle names the lease.
    Told { state: StateFolder, lease: i64 },
}

struct Held {
    state: StateFolder,
    store: Store,
    lease: Lease,
}

impl Share {
    /// The container's share, unless it holds none, or it could be released at once.
    fn find(key: &LeaseKey, args: &Args, config: &Config) -> Option<Self> {
        match Held::find(key, config) {
            Ok(None) => None,
            Ok(Some(held)) => {
                if let Ok(runtime) = exec::find(config)
                    && args.force
                {
                    orphan::end(&held.lease.member, args, runtime);
                }
                (held.give_back(key, Whose::GoneOnes) == Release::Nothing).then(|| Self::Held(held.into()))
            }
            Err(error) => {
                let (container, error) = (&key.container, format!("{error:#}"));
                tracing::warn!(%container, %error, "the store cannot be asked");
                Self::told(args, config)
            }
        }
    }

    fn told(args: &Args, config: &Config) -> Option<Self> {
        let bundle = exec::bundle_of(exec::find(config).ok()?, args)?;
        let json = Bundle::open(&bundle, None).ok()?.json().ok()?;
        let lease = lease_of_previous_plan(&json, &config.paths.hook)?;
        Some(Self::Told { state: StateFolder::open(&config.paths.state).ok()?, lease })
    }

    /// Releases it after the low-level runtime's work. `deleted`: that runtime knew the container and has
    /// deleted it.
    fn give_back(&self, key: &LeaseKey, deleted: bool) {
        match self {
            Self::Held(held) => {
                let holder = &held.lease.member.holder;
                let start = Instant::now();
                while deleted && holder.lives() && start.elapsed() < orphan::DEADLINE {
                    sleep(Duration::from_millis(2));
                }
                // Other processes in the container's cgroup are not its own: it is deleted, and its first
                // process has ended.
                let whose = if deleted && !holder.lives() { Whose::Anyones } else { Whose::GoneOnes };
                held.give_back(key, whose);
            }
            Self::Told { state, lease } if deleted => {
                give_back_ended(state, *lease, key).unwrap_or_else(|error| left_for_the_sweep(key, &error));
            }
            Self::Told { .. } => {}
        }
    }
}

impl Held {
    /// # Errors
    /// When the store cannot be read, or was deleted while containers held shares.
    fn find(key: &LeaseKey, config: &Config) -> Result<Option<Self>> {
        let Some(store) = Store::find(&config.paths.state)?.map(measured) else { return Ok(None) };
        let Some(lease) = store.lease(key)? else { return Ok(None) };
        Ok(Some(Self { state: StateFolder::open(&config.paths.state)?, store, lease }))
    }

    fn give_back(&self, key: &LeaseKey, whose: Whose) -> Release {
        let given = give_back(&self.state, &self.store, self.lease.id, key, ReleaseReason::Ended, whose);
        given.unwrap_or_else(|error| {
            left_for_the_sweep(key, &error);
            Release::Nothing
        })
    }
}

fn left_for_the_sweep(key: &LeaseKey, error: &StoreError) {
    tracing::warn!(container = %key.container, %error, "lease left for the sweep");
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
