//! The meter's loop while containers hold shares: reads leases, measures, audits and publishes.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use gpushare_config::{Config, Meter};
use gpushare_inject::{Measuring, MemoryUse, Passed, Region, Supervision, one_line, supervision};
use gpushare_inventory::{DeviceMemory, GpuUuid, Node, open_now};
use gpushare_quota::{Enforcement, Lease, Store, cgroup_of, living_thread};
use gpushare_region::Measurement;
use nvml_wrapper::Nvml;
use procfs::process::Process;

use super::account::{Account, Held};
use super::driver::Gpu;
use super::fallback::{Fallback, HeldByLease};
use super::kept::Kept;
use super::mend::mend;
use super::metered::{Metered, record_of};
use super::owner::Owners;
use super::response::Response;
use super::rules::LastUse;
use super::searches::{Searches, Subject};
use super::shares;
use crate::clock::Clock;
use crate::mps::is_of_mps;
use crate::violation::{self, Kind, Noted, Violation};

/// The pause between two rounds where GPUs' own records are read, about as often as the driver hands them
/// out.
const FAST: Duration = Duration::from_millis(35);
/// How often the store's time stamp is looked at.
const CHANGES: Duration = Duration::from_millis(50);
/// The pause between two rounds else. The processes on GPUs are noted as often, which is shorter than the
/// making of a CUDA context alone.
const SLOW: Duration = Duration::from_millis(100);
/// How often memory is looked at, and everything that a container might have changed.
const LOOK: Duration = Duration::from_secs(1);
/// Every how many looks the kernel is asked about processes. One costs ten times as much as the books of its
/// container.
const WATCHED: u64 = 2;
/// A limits file that differs again within this time was changed from inside.
const AGAIN: Duration = Duration::from_secs(60);
/// The most processes outside of containers that are reported; lists show fewer.
const MOST_STRANGERS: usize = 256;
/// A line is written at least this often, since libraries take one that is a second old for that of a dead
/// meter.
const REFRESH: Duration = Duration::from_millis(250);
/// A GPU whose driver has told samples within this time tells them.
const FRESH: Duration = Duration::from_secs(2);

/// Measures until no container holds a share. Without NVML it only searches, and returns once NVML's library
/// can be opened without waiting for a file lease.
pub fn run(
    nvml: Option<&Nvml>,
    node: &Node,
    state: &Path,
    store: &Store,
    config: &Config,
    used: &LastUse,
) -> Result<()> {
    let mut session = Session {
        nvml,
        node,
        state,
        store,
        settings: config.meter.clone(),
        used: config.rules.idle.map(|_| used),
        kept: Kept::of(node, config, state),
        searches: Searches::start(state, &node.driver.libcuda()?),
        seen: MemoryUse::read(state),
        response: Response::after(violation::frozen(state), state),
        noted: Noted::default(),
        change: None,
        reloaded: Instant::now(),
        leases: Vec::new(),
        gpus: HashMap::new(),
        owners: Owners::default(),
        fallback: Fallback::new(state, &node.driver.version, config.meter.tolerance),
        looked: None,
        supervised: HashMap::new(),
        looks: 0,
        mended: HashMap::new(),
        listed: None,
        limits: HashMap::new(),
    };
    loop {
        let look = session.looked.is_none_or(|looked| looked.elapsed() >= LOOK);
        session.reload(look && session.looks.is_multiple_of(WATCHED))?;
        if session.leases.is_empty() {
            return Ok(violation::write(state, &[], std::iter::empty())?);
        }
        if look {
            session.look();
            if nvml.is_none() && !is_leased(&node.driver.libnvidia_ml()?) {
                return Ok(());
            }
        }
        session.measure();
        sleep(if session.gpus.values().any(Metered::has_record) { FAST } else { SLOW });
    }
}

