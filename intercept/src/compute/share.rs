//! What the host grants and has measured, read once per slow path.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, fence};

use gpushare_region::{ComputePolicy, LimitLine, Measured};

use super::STALE;

/// The compute that a container may use now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Part of the GPU's time, in hundredths of a percent; above 0, at most 10,000.
    pub rate: u64,
    /// Launches wait until this is over.
    pub paused: bool,
}

/// What the host's meter said last.
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
        if policy == ComputePolicy::None || cores >= 100 {
            return None;
        }
        let share = cores.max(1) * 100;
        let ceiling = line.ceiling_percent.load(Relaxed).min(100).max(cores.max(1)) * 100;
        let rate = match (policy, reading) {
            (ComputePolicy::Burst, Some(reading)) => reading.burst_share.min(ceiling).max(share),
            _ => share,
        };
        Some(Self { rate: rate.into(), paused: line.paused.load(Relaxed) != 0 })
    }

    /// Whether launches on the GPU of `line` are held to a share.
    #[inline(always)]
    pub fn is_limited(line: &LimitLine) -> bool {
        line.policy.load(Relaxed) != 0 && line.cores_percent.load(Relaxed) < 100
    }
}

impl Reading {
    /// The meter's last word; `None` while it has nothing to say, or has not said anything for a second.
    pub(super) fn read(measured: &Measured, now: u64) -> Option<Self> {
        for _ in 0..4 {
            let before = measured.sequence.load(Acquire);
            let reading = Self {
                burst_share: measured.burst_share.load(Relaxed),
                until: measured.until.load(Relaxed),
                own: measured.own_nanoseconds.load(Relaxed),
                others: measured.others_nanoseconds.load(Relaxed),
            };
            let written = measured.written.load(Relaxed);
            fence(Acquire);
            if before.is_multiple_of(2) && measured.sequence.load(Relaxed) == before {
                let fresh = now.saturating_sub(written) < STALE && reading.until <= now.saturating_add(STALE);
                return (reading.until != 0 && fresh).then_some(reading);
            }
        }
        None // a meter that died in the middle of a word
    }
}
