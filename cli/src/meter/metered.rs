//! One GPU on which somebody holds a share: what tells its time, and to whom.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use gpushare_config::Meter;
use gpushare_inject::boards;
use gpushare_inventory::{GpuUuid, Node};
use gpushare_quota::{Enforcement, Lease};
use gpushare_schedule::{Recorded, is_over, stay};
use gpushare_supervisor::board::Recorder;

use super::account::Account;
use super::driver::Gpu;
use super::listed::Listed;
use super::owner::Owners;
use super::record::{Recent, Record};
use crate::clock::Clock;

/// How often the driver's samples are asked for at most: more often than it has new ones, since what it tells
/// of several windows at once is their mean.
const SAMPLED: Duration = Duration::from_millis(80);

/// After which time a record is tried again that could not be begun, or went silent.
const RETRY: Duration = Duration::from_secs(60);

/// A GPU on which somebody holds a share.
pub struct Metered<'a> {
    /// When the driver last told samples, or that there are none.
    pub answered: Option<Instant>,
    /// NVML's view of it.
    pub gpu: Gpu<'a>,
    /// Its time and memory by container.
    pub account: Account,
    /// When the account was last published.
    pub written: Option<Instant>,
    /// Its own record of context switches, where it keeps one.
    record: Option<Record>,
    /// When it was last tried to begin it.
    tried: Instant,
    /// Whether samples of the time before the record have been counted.
    is_begun: bool,
    /// Whether the record told the time last.
    is_by_record: bool,
    /// The last figures of the record by lease.
    recorded: BTreeMap<i64, Recorded>,
    /// Where supervisors read who works.
    board: Option<Recorder>,
    /// When samples were last asked for.
    sampled: Option<Instant>,
    /// The processes that the driver lists for this GPU.
    pub listed: Listed,
}

impl<'a> Metered<'a> {
    /// A GPU of which nothing was counted yet.
    pub fn new(gpu: Gpu<'a>, account: Account, record: Option<Record>) -> Self {
        Self {
            answered: None,
            gpu,
            account,
            written: None,
            record,
            tried: Instant::now(),
            is_begun: false,
            is_by_record: false,
            recorded: BTreeMap::new(),
            board: None,
            sampled: None,
            listed: Listed::default(),
        }
    }

    /// Begins the record anew where there is none and some time has passed: the driver may have been in
    /// somebody's way.
    pub fn try_record(&mut self, begin: impl FnOnce(GpuUuid) -> Option<Record>) {
        if self.record.is_none() && self.tried.elapsed() >= RETRY {
            self.record = begin(self.gpu.uuid());
            self.tried = Instant::now();
        }
    }

    /// Whether its own record is read, which the driver hands out every 33 ms.
    pub fn has_record(&self) -> bool {
        self.record.is_some()
    }

    /// Counts what was used since the last time. Returns whether samples told anything new: what is published
    /// then, a meter that starts anew need not ask for.
    pub fn count(&mut self, clock: Clock, owners: &mut Owners, leases: &[Lease]) -> bool {
        let gpu = self.gpu.uuid();
        // An MPS server has the contexts of all its clients.
        let is_mps = on(gpu, leases).any(|lease| lease.enforcement == Enforcement::Mps);
        // Samples tell what was used while no meter ran.
        let is_begun = std::mem::replace(&mut self.is_begun, true);
        // It is read in any case, so that no time is counted twice later.
        let used = self.record.as_mut().map(|record| record.spent(|| self.gpu.load(), clock));
        let is_over = match (&used, &mut self.record) {
            (Some(Some(_)), Some(record)) => !is_mps && record.is_silent(&mut self.gpu, clock),
            (used, _) => used.is_some(),
        };
        if is_over {
            tracing::warn!(%gpu, "its record tells nothing any more: GPU time is that of NVML's samples");
            self.record = None;
            self.tried = Instant::now();
        }
        let is_due = self.sampled.is_none_or(|before| before.elapsed() >= SAMPLED);
        let used = used.flatten().filter(|_| is_begun && !is_mps);
        self.is_by_record = used.is_some();
        if let Some(used) = used {
            self.answered = Some(Instant::now());
            self.account.count_record(used, clock, |pid| self.listed.owner(pid, owners, leases));
        } else if is_due {
            self.sampled = Some(Instant::now());
            if let Some(mut samples) = self.gpu.samples(self.account.ask_from(clock)) {
                let before = self.account.counted_until();
                self.answered = self.sampled;
                let listed = &mut self.listed;
                samples.retain(|one| {
                    !listed.is_current(one.pid) || owners.was_there(one.pid, one.stamp, leases)
                });
                self.account.count(samples, |pid| listed.owner(pid, owners, leases));
                return self.account.counted_until() != before;
            }
        }
        false
    }

