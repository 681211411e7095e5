//! The bucket that all processes of a container share. The tenant can write every byte in it, so these
//! functions must not panic, wait or overflow for any value.
//!
//! Each step is one atomic operation, or one atomic operation decides which process makes it. A process may
//! therefore be killed or stopped between any two steps without blocking others. At most the amount that it
//! was about to add is lost.

use core::sync::atomic::Ordering::Relaxed;

use gpushare_region::Bucket;

use super::{CAP, Ground, MICROSECOND, MILLISECOND, NAP, STALE};

/// Refills closer together than this are left to the next one, which keeps the rounding error below 1 in
/// 5,000.
const LEAST_REFILL: u64 = 20 * MICROSECOND;
/// The longest time that one refill counts.
const LONGEST_REFILL: u64 = 3_600_000 * MILLISECOND;
/// A container starts with a debt worth this much time, since nothing is known about its first launches.
const FIRST_DEBT: u64 = 20 * MILLISECOND;

/// The shared books of one device.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    /// The bucket.
    pub bucket: &'a Bucket,
}

impl<'a> Shared<'a> {
    /// The part of `ground` that all processes share.
    pub fn new(ground: &Ground<'a>) -> Self {
        Self { bucket: ground.bucket }
    }

    /// GPU time left, in nanoseconds; negative: debt.
    pub fn level(&self) -> i64 {
        self.bucket.nanoseconds.load(Relaxed).cast_signed()
    }

    /// Adds the time earned at `rate` (hundredths of a percent) since the last refill by any process.
    pub(super) fn refill(&self, now: u64, rate: u64) {
        let last = self.bucket.refilled.load(Relaxed);
        // A process that read the clock before the last refill is late. A time stamp far in the future is
        // invalid.
        let late = last > now && last - now < STALE;
        if late || now.wrapping_sub(last) < LEAST_REFILL {
            return;
        }
        if self.bucket.refilled.compare_exchange(last, now, Relaxed, Relaxed).is_err() {
            return; // another process refills
        }
        let rate = rate.min(10_000);
        if last == 0 {
            self.add(-(FIRST_DEBT * rate / 10_000).cast_signed(), 0);
        }
        // The first refill, and one after a time stamp from the future, start a new count.
        if last == 0 || last > now {
            return;
        }
        let earned = (now - last).min(LONGEST_REFILL) * rate / 10_000;
        self.add(earned.cast_signed(), CAP);
    }

    /// Takes `nanoseconds` of GPU time; a negative number gives them back. The bucket may be in debt
    /// afterwards.
    pub(super) fn charge(&self, nanoseconds: i64) {
        self.add(nanoseconds.saturating_neg(), CAP);
    }

    /// Adds to the bucket, up to `cap`. A bucket that is already above `cap` stays as it is.
    pub(super) fn add(&self, nanoseconds: i64, cap: u64) {
        let cap = cap.cast_signed();
        let change = |level: u64| {
            let level = level.cast_signed();
            let sum = level.saturating_add(nanoseconds);
            let new = if nanoseconds > 0 { sum.min(cap.max(level)) } else { sum };
            Some(new.cast_unsigned())
        };
        let _ = self.bucket.nanoseconds.fetch_update(Relaxed, Relaxed, change);
    }

    /// Records how long a launch was held back.
    pub fn count_throttled(&self, nanoseconds: u64) {
        self.bucket.throttled.fetch_add(nanoseconds, Relaxed);
    }

    /// How long it takes at `rate` until the bucket has credit, in nanoseconds, at most [`NAP`].
    pub(super) fn time_to_credit(&self, rate: u64) -> u64 {
        let debt = self.level().min(0).unsigned_abs().min(LONGEST_REFILL);
        let time = debt.saturating_mul(10_000) / rate.max(1);
        time.saturating_add(20 * MICROSECOND).clamp(50 * MICROSECOND, NAP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1_000_000 * MILLISECOND;

    fn shared() -> Shared<'static> {
        Shared { bucket: Box::leak(Box::default()) }
    }

    #[test]
    fn the_share_fills_the_bucket_by_wall_time_up_to_the_cap_and_pays_debt_in_full() {
        let shared = shared();
        shared.refill(START, 2500);
        for (what, charge, after, level) in [
            ("a quarter of 28 ms, of which 20 were owed", 0, 28, 2_000_000),
            ("the cap", 0, 1_000, 10_000_000),
            ("debt of a long kernel", 510_000_000, 0, -500_000_000),
            ("a second later", 0, 1_000, -250_000_000),
            ("paid back", 0, 1_000, 0),
        ] {
            shared.charge(charge);
            let now = shared.bucket.refilled.load(Relaxed) + after * MILLISECOND;
            shared.refill(now, 2500);
            assert_eq!(shared.level(), level, "{what}");
        }
    }

    #[test]
    fn no_time_is_earned_twice_by_a_process_that_read_the_clock_early() {
        let shared = shared();
        shared.refill(START, 5000);
        let before = shared.level();
        for (what, at, earned) in [
            ("on time", 5 * MILLISECOND, 2_500_000),
            ("read before that, and came later", MILLISECOND, 2_500_000),
            ("on time again", 6 * MILLISECOND, 3_000_000),
        ] {
            shared.refill(START + at, 5000);
            assert_eq!(shared.level() - before, earned, "{what}");
        }
        shared.bucket.refilled.store(START + 2 * STALE, Relaxed);
        shared.refill(START + 7 * MILLISECOND, 5000);
        shared.refill(START + 9 * MILLISECOND, 5000);
        assert_eq!(shared.level() - before, 4_000_000, "after a stamp from the future");
    }

    #[test]
    fn racing_processes_fill_the_bucket_once() {
        // miri is slow.
        const ROUNDS: u64 = if cfg!(miri) { 20 } else { 5_000 };
        let shared = shared();
        shared.refill(START, 5_000);
        let arrivals = core::sync::atomic::AtomicU64::new(0);
        let race = || {
            for round in 1..=ROUNDS {
                if super::super::meet(&arrivals, 2) {
                    shared.charge(500_000); // half a millisecond's earnings
                }
                super::super::meet(&arrivals, 2);
                shared.refill(START + round * MILLISECOND, 5_000);
            }
        };
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(race))));
        assert_eq!(shared.level(), -10_000_000, "as after the first refill");
    }

    #[test]
    fn whatever_the_tenant_writes_is_computed_with() {
        for bytes in [u64::MAX, u64::MAX / 2, 1 << 63, 1 << 40, 1] {
            let shared = shared();
            let bucket = shared.bucket;
            for word in [&bucket.nanoseconds, &bucket.refilled] {
                word.store(bytes, Relaxed);
            }
            shared.refill(START, u64::MAX);
            shared.charge(i64::MIN);
            shared.charge(i64::MAX);
            assert!(shared.time_to_credit(0) <= NAP);
        }
    }
}
