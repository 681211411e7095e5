//! Uses many threads and streams at once, with memory, work and waits in every order. Nothing may be lost or
//! stuck.

use anyhow::{Result, bail};

use crate::driver::{Driver, OUT_OF_MEMORY, SONAME, done};
use crate::kernel::Kernel;

/// What to run.
#[derive(clap::Args)]
pub struct Threads {
    /// Threads
    #[arg(long, default_value_t = 8)]
    threads: u32,
    /// Streams of each
    #[arg(long, default_value_t = 4)]
    streams: u32,
    /// Turns of each thread
    #[arg(long, default_value_t = 200)]
    turns: u32,
}

impl Threads {
    /// Prints `leak BYTES`: free memory before the second round less free memory after it.
    ///
    /// # Errors
    /// When the driver answers anything but success and out of memory.
    pub fn run(&self) -> Result<()> {
        let (driver, context) = Driver::start_in(SONAME)?;
        let kernel = Kernel::working(&driver, "100us")?;
        // The first round makes what the driver keeps: streams, pools, local memory.
        self.round(&driver, context, kernel)?;
        let before = settled(&driver)?;
        self.round(&driver, context, kernel)?;
        println!("leak {}", i128::try_from(before)? - i128::try_from(settled(&driver)?)?);
        Ok(())
    }

    fn round(&self, driver: &Driver, context: usize, kernel: Kernel) -> Result<()> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|seed| scope.spawn(move || self.work(driver, context, kernel, seed)))
                .collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(_) => bail!("a thread panicked"),
            })
        })
    }

    fn work(&self, driver: &Driver, context: usize, kernel: Kernel, seed: u32) -> Result<()> {
        done((driver.context_set)(context), "cuCtxSetCurrent")?;
        let streams = (0..self.streams).map(|_| driver.stream()).collect::<Result<Vec<_>>>()?;
        for turn in 0..self.turns {
            let stream = streams[usize::try_from(turn % self.streams)?];
            let bytes = usize::try_from((seed + turn * 7) % 64 + 1)? << 18;
            let mut pointer = 0;
            match (driver.allocate_async)(&mut pointer, bytes, stream) {
                OUT_OF_MEMORY => continue,
                status => done(status, "cuMemAllocAsync")?,
            }
            kernel.launch(driver, 1, stream)?;
            done((driver.free_async)(pointer, stream), "cuMemFreeAsync")?;
            if turn % 16 == 0 {
                done((driver.stream_synchronize)(stream), "cuStreamSynchronize")?;
            }
        }
        for stream in streams {
            done((driver.stream_synchronize)(stream), "cuStreamSynchronize")?;
            done((driver.stream_destroy)(stream), "cuStreamDestroy")?;
        }
        Ok(())
    }
}

/// Bytes of free memory once everything has run.
fn settled(driver: &Driver) -> Result<usize> {
    done((driver.synchronize)(), "cuCtxSynchronize")?;
    Ok(driver.memory()?.0)
}
