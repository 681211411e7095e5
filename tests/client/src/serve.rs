//! A small service: it launches some kernels for each request, waits for them, and pauses. It measures how
//! long requests take.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::driver::{Driver, SONAME, done};
use crate::kernel::{Kernel, blocks};
use crate::work::wait_until;

/// What to do.
#[derive(clap::Args)]
pub struct Serve {
    /// What a kernel takes on a GPU of its own
    #[arg(default_value = "250us")]
    kernel: String,
    /// Kernels of a request
    #[arg(long, default_value_t = 16)]
    kernels: u32,
    /// Milliseconds between the end of a request and the next one
    #[arg(long, default_value_t = 5)]
    pause: u64,
    /// Blocks; 0 = one for each multiprocessor
    #[arg(long, default_value_t = 0)]
    grid: u32,
    /// Seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Second of the system's clock at which to begin; at once if it is past
    #[arg(long, default_value_t = 0)]
    at: u64,
}

impl Serve {
    /// Prints `requests COUNT`, `rate REQUESTS_A_SECOND`, and the median, the 99th percentile and the longest
    /// of the requests' times as `p50_us`, `p99_us` and `max_us`.
    ///
    /// # Errors
    /// When the driver refuses a call, or no request ended.
    pub fn run(&self) -> Result<()> {
        let driver = Driver::start(SONAME)?;
        let kernel = Kernel::working(&driver, &self.kernel)?;
        let (stream, grid) = (driver.stream()?, blocks(&driver, self.grid)?);
        self.request(&driver, kernel, grid, stream)?;
        wait_until(self.at);
        let (begin, time) = (Instant::now(), Duration::from_secs_f64(self.seconds));
        let mut times = Vec::new();
        while begin.elapsed() < time {
            times.push(self.request(&driver, kernel, grid, stream)?);
            sleep(Duration::from_millis(self.pause));
        }
        let span = begin.elapsed().as_secs_f64();
        times.sort_unstable();
        let count = u32::try_from(times.len())?;
        println!("requests {count}\nrate {:.2}", f64::from(count) / span);
        for (name, percent) in [("p50_us", 50), ("p99_us", 99), ("max_us", 100)] {
            println!("{name} {}", percentile(&times, percent).context("no request ended")?.as_micros());
        }
        Ok(())
    }

    fn request(&self, driver: &Driver, kernel: Kernel, grid: u32, stream: usize) -> Result<Duration> {
        let begin = Instant::now();
        for _ in 0..self.kernels {
            kernel.launch(driver, grid, stream)?;
        }
        done((driver.stream_synchronize)(stream), "cuStreamSynchronize")?;
        Ok(begin.elapsed())
    }
}

/// The smallest of the sorted `times` that `percent` percent of them do not exceed.
fn percentile(times: &[Duration], percent: usize) -> Option<Duration> {
    let rank = (times.len() * percent).div_ceil(100).max(1);
    times.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_the_time_that_so_many_do_not_exceed() {
        let times: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        for (percent, want) in [(1, 2), (50, 100), (99, 198), (100, 200)] {
            assert_eq!(percentile(&times, percent), Some(Duration::from_millis(want)), "{percent}");
        }
        assert_eq!(percentile(&times[..1], 50), Some(Duration::from_millis(1)));
        assert_eq!(percentile(&[], 50), None);
    }
}
