//! Does fixed work as fast as the GPU does it, and counts how much is done in each second.

use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};

use crate::driver::{Driver, SONAME, done};
use crate::kernel::{Kernel, blocks, duration_of};

/// Kernels are queued for about so long ahead.
const AHEAD: Duration = Duration::from_millis(60);
/// `CU_EVENT_BLOCKING_SYNC` and `CU_EVENT_DISABLE_TIMING`.
const EVENT_FLAGS: u32 = 1 | 2;

/// What to do.
#[derive(clap::Args)]
pub struct Work {
    /// What a kernel takes on a GPU of its own, such as 50us, 900us or 10ms
    #[arg(default_value = "900us")]
    kernel: String,
    /// Blocks; 0 = one for each multiprocessor
    #[arg(long, default_value_t = 0)]
    grid: u32,
    /// Whole seconds
    #[arg(long, default_value_t = 10)]
    seconds: u16,
    /// Second of the system's clock at which to begin; at once if it is past
    #[arg(long, default_value_t = 0)]
    at: u64,
}

impl Work {
    /// Prints `ready_late_ms MS`, by how much `--at` was missed, `kernels COUNT` of those that ended in time,
    /// `rate KERNELS_A_SECOND` until the last of them ended, and `per_second COUNT,COUNT…`.
    ///
    /// # Errors
    /// When the driver refuses a call.
    pub fn run(&self) -> Result<()> {
        ensure!(self.seconds > 0, "--seconds is at least 1");
        let driver = Driver::start(SONAME)?;
        let kernel = Kernel::working(&driver, &self.kernel)?;
        let (stream, grid) = (driver.stream()?, blocks(&driver, self.grid)?);
        let mut events = vec![0; depth(duration_of(&self.kernel)?)];
        for event in &mut events {
            done((driver.event_create)(event, EVENT_FLAGS), "cuEventCreate")?;
        }
        let late = wait_until(self.at);
        let (counts, time) = self.count(&driver, kernel, grid, stream, &events)?;
        let sum: u32 = counts.iter().sum();
        let each = counts.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        println!("ready_late_ms {}\nkernels {sum}", late.as_millis());
        println!("rate {:.3}\nper_second {each}", f64::from(sum) / time.as_secs_f64());
        Ok(())
    }

    /// How many kernels ended in each second, and when the last of them did. A kernel that is cut off by the end
    /// counts in neither, so long kernels are not measured short.
    fn count(
        &self,
        driver: &Driver,
        kernel: Kernel,
        grid: u32,
        stream: usize,
        events: &[usize],
    ) -> Result<(Vec<u32>, Duration)> {
        let mut counts = vec![0; usize::from(self.seconds)];
        let (begin, mut last) = (Instant::now(), Duration::from_secs(1));
        for (launched, event) in events.iter().cycle().enumerate() {
            if launched >= events.len() {
                done((driver.event_synchronize)(*event), "cuEventSynchronize")?;
                let ended = begin.elapsed();
                let Some(count) = counts.get_mut(usize::try_from(ended.as_secs())?) else { break };
                *count += 1;
                last = ended;
            }
            kernel.launch(driver, grid, stream)?;
            done((driver.event_record)(*event, stream), "cuEventRecord")?;
        }
        done((driver.synchronize)(), "cuCtxSynchronize")?;
        Ok((counts, last))
    }
}

/// Kernels of a duration that are queued at a time.
fn depth(kernel: Duration) -> usize {
    let fit = AHEAD.as_nanos() / kernel.as_nanos().max(1);
    usize::try_from(fit).unwrap_or(usize::MAX).clamp(2, 64)
}

/// Waits for a second of the system's clock. Returns how late the call came.
pub fn wait_until(second: u64) -> Duration {
    let at = UNIX_EPOCH + Duration::from_secs(second);
    match at.duration_since(SystemTime::now()) {
        Ok(left) => {
            sleep(left);
            Duration::ZERO
        }
        Err(_) if second == 0 => Duration::ZERO,
        Err(error) => error.duration(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_queued_for_some_milliseconds_and_never_fewer_than_two() {
        for (kernel, want) in [("1ns", 64), ("900us", 64), ("10ms", 6), ("200ms", 2)] {
            assert_eq!(depth(duration_of(kernel).expect("a duration")), want, "{kernel}");
        }
    }
}
