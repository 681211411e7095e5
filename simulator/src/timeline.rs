//! A GPU's time: work of all processes, one after the other in the order of submission.
//!
//! An end is known at submission. Work of a killed process is cut out, and what stood behind it moves forward; a
//! [`Mark`] remembers how many cuts it has seen, and finds its place again.

use std::sync::atomic::Ordering;

use crate::clock;
use crate::lock::Owner;
use crate::session::Session;
use crate::state::{CUTS, Cut, Gpu, RUNS, Run};

/// Runs are joined up to this length, so that short kernels do not fill the memory of the time line.
const JOIN: u64 = 1_000_000;
/// Gaps up to this length are joined, nanoseconds.
const GAP: u64 = 20_000;
/// A sleeper looks again after this time, for cuts; nanoseconds.
const NAP: u64 = 4_000_000;
/// Shorter waits are spent awake, nanoseconds.
const SPIN: u64 = 60_000;

/// The end of a piece of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// When it ends, on the time line as it was when this mark was made.
    pub end: u64,
    /// Cuts made before.
    pub cuts: u64,
}

/// Queues `length` nanoseconds of work that starts not before `after`.
pub fn submit(gpu: &Gpu, session: &Session, length: u64, after: u64) -> Mark {
    let _guard = session.lock(&gpu.time_lock);
    let start = clock::now().max(after).max(gpu.tail.load(Ordering::Relaxed));
    let end = start.saturating_add(length);
    record(gpu, session.owner, start, end);
    gpu.tail.store(end, Ordering::Release);
    gpu.queued[session.index()].fetch_add(length, Ordering::Relaxed);
    Mark { end, cuts: gpu.cut_count.load(Ordering::Relaxed) }
}

fn record(gpu: &Gpu, owner: Owner, start: u64, end: u64) {
    let count = gpu.run_count.load(Ordering::Relaxed);
    if let Some(last) = count.checked_sub(1).map(|index| run(gpu, index)) {
        let same = last.slot.load(Ordering::Relaxed) == owner.slot
            && last.generation.load(Ordering::Relaxed) == owner.generation;
        let near = start.saturating_sub(last.end.load(Ordering::Relaxed)) <= GAP;
        if same && near && end.saturating_sub(last.start.load(Ordering::Relaxed)) <= JOIN {
            last.busy.fetch_add(end - start, Ordering::Relaxed);
            last.end.store(end, Ordering::Release);
            return;
        }
    }
    let new = run(gpu, count);
    new.start.store(start, Ordering::Relaxed);
    new.end.store(end, Ordering::Relaxed);
    new.busy.store(end - start, Ordering::Relaxed);
    new.slot.store(owner.slot, Ordering::Relaxed);
    new.generation.store(owner.generation, Ordering::Relaxed);
    gpu.run_count.store(count + 1, Ordering::Release);
}

fn run(gpu: &Gpu, index: u64) -> &Run {
    &gpu.runs[usize::try_from(index).unwrap_or(0) % RUNS]
}

fn cut(gpu: &Gpu, index: u64) -> &Cut {
    &gpu.cuts[usize::try_from(index).unwrap_or(0) % CUTS]
}

/// Runs that are still remembered and satisfy `wanted`, walking back from the newest until one does not.
fn newest(gpu: &Gpu, wanted: impl Fn(&Run) -> bool) -> Vec<&Run> {
    let count = gpu.run_count.load(Ordering::Acquire);
    let oldest = count.saturating_sub(RUNS as u64);
    (oldest..count).rev().map(|index| run(gpu, index)).take_while(|run| wanted(run)).collect()
}