/// Whether opening this file would wait for a file lease.
fn is_leased(library: &Path) -> bool {
    open_now(library).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

struct Session<'a> {
    nvml: Option<&'a Nvml>,
    node: &'a Node,
    state: &'a Path,
    store: &'a Store,
    settings: Meter,
    /// Where the use of GPU time is noted; `None` where no rule asks.
    used: Option<&'a LastUse>,
    kept: Kept,
    searches: Searches,
    /// How much memory each lease's containers held so far.
    seen: BTreeMap<i64, MemoryUse>,
    response: Response<'a>,
    /// What stands in the history.
    noted: Noted,
    change: Option<SystemTime>,
    reloaded: Instant,
    leases: Vec<Lease>,
    gpus: HashMap<GpuUuid, Metered<'a>>,
    owners: Owners,
    fallback: Fallback<'a>,
    looked: Option<Instant>,
    /// Figures of supervisors at the last look, by lease.
    supervised: HashMap<i64, io::Result<Option<Supervision>>>,
    looks: u64,
    /// When limits files were last rewritten, by lease.
    mended: HashMap<i64, Instant>,
    /// When the processes on GPUs were last noted.
    listed: Option<Instant>,
    /// The open `limits` files by lease, in which measurements are published.
    limits: HashMap<i64, Measuring>,
}

impl<'a> Session<'a> {
    /// Reads the leases if they may have changed, or if `anyway` is set.
    fn reload(&mut self, anyway: bool) -> Result<()> {
        if !anyway && self.reloaded.elapsed() < CHANGES {
            return Ok(());
        }
        self.reloaded = Instant::now();
        let change = self.store.last_change();
        if !anyway && change.is_some() && change == self.change {
            return Ok(());
        }
        self.change = change;
        let leases = shares(self.store)?;
        if leases != self.leases {
            self.leases = leases;
            self.owners.settle_anew();
            self.admit();
        }
        Ok(())
    }

    /// Brings the accounts of all GPUs in line with the leases.
    fn admit(&mut self) {
        let (clock, leases) = (Clock::now(), std::mem::take(&mut self.leases));
        let known: HashMap<i64, _> = leases
            .iter()
            .filter_map(|lease| Some((lease.id, Region::of(self.state, lease.id).measured().ok()?)))
            .collect();
        let grants = || {
            leases.iter().flat_map(|lease| lease.grants.iter().enumerate().map(move |(l, g)| (lease, l, g)))
        };
        let of =
            |lease: &Lease, line: usize| known.get(&lease.id).map_or(Measurement::default(), |all| all[line]);
        for (_, _, grant) in grants() {
            if self.gpus.contains_key(&grant.gpu) {
                continue;
            }
            let before: Vec<Measurement> = grants()
                .filter(|(_, _, other)| other.gpu == grant.gpu)
                .map(|(lease, line, _)| of(lease, line))
                .collect();
            let Some(nvml) = self.nvml else { break };
            match nvml.device_by_uuid(grant.gpu.to_string()) {
                Ok(device) => {
                    let gpu = Gpu::new(device, grant.gpu);
                    let account = Account::new(&before, gpu.period(), clock);
                    let record = record_of(self.node, &self.settings, grant.gpu, clock, true);
                    self.gpus.insert(grant.gpu, Metered::new(gpu, account, record));
                }
                Err(error) => tracing::warn!(gpu = %grant.gpu, %error, "NVML cannot open a GPU"),
            }
        }
        for (lease, line, grant) in grants() {
            if let Some(metered) = self.gpus.get_mut(&grant.gpu) {
                metered.account.admit(lease.id, line, &of(lease, line), clock);
                metered.written = None;
            }
        }
        for (gpu, metered) in &mut self.gpus {
            metered
                .account
                .retain(|id| grants().any(|(lease, _, grant)| lease.id == id && grant.gpu == *gpu));
        }
        self.gpus.retain(|_, metered| !metered.account.is_empty());
        self.fallback.retain(|id| leases.iter().any(|lease| lease.id == id));
        self.limits.retain(|id, _| leases.iter().any(|lease| lease.id == *id));
        self.leases = leases;
    }

