//! A GPU that works in the order of submission, so that an end is known at submission.
//!
//! The work of a killed process is cut out, and the work after it moves forward. An [`End`] keeps the number
//! of cuts made before it, and applies the later ones when its moment is computed.

use std::sync::atomic::Ordering;

use super::runs::{self, extensible, newest, run, share};
use crate::clock;
use crate::lock::Owner;
use crate::state::{CUTS, Cut, Gpu};

/// When a piece of work ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// Nanoseconds of the device clock, on the time line as it was when the work was queued.
    pub time: u64,
    /// Number of cuts made before the work was queued.
    pub cuts: u64,
}

/// Queues `length` nanoseconds of work that starts at `after` or later. The caller holds the time lock.
pub fn submit(gpu: &Gpu, owner: Owner, length: u64, after: u64) -> End {
    let start = clock::now().max(after).max(gpu.tail.load(Ordering::Relaxed));
    let end = start.saturating_add(length);
    record(gpu, owner, start, end);
    gpu.tail.store(end, Ordering::Release);
    End { time: end, cuts: gpu.cut_count.load(Ordering::Relaxed) }
}

fn record(gpu: &Gpu, owner: Owner, start: u64, end: u64) {
    if let Some(index) = extensible(gpu, owner, start, end) {
        let last = run(gpu, index);
        last.busy.fetch_add(end - start, Ordering::Relaxed);
        last.end.store(end, Ordering::Release);
        return;
    }
    let count = gpu.run_count.load(Ordering::Relaxed);
    let new = run(gpu, count);
    new.start.store(start, Ordering::Relaxed);
    new.end.store(end, Ordering::Relaxed);
    new.busy.store(end - start, Ordering::Relaxed);
    new.slot.store(owner.slot, Ordering::Relaxed);
    new.generation.store(owner.generation, Ordering::Relaxed);
    gpu.run_count.store(count + 1, Ordering::Release);
}

fn cut(gpu: &Gpu, index: u64) -> &Cut {
    &gpu.cuts[usize::try_from(index).unwrap_or(0) % CUTS]
}

/// Cuts out the work of a dead process that has not run yet. The caller holds the time lock.
pub fn cancel(gpu: &Gpu, dead: Owner) {
    let now = clock::now();
    let mut pending = newest(gpu, |run| run.end.load(Ordering::Acquire) > now);
    pending.reverse();
    let mut shift = 0;
    let mut cuts = Vec::new();
    for run in pending {
        let (start, end) = (run.start.load(Ordering::Relaxed), run.end.load(Ordering::Relaxed));
        if runs::owner(run) == dead {
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
    // From the last to the first, because each cut must be in the time line that the next one sees.
    for (start, end) in cuts.into_iter().rev() {
        let count = gpu.cut_count.load(Ordering::Relaxed);
        cut(gpu, count).start.store(start, Ordering::Relaxed);
        cut(gpu, count).end.store(end, Ordering::Relaxed);
        gpu.cut_count.store(count + 1, Ordering::Release);
    }
    gpu.tail.fetch_sub(shift, Ordering::AcqRel);
}

impl End {
    /// Returns the moment of the end, on the time line with all its cuts, in nanoseconds of the device clock.
    pub fn time(&self, gpu: &Gpu) -> u64 {
        let cuts = gpu.cut_count.load(Ordering::Acquire);
        if cuts == self.cuts {
            return self.time;
        }
        if cuts - self.cuts > CUTS as u64 {
            return self.time.min(gpu.tail.load(Ordering::Acquire));
        }
        (self.cuts..cuts).fold(self.time, |end, index| {
            let cut = cut(gpu, index);
            let (from, to) = (cut.start.load(Ordering::Relaxed), cut.end.load(Ordering::Relaxed));
            if end >= to { end - (to - from) } else { end }
        })
    }

    /// Whether the end has come.
    pub fn passed(&self, gpu: &Gpu) -> bool {
        let now = clock::now();
        // Cuts only make an end earlier, so an end that has passed does not need them.
        self.time <= now || self.time(gpu) <= now
    }
}
