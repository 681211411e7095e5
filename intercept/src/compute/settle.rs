//! Settles what was charged against what the host's meter measured. This keeps the share exact over time,
//! however wrong the estimates are.
//!
//! The driver measures in whole percents, so where event pairs are right, the meter knows less than they do.
//! While both agree to within the meter's rounding and the work that is queued, nothing is settled.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use gpushare_region::SETTLED_WINDOWS;

use super::bucket::Shared;
use super::share::Reading;
use super::{DEPTH, MILLISECOND, STALE};

/// If more than this was measured or charged before the first window, the container and the meter did not
/// begin together.
const LONGEST_START: u64 = 2_000 * MILLISECOND;
/// The longest distance between windows while launches are limited to the share. A process that asks more
/// seldom leaves longer gaps, and so does a meter that was silent.
const LONGEST_WINDOW: u64 = 2_000 * MILLISECOND;
/// The most that is settled at once, in nanoseconds: a little more than an hour. The scale multiplies it by
/// 2^20.
const MOST: i64 = 1 << 42;
/// How many windows the scale is computed from: one second of the driver's samples.
const SCALE_WINDOWS: u32 = 6;
/// Charges below this number of nanoseconds say nothing about the scale.
const LEAST_CHARGE: i64 = 15 * MILLISECOND.cast_signed();
/// The place of the window up to which everything is settled. The windows before it in the list are the last
/// ones.
const BASE: usize = SETTLED_WINDOWS - 1;
/// For how many windows differences that rounding explains are added up. One that lasts is noticed in this
/// time, ten seconds, and what was found until then is forgotten after it.
const LONGEST_TRUST: u32 = 60;
/// What rounding may hide, in thousandths of the elapsed time: a point. The driver tells whole percents of
/// each process, so of four processes it hides more, and of one less.
const ROUNDING: u64 = 10;
/// How far the scale may be from one for the pairs to be right again.
const NEAR_ONE: i64 = ONE / 32;
/// By how many percent of a deviation one window moves the scale.
const GAIN: i64 = 15;
/// The same for the first window in which pairs and meter disagree.
const FIRST_GAIN: i64 = 40;
/// One in the fixed-point scale.
const ONE: i64 = 1 << 20;

/// A settled window, read out.
#[derive(Clone, Copy)]
struct Window {
    until: u64,
    own: u64,
    charged: u64,
    number: u32,
    grants: u32,
}

