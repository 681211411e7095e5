//! Settling what was charged against what the host's meter measured: the integral that keeps the share exact over time,
//! whatever the estimates do.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use gpushare_region::{SETTLED_WINDOWS, SettledWindow};

use super::bucket::Shared;
use super::share::Reading;
use super::{MILLISECOND, STALE};

/// A meter that was silent for longer begins a new account.
const LONGEST_WINDOW: u64 = 2_000 * MILLISECOND;
/// Windows that the scale is taken from: a second of the driver's samples.
const SCALE_WINDOWS: u64 = 6;
/// Charges below this say nothing about the scale.
const LEAST_CHARGE: i64 = 15 * MILLISECOND.cast_signed();
/// Percent of a deviation by which a window moves the scale.
const GAIN: i64 = 15;
/// One in the fixed-point scale.
const ONE: i64 = 1 << 20;

/// A settled window, read out.
#[derive(Clone, Copy)]
struct Window {
    until: u64,
    own: u64,
    charged: u64,
    number: u64,
}

impl Shared<'_> {
    /// Puts right what the windows up to `reading` show, once for all processes: whoever moves `settled` does it. `exact`:
    /// as for [`correct`](Self::correct).
    pub(super) fn settle(&self, reading: &Reading, now: u64, exact: bool) {
        let settled = self.bucket.settled.load(Acquire);
        if reading.until <= settled && settled <= now.saturating_add(STALE) {
            return;
        }
        let charged = self.charged_at(reading.until, now);
        let last = self.last_window(settled);
        let number = last.map_or(0, |last| last.number).wrapping_add(1);
        let new = Window { until: reading.until, own: reading.own, charged, number };
        self.write(&new);
        let moved = self.bucket.settled.compare_exchange(settled, new.until, Release, Relaxed);
        let Some(last) = last.filter(|last| moved.is_ok() && continues(last, &new)) else { return };
        let (measured, charged) = grown(&last, &new);
        self.correct(charged.saturating_sub(measured), exact);
        self.rescale(&new);
    }

    /// The window that ended at `settled`; for a container that has only begun, the empty one before the first.
    fn last_window(&self, settled: u64) -> Option<Window> {
        if settled == 0 {
            return Some(Window { until: 0, own: 0, charged: 0, number: 0 });
        }
        self.windows().find(|window| window.until == settled)
    }

    fn windows(&self) -> impl Iterator<Item = Window> {
        let read = |window: &SettledWindow| Window {
            until: window.until.load(Acquire),
            own: window.own.load(Relaxed),
            charged: window.charged.load(Relaxed),
            number: window.number.load(Relaxed),
        };
        self.settlement.windows.iter().map(read).filter(|window| window.until != 0)
    }

    /// All who write the window of one number write the same, to some microseconds.
    fn write(&self, new: &Window) {
        let place = usize::try_from(new.number % SETTLED_WINDOWS as u64).unwrap_or(0);
        let Some(window) = self.settlement.windows.get(place) else { return };
        window.until.store(0, Relaxed);
        window.own.store(new.own, Release);
        window.charged.store(new.charged, Relaxed);
        window.number.store(new.number, Relaxed);
        window.until.store(new.until, Release);
    }

    /// Moves the scale towards what estimated time turned out to cost. Slowly: the bucket itself is put right at once.
    fn rescale(&self, new: &Window) {
        let oldest = new.number.saturating_sub(SCALE_WINDOWS);
        let remembered = self.windows().filter(|window| (oldest..new.number).contains(&window.number));
        let Some(first) =
            remembered.min_by_key(|window| window.number).filter(|first| first.until < new.until)
        else {
            return;
        };
        let (measured, charged) = grown(&first, new);
        if charged < LEAST_CHARGE {
            return;
        }
        // Bounded by `grown`: nothing here overflows.
        let ratio = (measured * ONE / charged.max(1)).clamp(ONE / 2, 2 * ONE);
        let gain = ONE + (ratio - ONE) * GAIN / 100;
        let scale = self.scale().cast_signed() * gain / ONE;
        self.bucket.scale.store(scale.clamp(ONE / 10, 4 * ONE).cast_unsigned(), Relaxed);
    }
}

