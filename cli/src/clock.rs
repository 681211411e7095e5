//! Reads two clocks at one instant and converts between them. NVML stamps by the wall clock; the region uses
//! the monotonic clock, which nobody can set.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Both clocks, read one after the other, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// CLOCK_MONOTONIC.
    pub monotonic: u64,
    /// CLOCK_REALTIME, since 1970.
    pub wall: u64,
}

impl Clock {
    /// Both clocks now.
    pub fn now() -> Self {
        Self { monotonic: read(ClockId::CLOCK_MONOTONIC), wall: read(ClockId::CLOCK_REALTIME) }
    }

    /// The wall clock in microseconds since 1970, the unit of NVML's stamps.
    pub fn wall_micros(self) -> u64 {
        self.wall / 1000
    }

    /// NVML's stamp of a monotonic time in nanoseconds.
    pub fn stamp(self, monotonic: u64) -> u64 {
        (self.wall + monotonic).saturating_sub(self.monotonic) / 1000
    }

    /// The monotonic time of NVML's stamp, in nanoseconds; never later than this clock's own.
    pub fn monotonic_of(self, stamp: u64) -> u64 {
        let time = i128::from(stamp) * 1000 - i128::from(self.wall) + i128::from(self.monotonic);
        u64::try_from(time.max(0)).unwrap_or(u64::MAX).min(self.monotonic)
    }
}

fn read(id: ClockId) -> u64 {
    // Both clocks exist on every Linux, and nanoseconds fit for centuries: the fallbacks are never used.
    clock_gettime(id).map_or(0, |time| Duration::from(time).as_nanos().try_into().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_and_its_monotonic_time_are_one_instant() {
        let clock = Clock { monotonic: 5_000_000_000, wall: 1_700_000_000_000_000_000 };
        for (monotonic, stamp) in
            [(5_000_000_000, 1_700_000_000_000_000), (4_000_000_000, 1_699_999_999_000_000)]
        {
            assert_eq!(clock.stamp(monotonic), stamp);
            assert_eq!(clock.monotonic_of(stamp), monotonic);
        }
        assert_eq!(clock.monotonic_of(u64::MAX), clock.monotonic, "nothing has ended in the future");
        assert_eq!(clock.monotonic_of(0), 0);
        assert!(Clock::now().wall > Clock::now().monotonic);
    }
}
