//! Samples of a duration in nanoseconds: order statistics and formatting.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Measurements of one thing, sorted; never empty.
#[derive(Clone, Debug)]
pub struct Sample(Vec<i64>);

impl Sample {
    /// Creates a sample of durations or differences, in nanoseconds.
    ///
    /// # Errors
    /// If it is empty.
    pub fn new(mut nanoseconds: Vec<i64>) -> Result<Self> {
        if nanoseconds.is_empty() {
            bail!("nothing was measured");
        }
        nanoseconds.sort_unstable();
        Ok(Self(nanoseconds))
    }

    /// Returns the number of runs.
    pub fn runs(&self) -> usize {
        self.0.len()
    }

    /// Returns the value that `percent` of the runs do not exceed (nearest rank).
    pub fn percentile(&self, percent: usize) -> i64 {
        let rank = (self.0.len() * percent).div_ceil(100).max(1);
        self.0[rank.min(self.0.len()) - 1]
    }

    /// Returns the middle run.
    pub fn median(&self) -> i64 {
        self.percentile(50)
    }
}

/// Returns the nanoseconds that `command` takes from its start to its end.
///
/// # Errors
/// If it cannot be started, or fails.
pub fn timed(command: &mut Command) -> Result<i64> {
    let start = Instant::now();
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    let elapsed = nanoseconds(start.elapsed());
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(elapsed)
}

/// Converts a duration to nanoseconds, as a number that can be subtracted.
pub fn nanoseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

/// Formats nanoseconds as milliseconds: with three decimals, or with one from 20 ms on.
pub fn milliseconds(nanoseconds: i64) -> String {
    let value = Duration::from_nanos(nanoseconds.unsigned_abs()).as_secs_f64() * 1e3;
    let sign = if nanoseconds < 0 { "-" } else { "" };
    if value < 20.0 { format!("{sign}{value:.3}") } else { format!("{sign}{value:.1}") }
}

/// Formats a difference in nanoseconds like [`milliseconds`], with its sign.
pub fn difference(nanoseconds: i64) -> String {
    let sign = if nanoseconds < 0 { "" } else { "+" };
    format!("{sign}{}", milliseconds(nanoseconds))
}

/// Formats a difference in picoseconds as nanoseconds with its sign: with one decimal, or none from 100 ns
/// on.
pub fn added(picoseconds: i64) -> String {
    let tenths = (picoseconds.unsigned_abs() + 50) / 100;
    let sign = if picoseconds < 0 && tenths > 0 { "-" } else { "+" };
    let whole = tenths / 10;
    if tenths < 1000 { format!("{sign}{whole}.{}", tenths % 10) } else { format!("{sign}{whole}") }
}

/// Describes the machine: processors, kernel and load.
pub fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let load = read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned();
    format!("{processors} processors, Linux {}, load {load}", read("/proc/sys/kernel/osrelease").trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picoseconds_are_written_as_nanoseconds_with_a_sign() {
        for (picoseconds, want) in [
            (0, "+0.0"),
            (40_049, "+40.0"),
            (-1_250, "-1.3"),
            (-20, "+0.0"),
            (99_960, "+100"),
            (-250_400, "-250"),
        ] {
            assert_eq!(added(picoseconds), want, "{picoseconds} ps");
        }
    }

    #[test]
    fn order_statistics_are_those_of_the_sorted_runs() {
        let sample = Sample::new((1..=100).rev().collect()).unwrap();
        assert_eq!((sample.runs(), sample.median(), sample.percentile(100)), (100, 50, 100));
        assert_eq!((sample.percentile(25), sample.percentile(75), sample.percentile(99)), (25, 75, 99));
        assert_eq!(Sample::new(vec![7]).unwrap().percentile(1), 7);
        assert!(Sample::new(Vec::new()).is_err());
    }

    #[test]
    fn figures_are_written_in_milliseconds() {
        for (nanoseconds, plain, signed) in [
            (1_234_567, "1.235", "+1.235"),
            (-2_000_000, "-2.000", "-2.000"),
            (66_040_000, "66.0", "+66.0"),
            (0, "0.000", "+0.000"),
        ] {
            assert_eq!(
                (milliseconds(nanoseconds).as_str(), difference(nanoseconds).as_str()),
                (plain, signed)
            );
        }
    }
}
