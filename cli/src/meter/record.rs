//! A GPU's own record of context switches, as GPU time of processes.
//!
//! The record says who had the GPU, to the microsecond. One that nobody pushes off has it whether it works or
//! not, so that NVML says for how much of the time the GPU had work at all.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use gpushare_config::RecordFiles;
use gpushare_inventory::{Gpu, Node};
use gpushare_residency::event::Holder;
use gpushare_residency::reader::{DELAY, Reader, Unavailable};
use gpushare_residency::time::{Engine, Held};
use gpushare_supervisor::abi::Era;

use super::driver::Gpu as Driver;
use super::windows::{Sample, Spent};
use crate::clock::Clock;

/// How often the GPU's clock is compared with this machine's: they drift by some parts in a million.
const COMPARED: Duration = Duration::from_secs(1);

/// A step of the GPU's clock against this machine's, in nanoseconds: more than it drifts and a call takes.
const STEP: u128 = 20_000_000;

/// How often NVML is asked for the load: about as often as it has a new figure.
const WEIGHED: Duration = Duration::from_millis(160);

const SECOND: u64 = 1_000_000_000;

/// After how many nanoseconds without a line somebody looks whether the record is silent.
const SILENT: u64 = 10 * SECOND;

/// From how many per cent on a process, or the GPU, is at work.
const WORKS: u32 = 10;

/// A context that had the GPU within this time counts as one that works, in nanoseconds. Who rests for so
/// long and then begins with many contexts has too much for the 0.2 s until the record tells.
const RECENT: u64 = 5_000_000_000;

/// The record of one GPU.
pub struct Record {
    reader: Reader,
    engine: Engine,
    /// Nanoseconds by which the GPU's clock is ahead of the monotonic one.
    ahead: i128,
    /// When the two were compared.
    compared: Instant,
    /// Until when time has been given to processes, in nanoseconds of the monotonic clock.
    settled: u64,
    /// How many lines were lost so far, and when that was last said.
    lost: u64,
    told: u64,
    /// When each context had the GPU last, in nanoseconds of the monotonic clock.
    recent: BTreeMap<Holder, u64>,
    /// Readings of the last second.
    second: VecDeque<Reading>,
    /// When lines were lost last.
    torn: Option<u64>,
    /// When the last line came, or somebody looked why none did, in nanoseconds of the monotonic clock.
    heard: u64,
    /// NVML's last word, and when it was asked.
    load: Load,
    weighed: Option<Instant>,
}

/// NVML's figures, for a time in which the record does not tell who worked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Per cent of the time in which the GPU had work; `None` where it is not known.
    pub busy: Option<u32>,
    /// The only process on it; `None` where there are several or none.
    pub lone: Option<u32>,
}

/// One reading of the record.
#[derive(Debug)]
struct Reading {
    at: u64,
    spent: Vec<Spent>,
    /// How often each process took over the GPU from another.
    taken: Vec<(u32, u32)>,
}

/// Use of the GPU by one process in the last second.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recent {
    /// GPU time in nanoseconds.
    pub nanoseconds: u64,
    /// How often it took over the GPU from another process.
    pub taken: u32,
}

/// GPU time since the last look.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// Time by process.
    pub spent: Vec<Spent>,
    /// Until when, in microseconds since 1970.
    pub until: u64,
}

impl Record {
    /// Begins the record of a GPU of this node.
    ///
    /// # Errors
    /// Where the GPU or its driver keeps none, or does not hand it out.
    pub fn open(node: &Node, files: &RecordFiles, gpu: &Gpu, clock: Clock) -> Result<Self, Unavailable> {
        if gpu.instance.is_some() {
            return Err(Unavailable::Reason("the record does not tell MIG instances apart"));
        }
        let era = node.driver.version.parse().ok().and_then(Era::for_version);
        let era = era.ok_or(Unavailable::Reason("the calls of this driver are not known"))?;
        let path = |node: &Path| match files {
            RecordFiles::OfNode => node.to_owned(),
            RecordFiles::In(folder) => folder.join(node.file_name().unwrap_or_default()),
        };
        let (control, own) = (path(&node.nodes.control.host_path), path(&gpu.node.host_path));
        let mut reader = Reader::open(&control, own, era, &gpu.uuid.bytes())?;
        let time = reader.time().ok_or(Unavailable::Reason("the driver does not tell the GPU's time"))?;
        let ahead = i128::from(time) - i128::from(clock.monotonic);
        let engine = Engine::since(time);
        Ok(Self {
            reader,
            engine,
            ahead,
            compared: Instant::now(),
            settled: clock.monotonic,
            lost: 0,
            told: 0,
            recent: BTreeMap::new(),
            second: VecDeque::new(),
            torn: None,
            heard: clock.monotonic,
            load: Load::default(),
            weighed: None,
        })
    }

