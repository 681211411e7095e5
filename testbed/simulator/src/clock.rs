//! The clocks. The device clock is the machine's monotonic clock, which all processes of a node share.

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds per second.
pub const SECOND: u64 = 1_000_000_000;

/// Returns the time of the device clock: nanoseconds of the monotonic clock.
#[must_use]
pub fn now() -> u64 {
    read(ClockId::CLOCK_MONOTONIC)
}

/// Returns the wall-clock time in nanoseconds since 1970.
#[must_use]
pub fn wall() -> u64 {
    read(ClockId::CLOCK_REALTIME)
}

fn read(id: ClockId) -> u64 {
    // Both clocks exist on every Linux and are never negative, so the fallbacks are never used.
    clock_gettime(id).map_or(0, |time| {
        let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
        seconds * SECOND + u64::try_from(time.tv_nsec()).unwrap_or(0)
    })
}
