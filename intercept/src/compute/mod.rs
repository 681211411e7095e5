//! The compute share: when a launch may go to the driver, and its cost.
//!
//! The unit is a nanosecond of GPU time. All processes of a container draw on one bucket per GPU, which the
//! share fills and which may be in debt. A process draws a slice at a time and spends it launch by launch, at
//! the cost of each launch's kind: the fast path is one look-up and one subtraction. When the slice is spent,
//! one thread at a time takes the slow path. It times one launch with a pair of events, limits the queued
//! work, and waits while the bucket is empty.
//!
//! Event pairs read too long if tenants take turns on the GPU, so a large share falls short while neighbours
//! are busy. The driver's own samples do not help: each names one process for 200 ms. This module never calls
//! the driver, sleeps or reads a clock: hooks drive it in real time, and tests in virtual time.

mod bucket;
mod costs;
mod credit;
mod key;
mod limiter;
mod share;

pub use bucket::Shared;
pub use credit::Credit;
pub use key::Key;
pub use limiter::{Answer, Counted, Ground, Limiter, TIMED, Timing};
pub use share::Share;

/// A microsecond in nanoseconds.
const MICROSECOND: u64 = 1_000;
/// A millisecond in nanoseconds.
const MILLISECOND: u64 = 1_000_000;

/// The most that an unused share accumulates, in nanoseconds of GPU time. With 5 ms the share between
/// containers suffers; with 20 ms bursts exceed 105 %.
const CAP: u64 = 10 * MILLISECOND;
/// The amount that a process draws at a time. It limits the loss when a process is killed, and how late a
/// change of limits takes effect.
const SLICE: u64 = MILLISECOND / 2;
/// The minimum cost of a launch: a slice is then at most 500 launches.
const LEAST_COST: u64 = MICROSECOND;
/// Unfinished work that a process may have queued. Without this limit, a process could queue work while a
/// neighbour held the GPU and later run it at full speed. A limit of 20 ms was worse. With exactly 10 ms,
/// kernels of that length would run one by one.
const DEPTH: u64 = 12 * MILLISECOND;
/// The assumed cost of a launch that was never timed.
const GUESS: u64 = MILLISECOND;
/// How many launches of kinds that were never timed may be unfinished.
const UNTIMED: usize = 4;
/// How long a launch waits for unfinished work to end. Without this limit, a stream that waits for a later
/// launch of this same thread would wait forever.
const PATIENCE: u64 = 250 * MILLISECOND;
/// A time stamp further in the future than this is invalid.
const STALE: u64 = 1_000 * MILLISECOND;
/// The longest sleep of a held-back launch before it checks again. New limits take effect within this time.
const NAP: u64 = 10 * MILLISECOND;

/// Synchronizes a test's threads to within some nanoseconds: returns once all `of` threads have arrived. True
/// for the last one.
#[cfg(test)]
fn meet(arrivals: &core::sync::atomic::AtomicU64, of: u64) -> bool {
    use core::sync::atomic::Ordering::SeqCst;
    let arrival = arrivals.fetch_add(1, SeqCst) + 1;
    let last = arrival.next_multiple_of(of);
    let mut spins = 0;
    while arrivals.load(SeqCst) < last {
        core::hint::spin_loop();
        spins += 1;
        if spins % 2_000 == 0 {
            std::thread::yield_now();
        }
    }
    arrival == last
}