    /// Counts what was used, and publishes.
    fn measure(&mut self) {
        if self.listed.is_none_or(|listed| listed.elapsed() >= SLOW) {
            self.listed = Some(Instant::now());
            self.list_processes();
        }
        for metered in self.gpus.values_mut() {
            let clock = Clock::now();
            metered.try_record(|gpu| record_of(self.node, &self.settings, gpu, clock, false));
            let is_news = metered.count(clock, &mut self.owners, &self.leases);
            metered.say_who_works(self.state, clock, &mut self.owners, &self.leases);
            if is_news || metered.written.is_none_or(|written| written.elapsed() >= REFRESH) {
                metered.written = Some(Instant::now());
                publish(self.state, &metered.account, clock, &mut self.limits);
            }
        }
    }

    /// Notes the processes on GPUs, since a short one may have ended by the time of its first sample, and
    /// weighs the contexts of those that libraries hold.
    fn list_processes(&mut self) {
        let Self { gpus, fallback, kept, owners, leases, limits, .. } = self;
        let is_due = fallback.begin_weighing();
        for metered in gpus.values_mut() {
            let before = is_due.then(|| fallback.books_before(metered, kept, leases));
            let processes = metered.gpu.processes();
            let pids = processes.iter().flatten().map(|(pid, _)| *pid).collect();
            metered.listed.note(&pids, owners, leases);
            if let Some(before) = before {
                let held =
                    processes.map(|all| held_by_lease(&all, |pid| metered.listed.owner(pid, owners, leases)));
                fallback.weigh(metered.gpu.uuid(), before, held.as_ref(), (kept, leases, limits));
            }
        }
        fallback.end_weighing();
    }

    /// The slow look: memory and time as the driver counts them, and what a container may have changed.
    fn look(&mut self) {
        self.looked = Some(Instant::now());
        self.looks += 1;
        self.owners.forget();
        self.kept.hold(&self.leases);
        self.supervised = self.ask_supervisors();
        let mut found = self.mend();
        let (mut on_gpu, mut strangers) = (HashMap::new(), BTreeMap::new());
        found.extend(self.audit(&mut on_gpu, &mut strangers));
        found.extend(self.look_at_supervisors());
        let Self { searches, leases, kept, looks, .. } = self;
        let is_due = *looks % WATCHED == 1;
        found.extend(searches.found(leases, is_due, || Subject::of(kept, leases, on_gpu)));
        found.extend(kept.leased_by_nobody(&found));
        found.extend(self.strangers(strangers));
        self.note_use();
        self.note_memory();
        self.tell(found);
    }

    /// Notes what each lease has used of its GPUs, where the driver tells GPU time of all of them.
    fn note_use(&mut self) {
        let Some(noted) = self.used else { return };
        let (mut used, mut untold) = (BTreeMap::<i64, u64>::new(), BTreeSet::new());
        for metered in self.gpus.values_mut() {
            let is_told = metered.answered.is_some_and(|answered| answered.elapsed() < FRESH);
            for (lease, member) in metered.account.members() {
                let sum = used.entry(lease).or_default();
                *sum = sum.saturating_add(member.own);
                if !is_told {
                    untold.insert(lease);
                }
            }
        }
        for lease in &self.leases {
            // Under MPS the time may be the server's. A GPU that NVML cannot open is not in the list.
            let is_mps = lease.enforcement == Enforcement::Mps;
            if is_mps || !lease.grants.iter().all(|grant| self.gpus.contains_key(&grant.gpu)) {
                untold.insert(lease.id);
            }
        }
        used.retain(|lease, _| !untold.contains(lease));
        noted.note(&used);
    }

    /// Notes for the history how much memory each lease's containers hold. Who ends a lease reads it just
    /// afterwards, so what was written before is kept for one look more.
    fn note_memory(&mut self) {
        let mut held = BTreeMap::<i64, u64>::new();
        for (lease, member) in self.gpus.values_mut().flat_map(|metered| metered.account.members()) {
            let sum = held.entry(lease).or_default();
            *sum = sum.saturating_add(member.held.bytes);
        }
        let written = self.seen.clone();
        self.seen.retain(|lease, _| held.contains_key(lease));
        held.iter().for_each(|(lease, bytes)| self.seen.entry(*lease).or_default().add(*bytes));
        let all = written.into_iter().chain(self.seen.iter().map(|(lease, seen)| (*lease, *seen)));
        if let Err(error) = MemoryUse::write(&all.collect(), self.state) {
            tracing::warn!(%error, "how much memory containers held cannot be written down");
        }
    }