    /// Says on the GPU's board how many contexts of each container work, for the supervisors that divide its
    /// time.
    pub fn say_who_works(&mut self, state: &Path, clock: Clock, owners: &mut Owners, leases: &[Lease]) {
        let gpu = self.gpu.uuid();
        let is_held = on(gpu, leases).any(|lease| lease.enforcement == Enforcement::Scheduled);
        let record = self.record.as_ref().filter(|_| is_held && self.is_by_record);
        let Some(working) = record.and_then(Record::working) else {
            return;
        };
        if self.board.is_none() {
            let opened = Recorder::open(&boards(state), &gpu.bytes());
            self.board =
                opened.inspect_err(|error| tracing::debug!(%gpu, %error, "the board is not opened")).ok();
        }
        let mut counts: BTreeMap<i64, u32> = BTreeMap::new();
        for (pid, contexts) in working {
            owners
                .of(pid, leases)
                .into_iter()
                .for_each(|lease| *counts.entry(lease).or_default() += contexts);
        }
        let recent = record.map(Record::last_second).unwrap_or_default();
        let mut used: BTreeMap<i64, Recent> = BTreeMap::new();
        for (pid, Recent { nanoseconds, taken }) in recent {
            if let Some(lease) = owners.of(pid, leases) {
                let all = used.entry(lease).or_default();
                (all.nanoseconds, all.taken) = (all.nanoseconds + nanoseconds, all.taken + taken);
            }
        }
        let before = std::mem::take(&mut self.recorded);
        for lease in on(gpu, leases) {
            let grant = lease.grants.iter().find(|grant| grant.gpu == gpu);
            let promised = grant.and_then(|grant| grant.cores).map(|cores| u32::from(cores.percent()));
            let Recent { nanoseconds, taken } = used.get(&lease.id).copied().unwrap_or_default();
            let (used, before) = (nanoseconds / 1000, before.get(&lease.id));
            let recorded = Recorded {
                working: counts.get(&lease.id).copied().unwrap_or(0),
                is_over: is_over(before.is_some_and(|one| one.is_over), used, promised.unwrap_or(100)),
                stay: stay(before.map_or(0, |one| one.stay), used, taken, promised.unwrap_or(0)),
            };
            self.recorded.insert(lease.id, recorded);
        }
        if let Some(board) = &self.board {
            board.publish(&self.recorded, clock.monotonic / 1000);
        }
    }
}

/// The leases that have a part of a GPU.
fn on(gpu: GpuUuid, leases: &[Lease]) -> impl Iterator<Item = &Lease> {
    leases.iter().filter(move |lease| lease.grants.iter().any(|grant| grant.gpu == gpu))
}

/// Begins the record of a GPU; `None` where there is none, and its time is that of NVML's samples. Why is
/// said the first time.
pub fn record_of(
    node: &Node,
    settings: &Meter,
    gpu: GpuUuid,
    clock: Clock,
    is_first: bool,
) -> Option<Record> {
    let files = settings.record.as_ref()?;
    let found = node.gpus.iter().find(|found| found.uuid == gpu)?;
    match Record::open(node, files, found, clock) {
        Ok(record) => {
            tracing::info!(%gpu, "GPU time is read from the card's own record of context switches");
            Some(record)
        }
        Err(why) => {
            if is_first {
                tracing::info!(%gpu, %why, "GPU time is that of NVML's samples");
            }
            None
        }
    }
}
