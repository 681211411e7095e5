//! Measures what one call costs. Times the same loop through the library that the loader finds and, in turns
//! in the same process, through another file of the driver.

use std::hint::black_box;
use std::io::{BufWriter, Write, stdout};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::driver::{Driver, Kernel, SONAME, done};
use crate::fill::{Beside, Family};
use crate::library::Library;

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Call {
    /// cuMemAlloc and cuMemFree of 512 bytes
    Allocate,
    /// cuMemGetInfo
    Memory,
    /// cuLaunchKernel of a kernel of one nanosecond
    Launch,
    /// cuGraphLaunch of such a kernel
    Graph,
    /// dlsym of a function of the mathematics library
    Lookup,
}

/// What to time.
#[derive(clap::Args)]
pub struct Cost {
    call: Call,
    /// Rounds
    #[arg(long, default_value_t = 401)]
    rounds: u32,
    /// Calls of a round
    #[arg(long, default_value_t = 200)]
    calls: u32,
    /// Allocations that live meanwhile
    #[arg(long, default_value_t = 0)]
    live: u32,
    /// Processes with a context that live meanwhile
    #[arg(long, default_value_t = 0)]
    beside: u32,
    /// The driver's own file: timed in turns, second on each line
    #[arg(long)]
    bare: Option<String>,
}

/// One way to the driver, and what a call needs.
struct Way {
    driver: Driver,
    kernel: Kernel,
    graph: usize,
    stream: usize,
    mathematics: Library,
}

impl Cost {
    /// Prints one line a round: picoseconds a call, and after a space those of the driver's own file if there
    /// is one.
    ///
    /// # Errors
    /// When the driver refuses anything.
    pub fn run(&self) -> Result<()> {
        let driver = Driver::start(SONAME)?;
        let kernel = Kernel::spinning(&driver, "1ns")?;
        let (graph, stream) = (kernel.graph(&driver, 1, 1)?, driver.stream()?);
        let _beside = Beside::start(self.beside, Family::Linear)?;
        for _ in 0..self.live {
            done((driver.allocate)(&mut 0, 512), "cuMemAlloc")?;
        }
        let way = |driver| -> Result<Way> {
            Ok(Way { driver, kernel, graph, stream, mathematics: Library::open("libm.so.6")? })
        };
        // Handles of one are good for the other: both lead to the same driver.
        let bare = self.bare.as_deref().map(Driver::open).transpose()?.map(way).transpose()?;
        let ours = way(driver)?;
        let mut lines = BufWriter::new(stdout().lock());
        for round in 0..=self.rounds {
            let (ours, bare) = self.round(round, &ours, bare.as_ref())?;
            // The first round only fills the caches.
            if round > 0 {
                writeln!(lines, "{ours}{}", bare.map(|bare| format!(" {bare}")).unwrap_or_default())?;
            }
        }
        lines.flush().context("stdout")
    }

    /// Picoseconds a call by both ways. The order changes from round to round.
    fn round(&self, number: u32, ours: &Way, bare: Option<&Way>) -> Result<(u128, Option<u128>)> {
        let Some(bare) = bare else { return Ok((self.picoseconds(ours)?, None)) };
        if number.is_multiple_of(2) {
            let ours = self.picoseconds(ours)?;
            return Ok((ours, Some(self.picoseconds(bare)?)));
        }
        let bare = self.picoseconds(bare)?;
        Ok((self.picoseconds(ours)?, Some(bare)))
    }

    #[inline]
    fn call(&self, way: &Way) -> Result<()> {
        match self.call {
            Call::Allocate => way.allocate_and_free(),
            Call::Memory => way.driver.memory().map(|told| {
                black_box(told);
            }),
            Call::Launch => way.launch(),
            Call::Graph => done((way.driver.graph_launch)(way.graph, way.stream), "cuGraphLaunch"),
            Call::Lookup => {
                black_box(way.mathematics.symbol(c"cos"));
                Ok(())
            }
        }
    }

    fn picoseconds(&self, way: &Way) -> Result<u128> {
        let start = Instant::now();
        (0..self.calls).try_for_each(|_| self.call(way))?;
        Ok(start.elapsed().as_nanos() * 1000 / u128::from(self.calls.max(1)))
    }
}

impl Way {
    fn allocate_and_free(&self) -> Result<()> {
        let mut pointer = 0;
        done((self.driver.allocate)(&mut pointer, 512), "cuMemAlloc")?;
        done((self.driver.free)(pointer), "cuMemFree")
    }

    fn launch(&self) -> Result<()> {
        let launch = self.driver.launch;
        done(launch(self.kernel.handle(), 1, 1, 1, 32, 1, 1, 0, self.stream, 0, 0), "cuLaunchKernel")
    }
}