    /// Reads the figures of all supervisors.
    fn ask_supervisors(&self) -> HashMap<i64, io::Result<Option<Supervision>>> {
        let supervised = self.leases.iter().filter(|lease| lease.enforcement.is_supervised());
        supervised.map(|lease| (lease.id, supervision(self.state, lease.id))).collect()
    }

    /// Names leases of which something went past their supervisors, and those whose figures cannot be read.
    /// What was seen stays for as long as the lease does: it is proof.
    fn look_at_supervisors(&self) -> Vec<Violation> {
        let named = |lease: &Lease| {
            let (kind, text) = match self.supervised.get(&lease.id)? {
                Ok(None) => return None, // it is being created, or has just ended
                Ok(Some(seen)) => (Kind::Race, raced(seen.passed)?.to_owned()),
                Err(error) => (Kind::Unreadable, format!("its supervisors' figures cannot be read: {error}")),
            };
            Some(Violation::by(lease, None, kind, text))
        };
        self.leases.iter().filter_map(named).collect()
    }

    /// Rewrites limits files that differ from their leases. An update that was killed leaves such a file too,
    /// so only a file that differs again soon proves anything.
    fn mend(&mut self) -> Vec<Violation> {
        let mut found = Vec::new();
        self.mended.retain(|_, at| at.elapsed() < AGAIN);
        for lease in &self.leases {
            let (kind, text) = match mend(self.store, &Region::of(self.state, lease.id), lease) {
                Ok(false) => continue,
                Ok(true) => {
                    let text = "its limits file differed from the lease (changed from inside?): rewritten";
                    (Kind::Limits, text.to_owned())
                }
                Err(error) => {
                    let why = one_line(error.as_ref());
                    (Kind::Unreadable, format!("its limits file cannot be read or mended: {why}"))
                }
            };
            let is_hint = kind == Kind::Limits && self.mended.insert(lease.id, Instant::now()).is_none();
            found.push(Violation { is_hint, ..Violation::by(lease, None, kind, text) });
        }
        found
    }

    /// What the driver counts of each container, and what is wrong with that where no supervisor holds it.
    /// Notes the processes on GPUs by lease, and those of no lease with their memory.
    fn audit(
        &mut self,
        on_gpu: &mut HashMap<i64, HashSet<u32>>,
        strangers: &mut BTreeMap<u32, u64>,
    ) -> Vec<Violation> {
        let mut found = Vec::new();
        for metered in self.gpus.values_mut() {
            let Some(memory) = metered.gpu.memory() else { continue };
            let mut held: HashMap<i64, Held> = HashMap::new();
            for (pid, bytes) in memory {
                let is_current = metered.listed.is_current(pid);
                let Some(lease) = metered.listed.owner(pid, &mut self.owners, &self.leases) else {
                    if is_current {
                        strangers.insert(pid, bytes);
                    } else if metered.listed.note_orphan(pid) {
                        found.push(orphaned(pid, bytes));
                    }
                    continue;
                };
                if is_current {
                    on_gpu.entry(lease).or_default().insert(pid);
                }
                let held = held.entry(lease).or_default();
                held.bytes = held.bytes.saturating_add(bytes);
                held.processes += 1;
            }
            let until = metered.account.counted_until().filter(|_| !metered.account.is_by_record());
            for (id, member) in metered.account.members() {
                member.held = held.get(&id).copied().unwrap_or_default();
                let Some(lease) = self.leases.iter().find(|lease| lease.id == id) else { continue };
                found.extend(self.fallback.look(lease, member, &self.kept, until));
            }
        }
        found
    }

