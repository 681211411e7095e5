//! `gpushare mps serve`: runs NVIDIA's MPS control daemon on each GPU that containers share in mode mps.
//!
//! One process per node, in the foreground. It follows the leases: a GPU's daemon starts with the first MPS
//! share and ends after the last. A daemon outlives this process, which takes it over when it starts again,
//! so an update of gpushare ends no container's work.
//!
//! What was done stands in the GPU's folder before it is done. Whatever is killed at whatever point, the next
//! `serve` finds all of it there, or among the processes by their pipe folder.

mod compute_mode;
mod daemon;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, bail};
use clap::Subcommand;
use gpushare_config::Config;
use gpushare_inject::{MpsFolder, one_line};
use gpushare_inventory::GpuUuid;
use gpushare_quota::{Company, Store};

use self::daemon::Daemon;
pub use self::daemon::is_of_mps;
use crate::{lock, node};

#[derive(Subcommand)]
pub enum Mps {
    /// Runs a control daemon on each GPU that containers share in mode mps; one process per node, in the
    /// foreground.
    Serve,
}

/// Time between two looks at the leases and the daemons.
const PAUSE: Duration = Duration::from_millis(20);
/// Time until a daemon that could not be started is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Time between two questions that a daemon must answer.
const ASK: Duration = Duration::from_secs(5);

/// Serves until the process is ended.
pub fn serve() -> Result<()> {
    let config = Config::load()?;
    // Under systemd this is the journal.
    config.log.start_on(std::io::stderr);
    let (state, store) = node::store(&config)?;
    DirBuilder::new().mode(0o700).recursive(true).create(MpsFolder::all(state.path()))?;
    let Some(_only) = lock::take(&MpsFolder::lock(state.path()))? else {
        bail!("another gpushare mps serve runs on this node")
    };
    tracing::info!("MPS is served");
    let mut ledger = Ledger { store: &store, seen: None, read: None, wanted: BTreeSet::new() };
    // No daemon ends before it is known who needs it.
    while !ledger.read() {
        sleep(RETRY);
    }
    let mut served: BTreeMap<GpuUuid, Served> = BTreeMap::new();
    for folder in MpsFolder::existing(state.path()) {
        served.insert(folder.gpu(), Served::of(folder, &config));
    }
    loop {
        for gpu in ledger.wanted() {
            served.entry(*gpu).or_insert_with(|| Served::of(MpsFolder::of(state.path(), *gpu), &config));
        }
        for one in served.values_mut() {
            one.step(&mut ledger);
        }
        served.retain(|_, one| !one.is_over);
        sleep(PAUSE);
    }
}

/// Which GPUs are shared by MPS, as the quota store last said.
struct Ledger<'a> {
    store: &'a Store,
    /// When it was last changed, as far as it was read.
    seen: Option<SystemTime>,
    /// When it was last read.
    read: Option<Instant>,
    wanted: BTreeSet<GpuUuid>,
}

impl Ledger<'_> {
    fn wanted(&mut self) -> &BTreeSet<GpuUuid> {
        let change = self.store.last_change();
        // Two changes of one tick of the clock have one time.
        let is_old = self.read.is_none_or(|read| read.elapsed() >= RETRY);
        if (change.is_none() || change != self.seen || is_old) && self.read() {
            self.seen = change;
        }
        &self.wanted
    }

    /// Reads the store as it is now, and returns whether it could be read. If not, what is known stays.
    fn read(&mut self) -> bool {
        self.read = Some(Instant::now());
        let leases = match self.store.leases() {
            Ok(leases) => leases,
            Err(error) => {
                tracing::warn!(error = one_line(&error), "the store cannot be asked");
                return false;
            }
        };
        let by_mps = leases.iter().filter(|lease| lease.enforcement.terms().company == Company::Mps);
        self.wanted = by_mps.flat_map(|lease| &lease.grants).map(|grant| grant.gpu).collect();
        true
    }
}

/// One GPU that is shared by MPS, or was.
struct Served<'a> {
    daemon: Daemon<'a>,
    folder: MpsFolder,
    /// When the last question or the last try was.
    last: Option<Instant>,
    /// Whether the last question was not answered, or the last try failed.
    is_failing: bool,
    is_over: bool,
}

impl<'a> Served<'a> {
    fn of(folder: MpsFolder, config: &'a Config) -> Self {
        let daemon = Daemon::of(folder.clone(), config);
        Self { daemon, folder, last: None, is_failing: false, is_over: false }
    }

    /// Starts, restarts, asks or ends the daemon, as the leases want it.
    fn step(&mut self, ledger: &mut Ledger) {
        let is_wanted = ledger.wanted().contains(&self.folder.gpu());
        let pause = if is_wanted && self.daemon.lives() && !self.is_failing { ASK } else { RETRY };
        let is_due = self.last.is_none_or(|last| last.elapsed() >= pause);
        let is_first = self.last.is_none();
        match (is_wanted, self.daemon.lives()) {
            (true, true) if is_due => {
                let answered = self.daemon.ask();
                self.note(answered.and_then(|()| self.daemon.publish()));
            }
            (true, false) if is_due || !self.is_failing => {
                if !is_first && !self.is_failing {
                    tracing::warn!(gpu = %self.folder.gpu(), "the MPS daemon has ended and is started anew");
                }
                let started = self.daemon.start();
                self.note(started);
            }
            (false, _) if is_due || !self.is_failing => self.end(ledger),
            _ => {}
        }
    }

    /// Ends the daemon, unless a container came meanwhile: one that saw the mark `ready` has its lease in the
    /// store since before the mark was taken away.
    fn end(&mut self, ledger: &mut Ledger) {
        let _ = fs::remove_file(self.folder.ready());
        if !ledger.read() {
            // Whoever came meanwhile waits for the next look, in a second.
            (self.last, self.is_failing) = (Some(Instant::now()), true);
            return;
        }
        if ledger.wanted.contains(&self.folder.gpu()) {
            self.last = None;
            return;
        }
        let ended = self.daemon.end();
        self.is_over = ended.is_ok();
        self.note(ended);
        if self.is_over {
            let _ = fs::remove_dir_all(self.folder.path());
            tracing::info!(gpu = %self.folder.gpu(), "MPS ended");
        }
    }

    /// Tells waiting containers, and the log, what cannot be done, once as long as it stays so.
    fn note(&mut self, done: Result<()>) {
        self.last = Some(Instant::now());
        let was_failing = std::mem::replace(&mut self.is_failing, done.is_err());
        let Err(error) = done else {
            let _ = fs::remove_file(self.folder.error());
            return;
        };
        let why = one_line(error.as_ref());
        let _ = fs::remove_file(self.folder.ready());
        // A container that waits never reads half of it.
        let new = self.folder.error().with_extension("new");
        let _ = fs::write(&new, &why).and_then(|()| fs::rename(&new, self.folder.error()));
        if !was_failing {
            tracing::error!(gpu = %self.folder.gpu(), why, "MPS does not run");
        }
    }
}
