//! Credit that a process has drawn from the bucket and not yet spent, and the cost of each kind of launch.
//! While there is credit, a launch checks nothing else.
//!
//! Most programs launch from one thread. While only one thread has used the credit, it changes the word with
//! plain loads and stores. A locked instruction would first wait for all recent writes of the driver, and
//! would be more than half of the cost of a limited launch. The first other thread ends this for good. If the
//! first thread is between its load and its store at that moment, one change can be lost, once in the life of
//! a process: half a millisecond of GPU time or one launch, which the meter then settles.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::LEAST_COST;
use super::key::{Key, PLACES};
use crate::sys;

/// One launch, counted in the upper part of the word.
const LAUNCH: u64 = 1 << 40;
/// In place of a thread: no thread has used the credit yet.
const NONE: usize = 0;
/// In place of a thread: several threads have used the credit. No thread has this value: thread values are
/// addresses.
const SEVERAL: usize = 1;

/// All zero bytes: nothing to spend. The kernel wipes a forked child's copy, so a child starts on the slow
/// path.
#[repr(C)]
pub struct Credit {
    /// Nanoseconds in the lower 40 bits, as a signed number. The upper bits count down the launches that were
    /// paid here.
    word: AtomicU64,
    /// The [`sys::thread_pointer`] of the only thread that has used the credit, or [`NONE`], or [`SEVERAL`].
    thread: AtomicUsize,
    /// Costs by place of the key: the tag in the upper 32 bits, nanoseconds in the lower.
    costs: [AtomicU64; PLACES],
}

impl Default for Credit {
    fn default() -> Self {
        Self {
            word: AtomicU64::new(0),
            thread: AtomicUsize::new(NONE),
            costs: [const { AtomicU64::new(0) }; PLACES],
        }
    }
}

/// Credit that was taken back, and the launches that had been paid from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) nanoseconds: i64,
    pub(super) launches: u64,
}

/// The signed number in the lower 40 bits.
const fn nanoseconds(word: u64) -> i64 {
    (word << 24).cast_signed() >> 24
}

impl Credit {
    /// Pays for a launch. False: the cost is unknown or the credit is too low; ask the
    /// [`Limiter`](super::Limiter).
    #[inline(always)]
    pub fn spend(&self, key: Key) -> bool {
        let Some(entry) = self.costs.get(key.place()) else { return false };
        let entry = entry.load(Relaxed);
        if entry >> 32 != u64::from(key.tag()) {
            return false;
        }
        let cost = entry & 0xffff_ffff;
        match self.thread.load(Relaxed) {
            SEVERAL => self.spend_among_several(cost),
            thread => thread == sys::thread_pointer() && self.spend_alone(cost),
        }
    }

    #[inline(always)]
    fn spend_alone(&self, cost: u64) -> bool {
        let word = self.word.load(Relaxed);
        let enough = nanoseconds(word) >= cost.cast_signed();
        if enough {
            self.word.store(word.wrapping_sub(LAUNCH + cost), Relaxed);
        }
        enough
    }

    #[inline(always)]
    fn spend_among_several(&self, cost: u64) -> bool {
        let before = nanoseconds(self.word.fetch_sub(LAUNCH + cost, Relaxed));
        if before >= cost.cast_signed() {
            return true;
        }
        self.word.fetch_add(LAUNCH + cost, Relaxed);
        false
    }

    /// Records that this thread is about to change the word.
    fn ask(&self) {
        let me = sys::thread_pointer();
        let first = self.thread.compare_exchange(NONE, me, Relaxed, Relaxed);
        if first.is_err_and(|thread| thread != me) {
            self.thread.store(SEVERAL, Relaxed);
        }
    }

    /// Takes all credit back. Threads that try to spend at the same time return their part themselves.
    pub(super) fn take(&self) -> Taken {
        self.ask();
        let word = self.word.swap(0, Relaxed);
        let nanoseconds = nanoseconds(word);
        let launches = word.wrapping_sub(nanoseconds.cast_unsigned()).wrapping_neg() >> 40;
        // While a thread returns credit, its launch looks paid; the count is correct again afterwards.
        let launches = if launches < 1 << 23 { launches } else { 0 };
        Taken { nanoseconds, launches }
    }