/// Cuts the work of a dead process that has not run yet. The caller holds the time lock.
pub fn cancel(gpu: &Gpu, dead: Owner) {
    let now = clock::now();
    let mut pending = newest(gpu, |run| run.end.load(Ordering::Acquire) > now);
    pending.reverse();
    let mut shift = 0;
    let mut cuts = Vec::new();
    for run in pending {
        let (start, end) = (run.start.load(Ordering::Relaxed), run.end.load(Ordering::Relaxed));
        let theirs = run.slot.load(Ordering::Relaxed) == dead.slot
            && run.generation.load(Ordering::Relaxed) == dead.generation;
        if theirs {
            let from = start.max(now);
            cuts.push((from, end));
            let kept = share(run.busy.load(Ordering::Relaxed), from - start, end - start);
            run.busy.store(kept, Ordering::Relaxed);
            run.start.store(start - shift.min(start), Ordering::Relaxed);
            run.end.store(from - shift, Ordering::Release);
            shift += end - from;
        } else {
            run.start.store(start - shift, Ordering::Relaxed);
            run.end.store(end - shift, Ordering::Release);
        }
    }
    // From the last to the first, so that each cut is told in the time line that the next one sees.
    for (start, end) in cuts.into_iter().rev() {
        let count = gpu.cut_count.load(Ordering::Relaxed);
        cut(gpu, count).start.store(start, Ordering::Relaxed);
        cut(gpu, count).end.store(end, Ordering::Relaxed);
        gpu.cut_count.store(count + 1, Ordering::Release);
    }
    gpu.tail.fetch_sub(shift, Ordering::AcqRel);
}

/// `busy` times `part` / `whole`.
fn share(busy: u64, part: u64, whole: u64) -> u64 {
    let product = u128::from(busy) * u128::from(part);
    product.checked_div(u128::from(whole)).and_then(|ns| u64::try_from(ns).ok()).unwrap_or(0)
}

impl Mark {
    /// When the marked work ends now, on the time line with all its cuts.
    #[must_use]
    pub fn end(&self, gpu: &Gpu) -> u64 {
        let cuts = gpu.cut_count.load(Ordering::Acquire);
        if cuts == self.cuts {
            return self.end;
        }
        if cuts - self.cuts > CUTS as u64 {
            return self.end.min(gpu.tail.load(Ordering::Acquire));
        }
        (self.cuts..cuts).fold(self.end, |end, index| {
            let cut = cut(gpu, index);
            let (from, to) = (cut.start.load(Ordering::Relaxed), cut.end.load(Ordering::Relaxed));
            if end >= to { end - (to - from) } else { end }
        })
    }

    /// Whether the marked work has ended.
    #[must_use]
    pub fn done(&self, gpu: &Gpu) -> bool {
        let now = clock::now();
        // Cuts only move an end forward, so an end that has passed needs no look at them.
        self.end <= now || self.end(gpu) <= now
    }

    /// Sleeps until the marked work has ended.
    pub fn wait(&self, gpu: &Gpu, session: &Session) {
        loop {
            let left = self.end(gpu).saturating_sub(clock::now());
            if left == 0 {
                return;
            }
            if left <= SPIN {
                std::thread::yield_now();
                continue;
            }
            std::thread::sleep(std::time::Duration::from_nanos((left - SPIN / 2).min(NAP)));
            if left > NAP {
                session.sweep();
            }
        }
    }
}

/// Busy nanoseconds of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Whose.
    pub owner: Owner,
    /// Nanoseconds.
    pub time: u64,
}

/// How long each process kept `gpu` busy between two moments of the device clock.
#[must_use]
pub fn busy(gpu: &Gpu, from: u64, to: u64) -> Vec<Busy> {
    let mut sums: Vec<Busy> = Vec::new();
    for run in newest(gpu, |run| run.end.load(Ordering::Acquire) > from) {
        let (start, end) = (run.start.load(Ordering::Relaxed), run.end.load(Ordering::Relaxed));
        let part = end.min(to).saturating_sub(start.max(from));
        let time = share(run.busy.load(Ordering::Relaxed), part, end.saturating_sub(start));
        if time == 0 {
            continue;
        }
        let owner = Owner {
            slot: run.slot.load(Ordering::Relaxed),
            generation: run.generation.load(Ordering::Relaxed),
        };
        match sums.iter_mut().find(|sum| sum.owner == owner) {
            Some(sum) => sum.time += time,
            None => sums.push(Busy { owner, time }),
        }
    }
    sums
}
