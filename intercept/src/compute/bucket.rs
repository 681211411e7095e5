//! The bucket that all processes of a container share, and the record of its charges. The tenant can write
//! every byte of both, so no value makes these functions panic, wait or overflow.
//!
//! Each step is one atomic operation, or one atomic operation decides who makes it. A process may therefore
//! be killed or stopped between any two steps and blocks nobody. At most what it was about to add is lost.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release};

use gpushare_region::{Bucket, CHARGE_MOMENTS, ChargeMoment, Settlement};

use super::{CAP, Ground, MICROSECOND, MILLISECOND, NAP, REFUND_CAP, REFUND_CAP_EXACT, REFUND_STEP, STALE};

/// Length of time for which one moment of the charges is kept, in nanoseconds.
const MOMENT: u64 = 2 * MILLISECOND;
/// Refills closer together than this are left to the next one, which keeps their rounding below 1 in 5,000.
const LEAST_REFILL: u64 = 20 * MICROSECOND;
/// The longest time that one refill counts.
const LONGEST_REFILL: u64 = 3_600_000 * MILLISECOND;
/// A container begins with a debt of what it earns in this time, since nothing is known about its first
/// launches.
const FIRST_DEBT: u64 = 20 * MILLISECOND;
/// One in the fixed-point numbers of [`Bucket::scale`].
const ONE: u64 = 1 << 20;

/// The shared books of one device.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    /// The bucket.
    pub bucket: &'a Bucket,
    /// The records from which the bucket is settled.
    pub settlement: &'a Settlement,
}

impl<'a> Shared<'a> {
    /// The part of `ground` that all processes share.
    pub fn new(ground: &Ground<'a>) -> Self {
        Self { bucket: ground.bucket, settlement: ground.settlement }
    }

    /// GPU time left, in nanoseconds; negative: debt.
    pub fn level(&self) -> i64 {
        self.bucket.nanoseconds.load(Relaxed).cast_signed()
    }

    /// GPU time ever taken, in nanoseconds.
    pub(super) fn charged(&self) -> u64 {
        self.bucket.charged.load(Relaxed)
    }

    /// Adds what `rate` (hundredths of a percent) has earned since the last refill by any process.
    pub(super) fn refill(&self, now: u64, rate: u64) {
        let last = self.bucket.refilled.load(Relaxed);
        // A process that read the clock before the last refill is late. A time stamp far in the future is not
        // valid.
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
        // The first refill, and one after a time stamp from the future, begin a new count.
        if last == 0 || last > now {
            return;
        }
        let earned = (now - last).min(LONGEST_REFILL) * rate / 10_000;
        self.add(earned.cast_signed(), CAP);
    }

