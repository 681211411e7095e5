//! Units of time. All times of a trial are in nanoseconds.

/// A microsecond in nanoseconds.
pub const MICROSECOND: u64 = 1_000;
/// A millisecond in nanoseconds.
pub const MILLISECOND: u64 = 1_000_000;
/// A second in nanoseconds.
pub const SECOND: u64 = 1_000_000_000;
