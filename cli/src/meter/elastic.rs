//! Gives containers with a memory limit above their share what lies between, while the GPU has it.
//!
//! A lease's memory is what the container may hold now. It grows when the container wishes so and no other
//! lease needs the memory, and shrinks to what the container holds once that is less. So admission counts
//! what is promised and what is in use, nothing that is in use is ever taken back, and the ledger is never
//! behind.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::thread::{self, sleep};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inject::{Measuring, Region, UsageError, one_line, supervision};
use gpushare_inventory::{DeviceMemory, Gpu};
use gpushare_quota::{
    Change, Elastic, GpuLoad, HeldBy, Lease, LeaseState, Loads, Running, Store, UpdateError,
};
use gpushare_region::ContextCost;
use gpushare_request::MemoryRequest;

use crate::node;

/// Pause between two looks at the wishes of containers that wish nothing, and of those that do. A library
/// waits for an answer much longer (`LENIENCE` of `intercept/src/book.rs`).
const PAUSE: Duration = Duration::from_millis(20);
const BUSY: Duration = Duration::from_millis(4);
/// The same while no lease has such a limit: a container's first wish comes later than that after its lease.
const IDLE: Duration = Duration::from_millis(100);
/// How long after a wish the next ones are expected.
const SOON: Duration = Duration::from_secs(1);
/// Time between two looks at what is held and what is left.
const TICK: Duration = Duration::from_millis(250);
/// Memory is given and taken in pieces of at least this many bytes, and of this part of what lies between: a
/// container that wishes all the time has few changes made.
const PIECE: u64 = 64 << 20;
const PIECES: u64 = 32;
/// Time until files that are not there yet are looked for again.
const WAIT: Duration = Duration::from_millis(60);
/// Time until GPUs that the node does not show are looked for again.
const RETRY: Duration = Duration::from_secs(5);

/// Serves all leases with such a limit for as long as this process lives. Returns at once.
pub fn watch(config: &Config, state: &Path) {
    let (config, state) = (config.clone(), state.to_owned());
    // It ends with the process, which waits for nothing of it. A step that fails is tried again.
    drop(thread::spawn(move || {
        loop {
            if let Err(error) = serve(&config, &state) {
                tracing::warn!(error = one_line(error.as_ref()), "memory-limit cannot be served");
            }
            sleep(Duration::from_secs(1));
        }
    }));
}

fn serve(config: &Config, state: &Path) -> Result<()> {
    let (folder, store) = node::store(config)?;
    debug_assert_eq!(folder.path(), state);
    let mut arbiter = Arbiter {
        config,
        state,
        store: &store,
        gpus: Vec::new(),
        served: HashMap::new(),
        asked: None,
        loads: Loads::default(),
        seen: None,
        waits: false,
        looked: Instant::now(),
        ticked: Instant::now(),
        wished: Instant::now(),
    };
    loop {
        arbiter.step(&folder)?;
        sleep(match arbiter.is_needed() {
            true if arbiter.wished.elapsed() < SOON => BUSY,
            true => PAUSE,
            false => IDLE,
        });
    }
}

struct Arbiter<'a> {
    config: &'a Config,
    state: &'a Path,
    store: &'a Store,
    gpus: Vec<Gpu>,
    /// When the node was asked for its GPUs.
    asked: Option<Instant>,
    /// What all leases hold, as the store last said.
    loads: Loads,
    served: HashMap<i64, Served>,
    /// When the store was last changed, as far as it was read.
    seen: Option<SystemTime>,
    /// Whether a container's files were not there yet.
    waits: bool,
    /// When the store was last read.
    looked: Instant,
    ticked: Instant,
    /// When a container last wished for more.
    wished: Instant,
}

/// A lease whose memory grows.
struct Served {
    lease: Lease,
    bounds: Elastic,
    region: Region,
    measuring: Measuring,
    usage: File,
    /// The number of the last wish that was answered, by line.
    answered: Vec<u32>,
    /// What the limits could be lowered to at the last tick, by line; only what it shows twice is lowered.
    unused: Vec<Option<DeviceMemory>>,
}

impl Served {
    /// `None` where the container is not there yet, or has ended.
    fn of(lease: Lease, state: &Path) -> Option<Self> {
        let bounds = lease.elastic?;
        let region = Region::of(state, lease.id);
        let [_, usage] = region.hold().ok()?;
        let measuring = region.to_measure().ok()?;
        let answered = Region::wishes_in(&usage).ok()?.iter().map(|_| 0).collect();
        let unused = vec![None; lease.grants.len()];
        Some(Self { lease, bounds, region, measuring, usage, answered, unused })
    }
}

