//! What the host grants and what its meter measured, read once in each pass of the slow path.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, fence};

use gpushare_region::{ComputePolicy, LimitLine, Measured};

use super::STALE;

/// The compute that a container may use now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Part of the GPU's time, in hundredths of a percent; above 0, at most 10,000.
    pub rate: u64,
}

/// The last values of the host's meter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) burst_share: u32,
    pub(super) until: u64,
    pub(super) own: u64,
    pub(super) others: u64,
}

impl Share {
    /// The share at `now`, monotonic nanoseconds. `None`: launches are not limited.
    pub(super) fn now(line: &LimitLine, reading: Option<&Reading>) -> Option<Self> {
        let policy = ComputePolicy::from_number(line.policy.load(Relaxed));
        let cores = line.cores_percent.load(Relaxed);
        let cores = if policy.limits_time() { cores.clamp(1, 100) } else { 100 };
        if cores == 100 {
            return None;
        }
        let share = cores * 100;
        let ceiling = line.ceiling_percent.load(Relaxed).min(100).max(cores) * 100;
        let rate = match (policy, reading) {
            (ComputePolicy::Burst, Some(reading)) => reading.burst_share.min(ceiling).max(share),
            _ => share,
        };
        Some(Self { rate: rate.into() })
    }

    /// Whether launches on the GPU of `line` are limited to a share.
    #[inline(always)]
    pub fn is_limited(line: &LimitLine) -> bool {
        ComputePolicy::from_number(line.policy.load(Relaxed)).limits_time()
            && line.cores_percent.load(Relaxed) < 100
    }
}

impl Reading {
    /// The meter's last values; `None` while it has measured nothing, or has not written for a second.
    pub(super) fn read(measured: &Measured, now: u64) -> Option<Self> {
        for _ in 0..4 {
            let before = measured.sequence.load(Acquire);
            let reading = Self {
                burst_share: measured.burst_share.load(Relaxed),
                until: measured.until.load(Relaxed),
                own: measured.own_nanoseconds.load(Relaxed),
                others: measured.others_windows.load(Relaxed),
            };
            let written = measured.written.load(Relaxed);
            fence(Acquire);
            if before.is_multiple_of(2) && measured.sequence.load(Relaxed) == before {
                let fresh = now.saturating_sub(written) < STALE && reading.until <= now.saturating_add(STALE);
                return (reading.until != 0 && fresh).then_some(reading);
            }
        }
        None // the meter died while it wrote
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_what_the_host_grants_now() {
        let (fixed, burst, none) = (1, 2, 0);
        let share = |rate| Some(Share { rate });
        for (what, policy, cores, ceiling, burst_share, want) in [
            ("fixed", fixed, 30, 100, Some(9_000), share(3_000)),
            ("burst without a meter", burst, 30, 100, None, share(3_000)),
            ("burst, no word of the meter", burst, 30, 100, Some(0), share(3_000)),
            ("burst on an idle GPU", burst, 30, 80, Some(10_000), share(8_000)),
            ("burst in between", burst, 30, 80, Some(4_550), share(4_550)),
            ("a ceiling below the share", burst, 30, 10, Some(10_000), share(3_000)),
            ("no limit", none, 30, 100, None, None),
            ("all of the GPU", fixed, 100, 100, None, None),
            ("more than that", burst, u32::MAX, 0, None, None),
            ("nothing", fixed, 0, 0, None, share(100)),
            ("a policy that is not known", 7, 30, 100, Some(9_000), share(3_000)),
        ] {
            let line = LimitLine::default();
            line.policy.store(policy, Relaxed);
            line.cores_percent.store(cores, Relaxed);
            line.ceiling_percent.store(ceiling, Relaxed);
            let reading = burst_share.map(|burst_share| Reading { burst_share, ..Reading::default() });
            assert_eq!(Share::now(&line, reading.as_ref()), want, "{what}");
            assert_eq!(Share::is_limited(&line), want.is_some(), "{what}");
        }
    }

    #[test]
    fn only_a_fresh_and_whole_word_of_the_meter_counts() {
        let now = 5 * STALE;
        for (what, sequence, until, written, heard) in [
            ("fresh", 2, now - 1, now - 1, true),
            ("a meter that stopped", 2, now - 1, now - STALE, false),
            ("a meter that died while it wrote", 3, now - 1, now - 1, false),
            ("nothing was ever measured", 2, 0, now - 1, false),
            ("a clock that is not ours", 2, now + 2 * STALE, now - 1, false),
        ] {
            let measured = Measured::default();
            measured.sequence.store(sequence, Relaxed);
            measured.until.store(until, Relaxed);
            measured.written.store(written, Relaxed);
            assert_eq!(Reading::read(&measured, now).is_some(), heard, "{what}");
        }
    }
}
