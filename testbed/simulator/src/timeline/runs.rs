//! The ring of runs: a GPU's past work and, in the order of submission, its planned work.

use std::sync::atomic::Ordering;

use crate::lock::Owner;
use crate::state::{Gpu, RUNS, Run};

/// Runs are joined up to this length in nanoseconds, so that short kernels do not fill the ring.
const JOIN: u64 = 1_000_000;
/// Gaps up to this length between runs are joined, nanoseconds.
const GAP: u64 = 100_000;

/// Returns the run with number `index`, counted from the GPU's first.
pub fn run(gpu: &Gpu, index: u64) -> &Run {
    &gpu.runs[usize::try_from(index).unwrap_or(0) % RUNS]
}

/// Returns the process to which the run belongs.
pub fn owner(run: &Run) -> Owner {
    Owner { slot: run.slot.load(Ordering::Relaxed), generation: run.generation.load(Ordering::Relaxed) }
}

/// Returns the number of the newest run, if the work of `owned` from `start` to `end` can be added to it.
pub fn extensible(gpu: &Gpu, owned: Owner, start: u64, end: u64) -> Option<u64> {
    let index = gpu.run_count.load(Ordering::Relaxed).checked_sub(1)?;
    let last = run(gpu, index);
    let near = start.saturating_sub(last.end.load(Ordering::Relaxed)) <= GAP;
    let short = end.saturating_sub(last.start.load(Ordering::Relaxed)) <= JOIN;
    (owner(last) == owned && near && short).then_some(index)
}

/// Lists the newest runs that satisfy `wanted`, newest first, up to the first that does not.
pub fn newest(gpu: &Gpu, wanted: impl Fn(&Run) -> bool) -> Vec<&Run> {
    let count = gpu.run_count.load(Ordering::Acquire);
    let oldest = count.saturating_sub(RUNS as u64);
    (oldest..count).rev().map(|index| run(gpu, index)).take_while(|run| wanted(run)).collect()
}

/// Returns `busy` * `part` / `whole`; 0 if `whole` is 0.
pub fn share(busy: u64, part: u64, whole: u64) -> u64 {
    let product = u128::from(busy) * u128::from(part);
    product.checked_div(u128::from(whole)).and_then(|ns| u64::try_from(ns).ok()).unwrap_or(0)
}