impl Arbiter<'_> {
    /// Whether a lease has such a limit.
    fn is_needed(&self) -> bool {
        self.waits || !self.served.is_empty()
    }

    fn step(&mut self, folder: &gpushare_quota::StateFolder) -> Result<()> {
        let change = self.store.last_change();
        let is_tick = self.is_needed() && self.ticked.elapsed() >= TICK;
        let waits = self.waits && self.looked.elapsed() >= WAIT;
        if change.is_none() || change != self.seen || is_tick || waits {
            (self.seen, self.looked) = (change, Instant::now());
            self.read(folder)?;
            self.tell_room();
        }
        for id in self.served.keys().copied().collect::<Vec<_>>() {
            self.answer(id);
        }
        if is_tick {
            self.ticked = Instant::now();
            for id in self.served.keys().copied().collect::<Vec<_>>() {
                self.shrink(id);
            }
        }
        Ok(())
    }

    /// Reads which leases grow, and as what they stand in the store.
    fn read(&mut self, folder: &gpushare_quota::StateFolder) -> Result<()> {
        let leases = self.store.leases()?;
        let growing: Vec<Lease> = leases
            .into_iter()
            .filter(|lease| lease.elastic.is_some() && lease.state() == LeaseState::Active)
            .collect();
        self.served.retain(|id, _| growing.iter().any(|lease| lease.id == *id));
        let is_known = |lease: &Lease| {
            lease.grants.iter().all(|grant| self.gpus.iter().any(|gpu| gpu.uuid == grant.gpu))
        };
        if !growing.iter().all(is_known) && self.asked.is_none_or(|asked| asked.elapsed() >= RETRY) {
            self.asked = Some(Instant::now());
            match node::all(self.config, folder) {
                Ok(node) => self.gpus = node.gpus,
                Err(error) => {
                    let error = one_line(error.as_ref());
                    tracing::warn!(error, "a GPU of shares that may grow cannot be asked for");
                }
            }
        }
        self.loads = self.store.loads()?;
        self.waits = false;
        for lease in growing {
            match self.served.get_mut(&lease.id) {
                Some(served) => served.lease = lease,
                None => {
                    let id = lease.id;
                    let served = Served::of(lease, self.state);
                    self.waits |= served.is_none();
                    self.served.extend(served.map(|served| (id, served)));
                }
            }
        }
        Ok(())
    }

    /// Answers what a container wishes.
    fn answer(&mut self, id: i64) {
        let Some(served) = self.served.get(&id) else { return };
        let Ok(wishes) = Region::wishes_in(&served.usage) else { return };
        let new: Vec<(usize, u32, u64)> = (0..served.lease.grants.len())
            .filter_map(|line| {
                let (number, bytes) = *wishes.get(line)?;
                (served.answered.get(line) != Some(&number)).then_some((line, number, bytes))
            })
            .collect();
        for (line, number, bytes) in new {
            self.wished = Instant::now();
            self.grow(id, line, DeviceMemory::from_bytes(bytes));
            let room = self.room(id, line);
            let Some(served) = self.served.get_mut(&id) else { return };
            served.answered[line] = number;
            // Whoever cuts the file short is told nothing.
            let _ = served.measuring.answer(line, room, number);
        }
    }

    /// Raises the limit to what is wished for, or a piece more; not at all where the GPU has less.
    fn grow(&mut self, id: i64, line: usize, wished: DeviceMemory) {
        if let Some(served) = self.served.get_mut(&id) {
            served.unused[line] = None;
        }
        let Some(served) = self.served.get(&id) else { return };
        let (current, most) = (served.lease.grants[line].memory, served.bounds.most);
        if wished <= current || wished > most {
            return;
        }
        // Without room the store is not asked: a container may wish without end.
        let beyond = wished.saturating_sub(current).bytes() >> 20;
        if beyond > u64::from(self.room_of(served, line)) {
            return;
        }
        let pieces = whole(served.bounds, wished.bytes()).min(most);
        for memory in [pieces, wished] {
            match self.set(id, line, memory, false) {
                Ok(()) => return,
                Err(UpdateError::Refused(_)) => {}
                Err(error) => {
                    return tracing::debug!(lease = id, error = one_line(&error), "a share cannot grow");
                }
            }
        }
    }

    /// Lowers limits to what is held, but no further than what was promised, where two ticks found that.
    fn shrink(&mut self, id: i64) {
        let Some(served) = self.served.get(&id) else { return };
        let lines = served.lease.grants.len();
        let Ok(usage) = Region::usage_in(&served.usage, &Running::default(), lines) else { return };
        // Contexts may take more than the books charge for them.
        let measured = served.region.measured().unwrap_or_default();
        for line in 0..lines {
            let Some(served) = self.served.get_mut(&id) else { return };
            let booked = usage.devices.get(line).map_or(u64::MAX, |device| device.bytes);
            let booked =
                charged(self.state, &served.lease, line).map_or(booked, |charged| charged.max(booked));
            let held = measured.get(line).map_or(booked, |counted| booked.max(counted.memory_bytes));
            let goal = whole(served.bounds, held).max(served.bounds.least);
            let goal = Some(goal).filter(|goal| *goal < served.lease.grants[line].memory);
            let before = std::mem::replace(&mut served.unused[line], goal);
            if let Some(goal) = goal.max(before).filter(|_| goal.is_some() && before.is_some()) {
                // What came in between is no error: the container holds more again.
                let _ = self.set(id, line, goal, true);
            }
        }
    }

    /// Gives the lease `memory` on the GPU of `line`, in the store and in the container's limits file. With
    /// `checks`, nothing changes where the container holds more.
    fn set(&mut self, id: i64, line: usize, memory: DeviceMemory, checks: bool) -> Result<(), UpdateError> {
        let Some(Served { lease, region, usage, .. }) = self.served.get(&id) else { return Ok(()) };
        let change = Change {
            memory: Some(MemoryRequest::Bytes(memory)),
            gpu: Some(lease.grants[line].gpu),
            ..Change::default()
        };
        let (lines, rules) = (lease.grants.len(), &self.config.quota);
        // Of the two times that the file is written only the first can still be taken back.
        let mut checks = checks;
        let done = self.store.update(lease.id, &lease.member.key, &[change], &self.gpus, rules, |new| {
            region.set_memory(new)?;
            let holds_more = |held: u64| held > new.grants[line].memory.bytes();
            let current = || {
                let charged = charged(self.state, lease, line);
                charged.map_or_else(|| held(usage, lines, line), Ok)
            };
            match std::mem::take(&mut checks).then(current).transpose() {
                Ok(held) if !held.is_some_and(holds_more) => Ok(()),
                other => {
                    region.set_memory(lease)?;
                    other.and(Err(io::Error::other("the container holds more")))
                }
            }
        });
        let (_, new) = done?;
        if let Ok(loads) = self.store.loads() {
            self.loads = loads;
        }
        if let Some(served) = self.served.get_mut(&id) {
            served.lease = new;
        }
        Ok(())
    }

    /// What the node could add to the limit of `line` now, in MiB.
    fn room(&self, id: i64, line: usize) -> u32 {
        self.served.get(&id).map_or(0, |served| self.room_of(served, line))
    }

    fn room_of(&self, served: &Served, line: usize) -> u32 {
        let grant = &served.lease.grants[line];
        let gpu = self.gpus.iter().find(|gpu| gpu.uuid == grant.gpu);
        let Some(memory) = gpu.and_then(|gpu| gpu.memory) else { return 0 };
        let load: GpuLoad = self.loads.get(&grant.gpu).copied().unwrap_or_default();
        let rules = &self.config.quota;
        let beside = rules.total(memory).saturating_sub(load.memory);
        let most = served.bounds.most.min(rules.per_lease(memory)).saturating_sub(grant.memory);
        u32::try_from(beside.min(most).bytes() >> 20).unwrap_or(u32::MAX)
    }

    /// Tells every container what it could get.
    fn tell_room(&self) {
        for served in self.served.values() {
            for line in 0..served.lease.grants.len() {
                let _ = served.measuring.answer(line, self.room_of(served, line), served.answered[line]);
            }
        }
    }
}

