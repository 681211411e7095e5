//! The compute share: when a launch may go to the driver, and what it costs.
//!
//! The unit is a nanosecond of GPU time. All processes of a container draw on one bucket per GPU, which the share fills
//! and which may be in debt. A process draws a slice at a time and spends it launch by launch at what each kind of
//! launch costs: the fast path is one look-up and one subtraction. Between two slices stands the slow path, one thread at
//! a time: it times one launch with a pair of events, bounds what is queued, waits while the bucket is empty, and settles
//! what the host's meter measured against what was charged.
//!
//! Event pairs decide how fast to launch, the meter decides what is owed. Pairs alone read too long where tenants take
//! turns on the GPU; the meter alone comes too late. Nothing here calls the driver, sleeps or reads a clock: hooks drive
//! it in real time and tests in virtual time.

mod bucket;
mod credit;
mod key;
mod limiter;
mod samples;
mod settle;
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

/// Most that an unused share adds up to. With 5 ms the share between containers suffers, with 20 ms bursts pass 105 %.
const CAP: u64 = 10 * MILLISECOND;
/// Most that is kept of what was charged too much; with more, a second holds too much of what is made up for.
const REFUND_CAP: u64 = 15 * MILLISECOND;
/// The same where charges are true to the launches, and only early.
const REFUND_CAP_EXACT: u64 = 100 * MILLISECOND;
/// What is given back there in one measured window.
const REFUND_STEP: u64 = 3 * MILLISECOND;
/// What a process draws at a time. It bounds what a killed process takes with it, and how late a change of limits is
/// seen.
const SLICE: u64 = MILLISECOND / 2;
/// The least that a launch costs: a slice is then at most 500 launches.
const LEAST_COST: u64 = MICROSECOND;
/// Unfinished work that a process may have queued. Without a bound, what was saved while a neighbour held the GPU is run
/// off at full speed later; 20 ms was worse. With exactly 10 ms, kernels of that length would run one by one.
const DEPTH: u64 = 12 * MILLISECOND;
/// What a launch that was never timed is taken for.
const GUESS: u64 = MILLISECOND;
/// Launches of never timed kinds that may be unfinished.
const UNTIMED: usize = 4;
/// How long a launch waits for unfinished work to end. A stream that waits for what this very thread has yet to launch
/// would otherwise wait for ever.
const PATIENCE: u64 = 250 * MILLISECOND;
/// A line that the meter has not written for so long says nothing.
const STALE: u64 = 1_000 * MILLISECOND;
/// Longest that a held-back launch sleeps before it looks again: new limits are obeyed that soon.
const NAP: u64 = 10 * MILLISECOND;

/// Keeps a test's threads together to some nanoseconds: returns when all `of` have come. True for the last.
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