impl Shared<'_> {
    /// Settles the windows up to `reading`, once for all processes: the process that moves `settled` does it.
    /// `exact`: as for [`correct`](Self::correct).
    ///
    /// `grants`: as in [`Ground`](super::Ground).
    pub(super) fn settle(&self, reading: &Reading, grants: u32, now: u64, exact: bool) {
        let settled = self.bucket.settled.load(Acquire);
        if reading.until <= settled && settled <= now.saturating_add(STALE) {
            return;
        }
        let charged = self.charged_at(reading.until, now);
        let last = self.last_window(settled, grants);
        let mut new = Window { until: reading.until, own: reading.own, charged, number: 0, grants };
        let known = last.filter(|last| continues(last, &new));
        // The scale is not computed from windows of another account.
        let step = if known.is_some() { 1 } else { SCALE_WINDOWS + 1 };
        new.number = last.map_or(0, |last| last.number).wrapping_add(step);
        let trusted = self.is_trusted();
        let first = self.first_before(&new).or(known);
        let base = self.read(BASE).filter(|base| known.is_some() && is_same_account(base, &new));
        let unsettled = base.or(known);
        let agrees = [first, unsettled].iter().flatten().all(|base| agree(base, &new));
        self.write(usize::try_from(new.number).unwrap_or(0) % BASE, &new);
        let moved = self.bucket.settled.compare_exchange(settled, new.until, Release, Relaxed).is_ok();
        // Who was stopped here leaves the rest to the next window.
        if !moved || self.bucket.settled.load(Acquire) != new.until {
            return;
        }
        let old = base.is_none_or(|base| new.number.wrapping_sub(base.number) > LONGEST_TRUST);
        if !(trusted && agrees) || old {
            self.write(BASE, &new);
        }
        let (Some(first), Some(unsettled)) = (first, unsettled) else { return };
        if trusted && agrees {
            return self.correct(0, exact);
        }
        let (measured, charged) = grown(&unsettled, &new);
        self.correct(charged.saturating_sub(measured), exact);
        match agrees && (self.scale().cast_signed() - ONE).abs() < NEAR_ONE {
            true => self.bucket.scale.store(ONE.cast_unsigned(), Relaxed),
            false => self.rescale(&first, &new),
        }
    }

    /// The window that ended at `settled`. For a container that has just begun, the empty window before the
    /// first.
    fn last_window(&self, settled: u64, grants: u32) -> Option<Window> {
        if settled == 0 {
            return Some(Window { until: 0, own: 0, charged: 0, number: 0, grants });
        }
        self.windows().find(|window| window.until == settled)
    }

    fn windows(&self) -> impl Iterator<Item = Window> {
        (0..BASE).filter_map(|place| self.read(place))
    }

    /// The window in `place`; `None` while there is none.
    fn read(&self, place: usize) -> Option<Window> {
        let words = self.settlement.windows.get(place)?;
        let window = Window {
            until: words.until.load(Acquire),
            own: words.own.load(Acquire),
            charged: words.charged.load(Acquire),
            number: words.number.load(Acquire),
            grants: words.grants.load(Acquire),
        };
        // Another process may be writing it.
        (window.until != 0 && words.until.load(Relaxed) == window.until).then_some(window)
    }

    /// All processes that settle the same window write the same to within some microseconds. A process that
    /// is one window late may overwrite the newer window; the next window then begins a new account.
    fn write(&self, place: usize, new: &Window) {
        let Some(window) = self.settlement.windows.get(place) else { return };
        window.until.store(0, Relaxed);
        window.own.store(new.own, Release);
        window.charged.store(new.charged, Relaxed);
        window.number.store(new.number, Relaxed);
        window.grants.store(new.grants, Relaxed);
        window.until.store(new.until, Release);
    }

    /// Whether the event pairs alone decide.
    fn is_trusted(&self) -> bool {
        self.scale() == ONE.cast_unsigned()
    }

    /// The first of the last windows of the account, up to [`SCALE_WINDOWS`] before `new`.
    fn first_before(&self, new: &Window) -> Option<Window> {
        let oldest = new.number.saturating_sub(SCALE_WINDOWS);
        let remembered = self.windows().filter(|window| (oldest..new.number).contains(&window.number));
        remembered.min_by_key(|window| window.number).filter(|first| first.until < new.until)
    }

    /// Moves the scale towards what estimated time really cost between two windows. It moves slowly, since
    /// the bucket itself is corrected at once.
    fn rescale(&self, first: &Window, new: &Window) {
        let (measured, charged) = grown(first, new);
        if charged < LEAST_CHARGE {
            return;
        }
        // Bounded by `grown`: nothing here overflows.
        let ratio = (measured * ONE / charged.max(1)).clamp(ONE / 2, 2 * ONE);
        let gain = if self.is_trusted() { FIRST_GAIN } else { GAIN };
        let gain = ONE + (ratio - ONE) * gain / 100;
        let scale = self.scale().cast_signed() * gain / ONE;
        self.bucket.scale.store(scale.clamp(ONE / 10, 4 * ONE).cast_unsigned(), Relaxed);
    }
}

/// Whether `new` continues the account of `last`. It does not after a restart of the meter, after a change of
/// limits, or after a time in which more was charged than the meter measured.
fn continues(last: &Window, new: &Window) -> bool {
    if last.until == 0 {
        return new.own.max(new.charged) < LONGEST_START;
    }
    let (measured, charged) = grown(last, new);
    let near = new.until.wrapping_sub(last.until) <= LONGEST_WINDOW;
    is_same_account(last, new) && (near || measured >= charged)
}

/// Whether the meter counted on, under the same limits.
fn is_same_account(from: &Window, to: &Window) -> bool {
    to.own >= from.own && to.grants == from.grants
}

/// Whether charges and measurements differ between two windows by no more than what rounding and queued work
/// explain. Queued work is charged, and runs later.
fn agree(first: &Window, new: &Window) -> bool {
    let (measured, charged) = grown(first, new);
    let known = if first.until == 0 { 0 } else { new.until.wrapping_sub(first.until) };
    let elapsed = known.min(LONGEST_WINDOW * u64::from(LONGEST_TRUST));
    let rounding = (elapsed / 1000 * ROUNDING).cast_signed();
    (measured - charged).abs() <= rounding + DEPTH.cast_signed()
}