    /// Processes that belong to no lease of the node, also to none of whole GPUs, and are not this one. Their
    /// memory is by pid.
    fn strangers(&self, all: BTreeMap<u32, u64>) -> Vec<Violation> {
        if all.is_empty() {
            return Vec::new();
        }
        let Ok(leases) = self.store.leases() else { return Vec::new() };
        let mut owners = Owners::default();
        let stranger = |(pid, bytes): (u32, u64)| {
            let number = i32::try_from(pid).ok()?;
            // MPS' server has the context of all of a GPU's clients, and is in no container.
            let is_mps = Process::new(number).ok().is_some_and(|process| is_of_mps(&process));
            if is_mps || pid == std::process::id() || owners.of(pid, &leases).is_some() {
                return None;
            }
            let container = cgroup_of(living_thread(number)?)?.display().to_string();
            let bytes = DeviceMemory::from_bytes(bytes);
            let text = format!("no share explains the {bytes} of device memory that it holds");
            let kind = Kind::Stranger.name().to_owned();
            Some(Violation { lease: None, container, pid: Some(pid), kind, text, born: None, is_hint: false })
        };
        all.into_iter().filter_map(stranger).take(MOST_STRANGERS).collect()
    }

    /// Logs what is new, does what the settings say, and writes it down for the commands, all within bounds
    /// for each container.
    fn tell(&mut self, mut found: Vec<Violation>) {
        found.sort();
        found.dedup();
        self.response.act(self.settings.on_cheating, &self.leases, &found);
        let found = violation::bounded(found);
        for violation in &found {
            if self.noted.note(self.state, violation) {
                let (container, pid, kind, text) =
                    (&violation.container, violation.pid, &violation.kind, &violation.text);
                let what = if violation.is_cheating() { "share broken" } else { "not searched" };
                tracing::warn!(%container, pid, %kind, text, "{what}");
            }
        }
        if let Err(error) = violation::write(self.state, &found, self.response.frozen()) {
            tracing::warn!(%error, "what containers do against their shares cannot be written down");
        }
    }
}

/// Reports memory of an ended process of which no lease is known. The pid may be another process's by now, so the
/// report names neither a process nor a container.
fn orphaned(pid: u32, bytes: u64) -> Violation {
    let bytes = DeviceMemory::from_bytes(bytes);
    Violation {
        lease: None,
        container: "node".to_owned(),
        pid: None,
        kind: Kind::Stranger.name().to_owned(),
        text: format!("the driver lists {bytes} of device memory for process {pid}, which has ended"),
        born: None,
        is_hint: false,
    }
}

/// Says what went past a lease's supervisors; `None` for nothing.
fn raced(passed: Passed) -> Option<&'static str> {
    match passed {
        Passed { races: 0, .. } => None,
        Passed { ended: 0, .. } => {
            Some("a program changed a call on its way past the supervisor, and was charged for it")
        }
        Passed { .. } => {
            Some("a program changed a call on its way past the supervisor, and was ended above the limit")
        }
    }
}

/// Publishes the measurements of a GPU's containers. A region that is going away with its container is no
/// error: the next look finds its lease gone.
fn publish(state: &Path, account: &Account, clock: Clock, limits: &mut HashMap<i64, Measuring>) {
    for (lease, line, value) in account.measurements(clock) {
        publish_into(state, lease, limits, |file| file.set(line, &value));
    }
}

/// Writes into the limits file of a lease, which is opened at the first time.
pub(super) fn publish_into(
    state: &Path,
    lease: i64,
    limits: &mut HashMap<i64, Measuring>,
    write: impl FnOnce(&Measuring) -> io::Result<()>,
) {
    let opened = match limits.entry(lease) {
        Entry::Occupied(entry) => Ok(entry.into_mut()),
        Entry::Vacant(entry) => Region::of(state, lease).to_measure().map(|opened| entry.insert(opened)),
    };
    if let Err(error) = opened.and_then(|opened| write(opened)) {
        limits.remove(&lease);
        tracing::debug!(lease, %error, "limits file not written");
    }
}

/// The driver's count by lease; `None` where it does not report the memory of one of the lease's processes.
fn held_by_lease(processes: &[(u32, Option<u64>)], mut owner: impl FnMut(u32) -> Option<i64>) -> HeldByLease {
    let mut held = HeldByLease::new();
    for (pid, bytes) in processes {
        let Some(lease) = owner(*pid) else { continue };
        let known = held.entry(lease).or_insert(Some(Held::default()));
        *known = known.zip(*bytes).map(|(held, bytes)| Held {
            bytes: held.bytes.saturating_add(bytes),
            processes: held.processes + 1,
        });
    }
    held
}
