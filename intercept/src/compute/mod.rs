//! The compute share: when a launch may go to the driver, and what it costs.
//!
//! The unit is a nanosecond of GPU time. All processes of a container draw on one bucket per GPU, which the
//! share fills and which may be in debt. A process draws a slice at a time and spends it launch by launch, at
//! what each kind of launch costs: the fast path is one look-up and one subtraction. When the slice is spent,
//! one thread at a time takes the slow path. It times one launch with a pair of events, bounds what is
//! queued, and waits while the bucket is empty.
//!
//! Event pairs read too long where tenants take turns on the GPU, so that a large share beside busy neighbours
//! falls short. The driver's own samples are no remedy: each names one process for 200 ms. Nothing here calls
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
/// containers suffers, with 20 ms bursts pass 105 %.
const CAP: u64 = 10 * MILLISECOND;
/// What a process draws at a time. It bounds what is lost with a killed process, and how late a change of
/// limits is seen.
const SLICE: u64 = MILLISECOND / 2;
/// The least that a launch costs: a slice is then at most 500 launches.
const LEAST_COST: u64 = MICROSECOND;
/// Unfinished work that a process may have queued. Without a bound, a process would later run at full speed
/// what it saved while a neighbour held the GPU. A bound of 20 ms was worse. With exactly 10 ms, kernels of
/// that length would run one by one.
const DEPTH: u64 = 12 * MILLISECOND;
/// The assumed cost of a launch that was never timed.
const GUESS: u64 = MILLISECOND;
/// How many launches of kinds that were never timed may be unfinished.
const UNTIMED: usize = 4;
/// How long a launch waits for unfinished work to end. Without this bound, a stream that waits for a later
/// launch of this same thread would wait for ever.
const PATIENCE: u64 = 250 * MILLISECOND;
/// A time stamp further in the future than this is not valid.
const STALE: u64 = 1_000 * MILLISECOND;
/// The longest sleep of a held-back launch before it looks again. New limits are obeyed within this time.
const NAP: u64 = 10 * MILLISECOND;

/// Brings a test's threads together to within some nanoseconds: returns when all `of` threads have arrived.
/// True for the last one.
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
