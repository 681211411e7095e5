//! `gpushare meter`: measures what only the node can see of its containers, and writes it into their `limits`
//! files.
//!
//! One process per node, in the foreground. It reads the driver's samples of GPU time by host pid and tells
//! containers apart by cgroup. It publishes each container's time and memory. No share depends on
//! it. It holds the driver open only while a container holds one.

mod account;
mod driver;
mod elastic;
mod fallback;
mod kept;
mod kernel_log;
mod listed;
mod listen;
mod mend;
mod metered;
mod owner;
mod process;
mod record;
mod response;
mod rules;
mod searches;
mod session;
mod windows;

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gpushare_config::{Config, OnCheating};
use gpushare_inventory::{Node, open_now};
use gpushare_quota::{Lease, Store};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

pub use kernel_log::newest as newest_record;
pub use listen::Telling;
pub use mend::mend;

use self::kept::Kept;
use self::searches::Subject;
use crate::violation::Violation;
use crate::{inventory, lock, node};

/// While there is no container, the store's time stamp is looked at this often, to notice a new one.
const IDLE: Duration = Duration::from_millis(100);
/// How often a file is tried again that somebody has a lease on.
const LEASED: Duration = Duration::from_secs(1);

/// The file that the node's meter has locked.
pub fn lock_file(state: &Path) -> PathBuf {
    state.join("meter.lock")
}

/// Measures until the process is ended.
pub fn meter(telling: Telling) -> Result<()> {
    let config = Config::load()?;
    // Under systemd this is the journal.
    config.log.start_on(std::io::stderr);
    let (state, store) = node::store(&config)?;
    // The meter needs a few open files for each container, and some for each process on a GPU.
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
    let Some(_only) = lock::take(&lock_file(state.path()))? else {
        bail!("another gpushare meter runs on this node")
    };
    kernel_log::watch(&config, state.path());
    elastic::watch(&config, state.path());
    telling.start(&config)?;
    let used = rules::LastUse::default();
    rules::watch(&config, &used);
    if config.meter.on_cheating == OnCheating::Cap {
        tracing::warn!("meter.on_cheating = \"cap\" counts as \"report\": nothing stops containers any more");
    }
    tracing::info!("meter started");
    // Held from the beginning: whoever has a lease (fcntl(2)) on one before makes others wait.
    let (mut kept, mut is_told) = (None, false);
    loop {
        wait_for_shares(&store, || hold(&mut kept, &config, state.path()))?;
        let node = Node::open(&config.roots)?;
        let library = node.driver.libnvidia_ml()?;
        // The loader would wait for a container that has a lease on the library.
        match open_now(&library) {
            Ok(_held) => {
                let nvml = inventory::nvml(&library)?;
                session::run(Some(&nvml), &node, state.path(), &store, &config, &used)?;
                // The driver may be another one than before.
                let before = kept.replace(Kept::of(&node, &config, state.path()));
                hold(&mut kept, &config, state.path());
                drop(before);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                hold(&mut kept, &config, state.path());
                let library = library.display();
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!(%library, "somebody has a lease (F_SETLEASE) on it: nothing is measured until it is over");
                }
                // The kernel ends the lease after a while. Until then, search without NVML and report its
                // holder.
                session::run(None, &node, state.path(), &store, &config, &used)?;
            }
            Err(error) => {
                return Err(error).with_context(|| format!("cannot open {}", library.display()));
            }
        }
    }
}

/// What a single look can tell of containers that hold `leases`, for a node where no meter runs. It has no
/// figures of the driver and knows no processes on GPUs.
pub fn look_once(config: &Config, state: &Path, leases: &[Lease]) -> Vec<Violation> {
    let Ok(node) = Node::open(&config.roots) else { return Vec::new() };
    let Ok(libcuda) = node.driver.libcuda() else { return Vec::new() };
    let shares: Vec<Lease> =
        leases.iter().filter(|lease| lease.enforcement.terms().has_region).cloned().collect();
    let mut kept = Kept::of(&node, config, state);
    kept.hold(&shares);
    let mut found = searches::once(state, &libcuda, Subject::of(&kept, &shares, HashMap::new()));
    found.extend(kept.leased_by_nobody(&found));
    found
}

/// Opens the files that the meter keeps open, as far as they are not yet. Without a driver there are none.
fn hold(kept: &mut Option<Kept>, config: &Config, state: &Path) {
    if kept.is_none() {
        *kept = Node::open(&config.roots).ok().map(|node| Kept::of(&node, config, state));
    }
    kept.iter_mut().for_each(|kept| kept.hold(&[]));
}

/// Returns once a container holds a share. Meanwhile it does `each_second`.
fn wait_for_shares(store: &Store, mut each_second: impl FnMut()) -> Result<()> {
    let mut seen = None;
    let mut done: Option<Instant> = None;
    loop {
        if done.is_none_or(|done| done.elapsed() >= LEASED) {
            each_second();
            done = Some(Instant::now());
        }
        let change = store.last_change();
        if (change.is_none() || change != seen) && !shares(store)?.is_empty() {
            return Ok(());
        }
        seen = change;
        sleep(IDLE);
    }
}

/// The leases that have limits to hold; those of whole GPUs have none.
fn shares(store: &Store) -> Result<Vec<Lease>> {
    let mut leases = store.leases()?;
    leases.retain(|lease| lease.enforcement.terms().has_region);
    Ok(leases)
}