    /// GPU time since the last look, as far as the record is there; `None` once it cannot be read any more.
    /// `load` is asked some times a second.
    pub fn spent(&mut self, load: impl FnOnce() -> Load, clock: Clock) -> Option<Use> {
        if self.compared.elapsed() >= COMPARED {
            let before = self.ahead;
            self.ahead = i128::from(self.reader.time()?) - i128::from(Clock::now().monotonic);
            self.compared = Instant::now();
            if self.ahead.abs_diff(before) > STEP {
                // The machine was suspended, or the GPU was reset. Nothing is known of the time between.
                let _ = self.reader.read(drop);
                self.engine = Engine::since(self.on_gpu(self.settled));
                self.torn = Some(self.settled);
            }
        }
        let Self { reader, engine, heard, .. } = self;
        let dropped = reader.read(|event| {
            *heard = clock.monotonic;
            engine.note(event);
        });
        if dropped > 0 {
            engine.lose(dropped);
        }
        let until = clock.monotonic.saturating_sub(DELAY).max(self.settled);
        let length = until - self.settled;
        self.settled = until;
        let on_gpu = self.on_gpu(until);
        let held = self.engine.settle(on_gpu);
        self.lost = self.lost.saturating_add(held.lost);
        if self.lost >= self.told.max(1) * 2 || (self.told == 0 && self.lost > 0) {
            self.told = self.lost;
            tracing::info!(lines = self.lost, "lines of a GPU's record were lost: their time is nobody's");
        }
        self.recent.extend(held.by.keys().map(|holder| (*holder, until)));
        self.recent.retain(|_, had| until - *had <= RECENT);
        if held.lost > 0 {
            self.torn = Some(until);
        }
        if self.weighed.is_none_or(|weighed| weighed.elapsed() >= WEIGHED) {
            self.load = load();
            self.weighed = Some(Instant::now());
        }
        let spent = by_process(&held, length, self.load);
        let taken = held.taken.iter().map(|(holder, count)| (holder.pid, *count)).collect();
        self.second.push_back(Reading { at: until, spent: spent.clone(), taken });
        self.second.retain(|reading| until - reading.at < SECOND);
        Some(Use { spent, until: clock.stamp(until) })
    }

    /// Whether no line comes although somebody works who does not have the GPU by the last one.
    pub fn is_silent(&mut self, gpu: &mut Driver<'_>, clock: Clock) -> bool {
        if clock.monotonic.saturating_sub(self.heard) < SILENT || self.load.busy.unwrap_or(0) < WORKS {
            return false;
        }
        self.heard = clock.monotonic;
        // Samples of the time before reach into it.
        let since = clock.stamp(clock.monotonic.saturating_sub(SILENT / 2));
        let samples = gpu.samples(since).unwrap_or_default();
        // Who had it before the record began is in no line of it.
        let holder = self.engine.holder().map(|holder| holder.pid).or(self.load.lone);
        is_another_at_work(&samples, holder)
    }

    /// The GPU's clock at a moment of the monotonic one.
    fn on_gpu(&self, moment: u64) -> u64 {
        u64::try_from(i128::from(moment) + self.ahead).unwrap_or(0)
    }

    /// Returns the use of the last second by process.
    pub fn last_second(&self) -> BTreeMap<u32, Recent> {
        let mut by: BTreeMap<u32, Recent> = BTreeMap::new();
        for reading in &self.second {
            reading
                .spent
                .iter()
                .for_each(|one| by.entry(one.pid).or_default().nanoseconds += one.nanoseconds);
            reading.taken.iter().for_each(|(pid, count)| by.entry(*pid).or_default().taken += count);
        }
        by
    }

    /// Contexts that had the GPU of late, by process; `None` while lines are missing.
    pub fn working(&self) -> Option<BTreeMap<u32, u32>> {
        if self.torn.is_some_and(|torn| self.settled - torn <= RECENT) {
            return None;
        }
        let mut by = BTreeMap::new();
        self.recent.keys().for_each(|holder| *by.entry(holder.pid).or_default() += 1);
        Some(by)
    }
}