    /// Adds `nanoseconds` to spend.
    pub(super) fn give(&self, nanoseconds: u64) {
        self.ask();
        self.word.fetch_add(nanoseconds.min(LAUNCH / 4), Relaxed);
    }

    /// Sets the cost of a launch of `key`.
    pub(super) fn set_cost(&self, key: Key, nanoseconds: u64) {
        let cost = nanoseconds.clamp(LEAST_COST, u64::from(u32::MAX));
        if let Some(place) = self.costs.get(key.place()) {
            place.store(u64::from(key.tag()) << 32 | cost, Relaxed);
        }
    }

    /// Forgets the cost of a launch of `key`.
    pub(super) fn forget_cost(&self, key: Key) {
        if let Some(place) = self.costs.get(key.place()) {
            place.store(0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: Key = Key::kernel(0x1000, [1, 1, 1], [1, 1, 1]);
    /// miri is slow: under it the tests take this many times fewer steps.
    const SHRINK: usize = if cfg!(miri) { 100 } else { 1 };

    /// Credit that several threads have used.
    fn of_several() -> Credit {
        let credit = Credit::default();
        credit.give(0);
        std::thread::scope(|scope| drop(scope.spawn(|| credit.give(0))));
        credit
    }

    #[test]
    fn the_first_thread_spends_alone_until_another_asks() {
        let credit = Credit::default();
        credit.set_cost(KERNEL, 1_000);
        credit.give(10_000);
        assert!(credit.spend(KERNEL));
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!credit.spend(KERNEL), "another thread has to ask first"));
        });
        assert!(credit.spend(KERNEL), "nobody has asked yet");
        std::thread::scope(|scope| {
            let other = || {
                assert_eq!(credit.take(), Taken { nanoseconds: 8_000, launches: 2 });
                credit.give(8_000);
                assert!(credit.spend(KERNEL));
            };
            scope.spawn(other);
        });
        assert!(credit.spend(KERNEL), "and both spend what is there");
        assert_eq!(credit.take(), Taken { nanoseconds: 6_000, launches: 2 });
    }

    #[test]
    fn a_launch_is_paid_when_its_cost_is_known_and_there_is_enough() {
        let credit = Credit::default();
        credit.give(250_000);
        assert!(!credit.spend(KERNEL), "unknown");
        credit.set_cost(KERNEL, 100_000);
        assert_eq!([(); 3].map(|()| credit.spend(KERNEL)), [true, true, false]);
        assert_eq!(credit.take(), Taken { nanoseconds: 50_000, launches: 2 });
        assert_eq!(credit.take(), Taken { nanoseconds: 0, launches: 0 });
        credit.give(1_000_000);
        credit.forget_cost(KERNEL);
        assert!(!credit.spend(KERNEL), "forgotten");
    }

    #[test]
    fn threads_that_find_too_little_leave_it_as_it_was() {
        let credit = of_several();
        credit.set_cost(KERNEL, u64::MAX); // the highest possible cost
        credit.give(1_000_000);
        let failures = std::thread::scope(|scope| {
            let run = || (0..10_000 / SHRINK).filter(|_| credit.spend(KERNEL)).count();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
        });
        assert_eq!(failures, 0);
        assert_eq!(credit.take(), Taken { nanoseconds: 1_000_000, launches: 0 });
    }

    #[test]
    fn what_is_taken_amid_spending_adds_up() {
        let credit = of_several();
        credit.set_cost(KERNEL, 1_000);
        let (spent, taken) = std::thread::scope(|scope| {
            let run = || (0..50_000 / SHRINK).filter(|_| credit.spend(KERNEL)).count() as i64;
            let threads: Vec<_> = (0..2).map(|_| scope.spawn(run)).collect();
            let mut taken = 0;
            for _ in 0..1_000 / SHRINK {
                credit.give(50_000);
                taken += credit.take().nanoseconds;
            }
            (threads.into_iter().map(|thread| thread.join().unwrap()).sum::<i64>(), taken)
        });
        assert_eq!(spent * 1_000 + taken + credit.take().nanoseconds, 50_000_000 / SHRINK as i64);
    }
}