/// Measured and charged nanoseconds between two windows. A corrupted file gives wrong numbers, but within
/// bounds.
fn grown(from: &Window, to: &Window) -> (i64, i64) {
    [to.own.wrapping_sub(from.own), to.charged.wrapping_sub(from.charged)]
        .map(|grown| grown.cast_signed().clamp(-MOST, MOST))
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = MILLISECOND * 1_000 / 6;

    fn shared() -> Shared<'static> {
        Shared { bucket: Box::leak(Box::default()), settlement: Box::leak(Box::default()) }
    }

    /// Books whose scale says that pairs and meter have disagreed: each difference is settled.
    fn doubted() -> Shared<'static> {
        let shared = shared();
        shared.bucket.scale.store(2 * ONE.cast_unsigned(), Relaxed);
        shared
    }

    fn reading(until: u64, own: u64) -> Reading {
        Reading { until, own, ..Reading::default() }
    }

    #[test]
    fn the_difference_between_measured_and_charged_time_is_settled_once() {
        let shared = doubted();
        let start = 1_000 * WINDOW;
        shared.charge(start - 1, 0);
        for (what, windows, charge, own, level) in [
            ("as charged", 1, 40_000_000, 40_000_000, -40_000_000),
            ("5 ms more than charged", 2, 40_000_000, 85_000_000, -85_000_000),
            ("the same window again", 2, 0, 85_000_000, -85_000_000),
            ("5 ms less than charged", 3, 40_000_000, 120_000_000, -120_000_000),
            ("an older window, by a process that was stopped", 2, 0, 85_000_000, -120_000_000),
            ("nothing charged, 30 ms used elsewhere", 4, 0, 150_000_000, -150_000_000),
            ("a meter that began again", 5, 40_000_000, 1_000_000, -190_000_000),
            ("and goes on", 6, 40_000_000, 42_000_000, -231_000_000),
            ("a meter that was silent while 40 ms were used", 30, 40_000_000, 52_000_000, -271_000_000),
            ("and goes on", 31, 40_000_000, 92_000_000, -311_000_000),
            ("five seconds in which nobody asked", 61, 1_000_000, 2_092_000_000, -2_311_000_000),
        ] {
            let until = start + windows * WINDOW;
            shared.charge(until - 1, charge);
            shared.settle(&reading(until, own), 2, until + 30 * MILLISECOND, false);
            let refund = shared.bucket.refund.load(Relaxed).cast_signed();
            assert_eq!(shared.level() + refund, level, "{what}");
        }
    }

    /// Estimates and measurements in milliseconds by window, of one process that has a sample in each.
    fn follow(shared: &Shared<'_>, first: u64, windows: &[(u64, u64)]) {
        let (mut own, start) = (first * 30 * MILLISECOND, 1_000 * WINDOW);
        for (number, (estimated, measured)) in (first..).zip(windows) {
            let until = start + number * WINDOW;
            own += measured * MILLISECOND;
            shared.charge(until - 1, shared.scaled(estimated * MILLISECOND).cast_signed());
            shared.settle(&reading(until, own), 2, until + 30 * MILLISECOND, false);
        }
    }

    #[test]
    fn what_rounding_and_queued_work_explain_is_not_settled() {
        let same = [(30, 30); 20];
        for (what, windows, settled) in [
            ("as charged", &same[..], 0),
            ("rounded", &[(30, 31), (30, 29), (30, 31), (30, 30), (30, 31)], 0),
            ("charged in one window, run in the next", &[(30, 30), (42, 30), (18, 30), (30, 30)], 0),
            ("far more than charged", &[(30, 31), (30, 31), (30, 50)], 21),
            ("twice as much", &[(30, 30), (30, 60)], 30),
        ] {
            let shared = shared();
            follow(&shared, 0, windows);
            let refund = shared.bucket.refund.load(Relaxed).cast_signed();
            let taken = -(shared.level() + refund + shared.charged().cast_signed());
            let taken = taken / MILLISECOND.cast_signed();
            assert_eq!(taken, settled, "{what}");
        }
    }

    #[test]
    fn a_difference_that_lasts_is_settled_whichever_way_it_goes() {
        for (estimated, measured) in [(30, 34), (34, 30), (5, 9), (150, 160), (160, 150)] {
            let shared = shared();
            follow(&shared, 0, &[(estimated, measured); 60]);
            let refund = shared.bucket.refund.load(Relaxed).cast_signed();
            let taken = -(shared.level() + refund) / MILLISECOND.cast_signed();
            // A point of ten seconds, and what may be queued.
            let wrong = (60 * measured.cast_signed() - taken).abs();
            assert!(
                wrong <= 112,
                "{estimated} and {measured}: {taken} ms were taken, {wrong} too many or few"
            );
        }
    }

    #[test]
    fn pairs_are_trusted_again_once_they_agree_for_a_second() {
        let shared = shared();
        follow(&shared, 0, &[(30, 30), (30, 60), (30, 30)]);
        assert!(!shared.is_trusted());
        follow(&shared, 4, &[(30, 30); 40]);
        assert!(shared.is_trusted(), "{}", shared.scale());
    }

    /// As with many short processes that each make one launch, or with kernels of seconds.
    #[test]
    fn one_who_asks_seldom_pays_for_all_that_was_measured() {
        let shared = shared();
        let start = 1_000 * WINDOW;
        shared.charge(start - 1, 0);
        shared.settle(&reading(start, 0), 2, start, false);
        let apart = 3_000 * MILLISECOND;
        for step in 1..=20 {
            let until = start + step * apart;
            shared.charge(until - 1, 1_000_000);
            shared.settle(&reading(until, step * apart), 2, until + 30 * MILLISECOND, false);
        }
        assert_eq!(shared.level(), -20 * apart.cast_signed());
    }

    /// While nothing is limited, nothing is charged, and the meter goes on counting.
    #[test]
    fn what_was_used_under_other_limits_is_not_billed() {
        let start = 1_000 * WINDOW;
        for shared in [shared(), doubted()] {
            for (what, grants, windows, own, level) in [
                ("limited", 2, 1, 1_000_000, -1_000_000),
                ("limited again after a minute without", 6, 360, 60_000_000_000, -2_000_000),
                ("and goes on", 6, 361, 60_030_000_000, -32_000_000),
            ] {
                let until = start + windows * WINDOW;
                shared.charge(until - 1, 1_000_000);
                shared.settle(&reading(until, own), grants, until + 30 * MILLISECOND, false);
                assert_eq!(shared.level(), level, "{what}");
            }
        }
    }

    #[test]
    fn a_window_is_compared_with_the_charges_of_its_own_time() {
        let shared = shared();
        let start = 1_000 * WINDOW;
        (0..300).for_each(|step| shared.charge(start + step * MILLISECOND, 500_000));
        let before = shared.level();
        // The window ended 100 ms ago, when 100 ms had been charged.
        shared.settle(&reading(start + 200 * MILLISECOND, 100_000_000), 2, start + 300 * MILLISECOND, false);
        assert!(shared.level().abs_diff(before) < 600_000, "{before} became {}", shared.level());
    }

    #[test]
    fn the_scale_follows_what_charges_turn_out_to_cost_and_stays_in_bounds() {
        // In percent of what is charged, and in percent.
        for (used, want) in
            [(100, 98..=102), (50, 10..=60), (150, 140..=400), (10_000, 390..=400), (0, 5..=11)]
        {
            let shared = shared();
            let start = 1_000 * WINDOW;
            for window in 1..100 {
                let until = start + window * WINDOW;
                shared.charge(until - 1, shared.scaled(50_000_000).cast_signed());
                shared.settle(&reading(until, window * 500_000 * used), 2, until, false);
            }
            let percent = shared.scale() * 100 / ONE.cast_unsigned();
            assert!(want.contains(&percent), "{used} % of the estimate: {percent} %");
        }
    }

    #[test]
    fn racing_processes_settle_a_window_once() {
        for shared in [shared(), doubted()] {
            let start = 1_000 * WINDOW;
            // miri is slow.
            let windows = if cfg!(miri) { 20 } else { 5_000 };
            let arrivals = core::sync::atomic::AtomicU64::new(0);
            let race = || {
                for window in 1..windows {
                    let until = start + window * WINDOW;
                    if super::super::meet(&arrivals, 2) {
                        shared.charge(until - 1, 1_000_000);
                    }
                    super::super::meet(&arrivals, 2);
                    shared.settle(&reading(until, 31_000_000 * window), 2, until, false);
                }
            };
            std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(race))));
            assert_eq!(shared.level(), -(windows.cast_signed() - 1) * 31_000_000);
        }
    }

    #[test]
    fn whatever_the_tenant_writes_is_computed_with() {
        for bytes in [u64::MAX, u64::MAX / 2, 1 << 63, 1 << 40, 1] {
            let shared = shared();
            for window in &shared.settlement.windows {
                window.until.store(bytes, Relaxed);
                window.own.store(bytes / 3, Relaxed);
                window.charged.store(bytes.rotate_left(9), Relaxed);
                window.number.store(u32::try_from(bytes & 0xffff_ffff).unwrap_or(0), Relaxed);
                window.grants.store(2, Relaxed);
            }
            for settled in [0, bytes, u64::MAX] {
                shared.bucket.settled.store(settled, Relaxed);
                shared.settle(&reading(5 * WINDOW, u64::MAX), 2, 6 * WINDOW, false);
                shared.settle(&reading(u64::MAX, 0), 2, 6 * WINDOW, true);
            }
        }
    }
}