/// These bytes in whole pieces.
fn whole(bounds: Elastic, bytes: u64) -> DeviceMemory {
    let piece = PIECE.max(bounds.most.saturating_sub(bounds.least).bytes() / PIECES);
    DeviceMemory::from_bytes(bytes.div_ceil(piece).saturating_mul(piece))
}

/// Bytes that a supervisor has charged on the GPU of `line`, with what a context may still take there for the
/// code of libraries, for which no program can ask; `None` where libraries hold the lease. A figure that
/// cannot be read counts as all of the GPU.
fn charged(state: &Path, lease: &Lease, line: usize) -> Option<u64> {
    /// Bytes that libraries' code may take beside a bare context.
    const FOR_CODE: u64 = ContextCost::UNKNOWN.most - ContextCost::UNKNOWN.bare;
    if lease.enforcement.terms().held_by != HeldBy::Supervisor {
        return None;
    }
    let seen = supervision(state, lease.id).ok().flatten();
    let charged = seen.and_then(|seen| seen.charged.get(line).copied());
    Some(match charged {
        None => u64::MAX,
        Some(0) => 0,
        Some(charged) => charged.saturating_add(FOR_CODE).min(lease.grants[line].memory.bytes().max(charged)),
    })
}

/// What the container says that it holds on the GPU of `line`, in bytes.
fn held(usage: &File, lines: usize, line: usize) -> io::Result<u64> {
    match Region::usage_in(usage, &Running::default(), lines) {
        Ok(usage) => Ok(usage.devices.get(line).map_or(u64::MAX, |device| device.bytes)),
        Err(UsageError::Io(error)) => Err(error),
        Err(error @ UsageError::Damaged(_)) => Err(io::Error::other(error)),
    }
}