    /// Takes `nanoseconds` of GPU time; a negative number gives them back. The bucket may be in debt
    /// afterwards.
    pub(super) fn charge(&self, now: u64, nanoseconds: i64) {
        self.add(nanoseconds.saturating_neg(), CAP);
        self.bucket.charged.fetch_add(nanoseconds.cast_unsigned(), Relaxed);
        self.remember(now);
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

    /// Corrects a difference between charged and measured time. What was charged too much is kept apart,
    /// since a bucket that is full of it could not be filled.
    ///
    /// `exact`: the charges matched the launches. The difference is then work that was charged in one window
    /// and runs in the next, which corrects itself there. Little is given back meanwhile.
    pub(super) fn correct(&self, charged_too_much: i64, exact: bool) {
        let cap = if exact { REFUND_CAP_EXACT } else { REFUND_CAP };
        let refund = self.bucket.refund.load(Relaxed).min(REFUND_CAP_EXACT).cast_signed();
        let sum = refund.saturating_add(charged_too_much).min(cap.cast_signed());
        let given = sum.min(if exact { REFUND_STEP.cast_signed() } else { 0 });
        self.bucket.refund.store((sum - given).cast_unsigned(), Relaxed);
        self.add(given, CAP);
    }

    /// Fills an empty bucket from what is to be given back.
    pub(super) fn give_back(&self) {
        let refund = self.bucket.refund.load(Relaxed);
        if refund == 0 || self.level() > 0 {
            return;
        }
        // More may have been kept while the process was alone.
        let kept = refund.min(REFUND_CAP);
        let part = kept.min(CAP / 2);
        let given = self.bucket.refund.compare_exchange(refund, kept - part, Relaxed, Relaxed);
        if given.is_ok() {
            self.add(part.cast_signed(), CAP);
        }
    }

    /// Converts estimated nanoseconds to nanoseconds of the bucket.
    pub(super) fn scaled(&self, nanoseconds: u64) -> u64 {
        let product = u128::from(nanoseconds) * u128::from(self.scale());
        u64::try_from(product >> ONE.trailing_zeros()).unwrap_or(u64::MAX).min(i64::MAX.cast_unsigned())
    }

    /// The scale, within the bounds of the settlement: a tenth to four times.
    pub(super) fn scale(&self) -> u64 {
        match self.bucket.scale.load(Relaxed) {
            0 => ONE,
            scale => scale.clamp(ONE / 10, 4 * ONE),
        }
    }

    /// Notes that a launch is held back for the share.
    pub(super) fn hold_back(&self, now: u64) {
        self.bucket.held_back.store(now, Relaxed);
    }

    /// Notes how long a launch was held back.
    pub fn count_throttled(&self, nanoseconds: u64) {
        self.bucket.throttled.fetch_add(nanoseconds, Relaxed);
    }

    /// How long it takes at `rate` until there is something to draw, in nanoseconds, at most [`NAP`].
    pub(super) fn time_to_credit(&self, rate: u64) -> u64 {
        let debt = self.level().min(0).unsigned_abs().min(LONGEST_REFILL);
        let time = debt.saturating_mul(10_000) / rate.max(1);
        time.saturating_add(20 * MICROSECOND).clamp(50 * MICROSECOND, NAP)
    }

    /// Notes what has been charged up to now, once per [`MOMENT`].
    fn remember(&self, now: u64) {
        let place = usize::try_from(now / MOMENT).unwrap_or(0) % CHARGE_MOMENTS;
        let Some(moment) = self.settlement.moments.get(place) else { return };
        let known = moment.time.load(Relaxed);
        if known / MOMENT == now / MOMENT {
            return;
        }
        // Two processes may both get here. The pair of either, and a mixture of both, is right to within some
        // microseconds.
        moment.time.store(0, Relaxed);
        moment.charged.store(self.bucket.charged.load(Relaxed), Release);
        moment.time.store(now, Release);
    }

    /// What had been charged at `time`, interpolated between the moments around it.
    pub(super) fn charged_at(&self, time: u64, now: u64) -> u64 {
        let charged = self.bucket.charged.load(Relaxed);
        let (mut before, mut after): (Option<(u64, u64)>, (u64, u64)) = (None, (now, charged));
        for moment in self.settlement.moments.iter().filter_map(read) {
            if moment.0 <= time {
                before = before.max(Some(moment));
            } else if moment.0 < after.0 {
                after = moment;
            }
        }
        let Some(before) = before else { return after.1 };
        let grown = after.1.wrapping_sub(before.1);
        let span = after.0.saturating_sub(before.0).max(1);
        // A corrupted ring gives a wrong number and nothing worse.
        before.1.wrapping_add(part(grown, time - before.0, span))
    }
}

/// `number * part / whole`, for a number that may wrap below zero. A 128-bit division would need a library.
fn part(number: u64, part: u64, whole: u64) -> u64 {
    const LONGEST: u64 = 1 << 43;
    let fraction = (part.min(whole).min(LONGEST) << 20) / whole.clamp(1, LONGEST);
    let product = (i128::from(number.cast_signed()) * i128::from(fraction)) >> 20;
    i64::try_from(product).unwrap_or(0).cast_unsigned()
}

/// Time and charge of a moment; `None` while it is being written.
fn read(moment: &ChargeMoment) -> Option<(u64, u64)> {
    let time = load(&moment.time);
    let charged = load(&moment.charged);
    (time != 0 && load(&moment.time) == time).then_some((time, charged))
}

fn load(word: &AtomicU64) -> u64 {
    word.load(core::sync::atomic::Ordering::Acquire)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1_000_000 * MILLISECOND;

    fn shared() -> Shared<'static> {
        Shared { bucket: Box::leak(Box::default()), settlement: Box::leak(Box::default()) }
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
            shared.charge(START, charge);
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
    fn what_was_kept_of_too_much_is_given_back_down_to_nothing() {
        for (what, exact, too_much, level) in [
            ("a little", false, 3_000_000, 3_000_000),
            ("all that is kept", false, 90_000_000, 15_000_000),
            ("of more than is kept, what is kept", true, 90_000_000, 15_000_000),
        ] {
            let shared = shared();
            shared.correct(too_much, exact);
            let start = shared.level();
            for _ in 0..5 {
                shared.charge(START, shared.level()); // empty again
                shared.give_back();
            }
            let earned = shared.charged().cast_signed() + shared.level() - start;
            assert_eq!((earned, shared.bucket.refund.load(Relaxed)), (level, 0), "{what}");
        }
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
                    shared.charge(START, 500_000); // what half of a millisecond earns
                }
                super::super::meet(&arrivals, 2);
                shared.refill(START + round * MILLISECOND, 5_000);
            }
        };
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(race))));
        assert_eq!(shared.level(), -10_000_000, "as after the first refill");
    }

    #[test]
    fn what_was_charged_at_a_moment_is_found_between_the_moments_around_it() {
        let shared = shared();
        for step in 1..=600u64 {
            shared.charge(START + step * MILLISECOND, 100_000);
        }
        for (what, ago, want) in
            [("now", 0, 60_000_000), ("lately", 51, 54_900_000), ("long ago", 400, 20_000_000)]
        {
            let charged = shared.charged_at(START + (600 - ago) * MILLISECOND, START + 600 * MILLISECOND);
            assert!(charged.abs_diff(want) <= 100_000, "{what}: {charged}");
        }
        let oldest = shared.charged_at(START, START + 600 * MILLISECOND);
        assert!(oldest.abs_diff(8_900_000) < 300_000, "older than the ring: the oldest, {oldest}");
    }

    #[test]
    fn whatever_the_tenant_writes_is_computed_with() {
        for bytes in [u64::MAX, u64::MAX / 2, 1 << 63, 1 << 40, 1] {
            let shared = shared();
            let bucket = shared.bucket;
            for word in [&bucket.nanoseconds, &bucket.refilled, &bucket.charged, &bucket.scale] {
                word.store(bytes, Relaxed);
            }
            for moment in &shared.settlement.moments {
                moment.time.store(bytes, Relaxed);
                moment.charged.store(bytes.rotate_left(7), Relaxed);
            }
            shared.refill(START, u64::MAX);
            shared.charge(START, i64::MIN);
            shared.charge(START, i64::MAX);
            shared.charged_at(START, START + 1);
            shared.charged_at(u64::MAX, START);
            assert!(shared.scaled(u64::MAX) <= i64::MAX.cast_unsigned());
            assert!(shared.time_to_credit(0) <= NAP);
        }
    }
}
