//! Measures how many steps of a kernel of fixed work this GPU does in a millisecond.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::driver::{Driver, SONAME, done};
use crate::kernel::{Kernel, blocks, estimated_steps_per_ms};

/// How long the GPU works first, so that its clock is up.
const WARM_UP: Duration = Duration::from_millis(500);
/// Launches that are timed together.
const LAUNCHES: u32 = 20;
/// How often; the fastest counts, since others can only make it slower.
const REPEATS: u32 = 5;

/// What to measure.
#[derive(clap::Args)]
pub struct Calibrate {
    /// Blocks; 0 = one for each multiprocessor
    #[arg(long, default_value_t = 0)]
    grid: u32,
}

impl Calibrate {
    /// Prints `steps_per_ms NUMBER`. Nothing else should use the GPU meanwhile.
    ///
    /// The difference between kernels of 1 ms and 3 ms leaves out what a launch costs. A simulated GPU takes
    /// the times from the names, so there it prints the estimate.
    ///
    /// # Errors
    /// When the driver refuses a launch.
    pub fn run(&self) -> Result<()> {
        let driver = Driver::start(SONAME)?;
        let estimate = estimated_steps_per_ms(&driver)?;
        let grid = blocks(&driver, self.grid)?;
        let [short, long] = [1, 3].map(|ms| Kernel::with_steps(&driver, &format!("{ms}ms"), estimate));
        let (short, long) = (short?, long?);
        let begin = Instant::now();
        while begin.elapsed() < WARM_UP {
            timed(&driver, short, grid)?;
        }
        let [short, long] = [short, long].map(|kernel| fastest(&driver, kernel, grid));
        let two_ms = long?.saturating_sub(short?).as_secs_f64() * 1e3 / f64::from(LAUNCHES);
        anyhow::ensure!(two_ms > 0.0, "three times the work took no longer");
        println!("steps_per_ms {:.1}", estimate * 2.0 / two_ms);
        Ok(())
    }
}

fn fastest(driver: &Driver, kernel: Kernel, grid: u32) -> Result<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..REPEATS {
        best = best.min(timed(driver, kernel, grid)?);
    }
    Ok(best)
}

fn timed(driver: &Driver, kernel: Kernel, grid: u32) -> Result<Duration> {
    let begin = Instant::now();
    for _ in 0..LAUNCHES {
        kernel.launch(driver, grid, 0)?;
    }
    done((driver.synchronize)(), "cuCtxSynchronize")?;
    Ok(begin.elapsed())
}