/// Whether a process other than this one worked for a good part of these samples.
fn is_another_at_work(samples: &[Sample], holder: Option<u32>) -> bool {
    let mut by: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
    for sample in samples.iter().filter(|sample| Some(sample.pid) != holder) {
        let (sum, count) = by.entry(sample.pid).or_default();
        (*sum, *count) = (sum.saturating_add(sample.percent), *count + 1);
    }
    by.values().any(|(sum, count)| *sum >= WORKS * count)
}

/// The time of processes in a stretch of `length` nanoseconds.
fn by_process(held: &Held, length: u64, load: Load) -> Vec<Spent> {
    let mut by: BTreeMap<u32, u64> = BTreeMap::new();
    for (Holder { pid, .. }, time) in &held.by {
        let sum = by.entry(*pid).or_default();
        *sum = sum.saturating_add(*time);
    }
    // A process that had the GPU before the record began is in no line of it.
    let is_known = !by.is_empty() || held.lost > 0;
    if !is_known && let Some(pid) = load.lone {
        by.insert(pid, length);
    }
    // All together worked for no longer than the GPU did: one that rests keeps it until another comes.
    // Where NVML does not tell, who is alone may rest.
    let busy = load.busy.unwrap_or(if held.is_contested { 100 } else { 0 });
    let busy = u64::from(busy.min(100));
    let (most, all) = (length / 100 * busy, by.values().sum::<u64>());
    if all > most {
        let part = |time: u64| u128::from(time) * u128::from(most) / u128::from(all);
        by.values_mut().for_each(|time| *time = u64::try_from(part(*time)).unwrap_or(0));
    }
    let spent = by.into_iter().map(|(pid, nanoseconds)| Spent { pid, nanoseconds });
    spent.filter(|spent| spent.nanoseconds > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(by: &[(u32, u32, u64)], is_contested: bool) -> Held {
        let by = by.iter().map(|(pid, context, time)| (Holder { pid: *pid, context: *context }, *time));
        Held { by: by.collect(), is_contested, ..Held::default() }
    }

    #[test]
    fn who_takes_turns_has_the_time_of_its_turns_and_who_is_alone_that_of_its_work() {
        let two = held(&[(7, 1, 30_000), (7, 2, 10_000), (8, 3, 60_000)], true);
        let spent = |pid, nanoseconds| Spent { pid, nanoseconds };
        let seen = |busy, lone| Load { busy, lone };
        let idle = seen(Some(0), None);
        let full = [spent(7, 40_000), spent(8, 60_000)];
        assert_eq!(by_process(&two, 100_000, seen(Some(100), None)), full);
        // Both rest for most of their time, and nobody pushes them off.
        let rested = [spent(7, 2_000), spent(8, 3_000)];
        assert_eq!(by_process(&two, 100_000, seen(Some(5), None)), rested);
        // A clock that stepped gives nobody more than there was.
        assert_eq!(
            by_process(&held(&[(7, 1, 1 << 40)], true), 100_000, seen(None, None)),
            [spent(7, 100_000)]
        );
        let one = held(&[(7, 1, 100_000)], false);
        assert_eq!(by_process(&one, 100_000, idle), []);
        assert_eq!(by_process(&one, 100_000, seen(Some(25), None)), [spent(7, 25_000)]);
        assert_eq!(by_process(&one, 100_000, seen(None, None)), []);
        // It was there before the record.
        let none = held(&[], false);
        assert_eq!(by_process(&none, 100_000, seen(Some(50), Some(9))), [spent(9, 50_000)]);
        assert_eq!(by_process(&none, 100_000, seen(Some(50), None)), []);
        let torn = Held { lost: 5, ..none };
        assert_eq!(by_process(&torn, 100_000, seen(Some(50), Some(9))), []);
    }

    #[test]
    fn a_record_is_silent_where_another_works_than_who_has_the_gpu_by_it() {
        let sample = |pid, percent| Sample { pid, stamp: 0, percent };
        let samples = [sample(7, 90), sample(8, 0), sample(7, 0), sample(8, 3)];
        assert!(!is_another_at_work(&samples, Some(7)));
        assert!(is_another_at_work(&samples, Some(8)) && is_another_at_work(&samples, None));
        assert!(!is_another_at_work(&[], None));
    }
}