/// Whether `new` tells of the same account as `last`, not of a meter that began again.
fn continues(last: &Window, new: &Window) -> bool {
    let near = if last.until == 0 {
        new.own.max(new.charged) < LONGEST_WINDOW
    } else {
        new.until.wrapping_sub(last.until) <= LONGEST_WINDOW
    };
    near && new.own >= last.own
}

/// Measured and charged nanoseconds between two windows. A corrupted file gives nonsense, but within bounds.
fn grown(from: &Window, to: &Window) -> (i64, i64) {
    let bound = 64 * LONGEST_WINDOW.cast_signed();
    [to.own.wrapping_sub(from.own), to.charged.wrapping_sub(from.charged)]
        .map(|grown| grown.cast_signed().clamp(-bound, bound))
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = MILLISECOND * 1_000 / 6;

    fn shared() -> Shared<'static> {
        Shared { bucket: Box::leak(Box::default()), settlement: Box::leak(Box::default()) }
    }

    fn reading(until: u64, own: u64) -> Reading {
        Reading { until, own, ..Reading::default() }
    }

    #[test]
    fn the_difference_between_measured_and_charged_time_is_settled_once() {
        let shared = shared();
        let start = 1_000 * WINDOW;
        shared.charge(start - 1, 0);
        for (what, windows, charge, own, level) in [
            ("as charged", 1, 40_000_000, 40_000_000, -40_000_000),
            ("5 ms more than charged", 2, 40_000_000, 85_000_000, -85_000_000),
            ("the same window again", 2, 0, 85_000_000, -85_000_000),
            ("5 ms less than charged", 3, 40_000_000, 120_000_000, -120_000_000),
            ("nothing charged, 30 ms used elsewhere", 4, 0, 150_000_000, -150_000_000),
            ("a meter that began again", 5, 40_000_000, 1_000_000, -190_000_000),
            ("and goes on", 6, 40_000_000, 42_000_000, -231_000_000),
            ("a meter that was silent", 30, 40_000_000, 500_000_000, -271_000_000),
        ] {
            let until = start + windows * WINDOW;
            shared.charge(until - 1, charge);
            shared.settle(&reading(until, own), until + 30 * MILLISECOND, false);
            let refund = shared.bucket.refund.load(Relaxed).cast_signed();
            assert_eq!(shared.level() + refund, level, "{what}");
        }
    }

    #[test]
    fn a_window_is_compared_with_the_charges_of_its_own_time() {
        let shared = shared();
        let start = 1_000 * WINDOW;
        (0..300).for_each(|step| shared.charge(start + step * MILLISECOND, 500_000));
        let before = shared.level();
        // The window ended 100 ms ago, when 100 ms had been charged.
        shared.settle(&reading(start + 200 * MILLISECOND, 100_000_000), start + 300 * MILLISECOND, false);
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
                shared.settle(&reading(until, window * 500_000 * used), until, false);
            }
            let percent = shared.scale() * 100 / ONE.cast_unsigned();
            assert!(want.contains(&percent), "{used} % of the estimate: {percent} %");
        }
    }

    #[test]
    fn racing_processes_settle_a_window_once() {
        let shared = shared();
        let start = 1_000 * WINDOW;
        for window in 1..200 {
            let until = start + window * WINDOW;
            shared.charge(until - 1, 1_000_000);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| shared.settle(&reading(until, 1_500_000 * window), until, false));
                }
            });
        }
        assert_eq!(shared.level(), -199 * 1_500_000);
    }

    #[test]
    fn whatever_the_tenant_writes_is_computed_with() {
        for bytes in [u64::MAX, u64::MAX / 2, 1 << 63, 1 << 40, 1] {
            let shared = shared();
            for window in &shared.settlement.windows {
                window.until.store(bytes, Relaxed);
                window.own.store(bytes / 3, Relaxed);
                window.charged.store(bytes.rotate_left(9), Relaxed);
                window.number.store(bytes, Relaxed);
            }
            for settled in [0, bytes, u64::MAX] {
                shared.bucket.settled.store(settled, Relaxed);
                shared.settle(&reading(5 * WINDOW, u64::MAX), 6 * WINDOW, false);
                shared.settle(&reading(u64::MAX, 0), 6 * WINDOW, true);
            }
        }
    }
}
