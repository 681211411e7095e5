//! Measures what one call costs. Times the same loop through the library that the loader finds and, in turns
//! in the same process, through another file of the driver.

use std::cell::RefCell;
use std::hint::black_box;
use std::io::{BufWriter, Write, stdout};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::driver::{Driver, SONAME, done};
use crate::fill::Beside;
use crate::kernel::Kernel;
use crate::library::Library;
use crate::sizes::{self, NVML, Nvml};
use crate::stores::Family;

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Call {
    /// cuMemAlloc and cuMemFree of 512 bytes
    Allocate,
    /// cuMemGetInfo
    Memory,
    /// nvmlDeviceGetMemoryInfo
    DeviceMemory,
    /// cuLaunchKernel of a kernel of one nanosecond
    Launch,
    /// cuGraphLaunch of such a kernel
    Graph,
    /// dlsym of a function of the mathematics library
    Lookup,
    /// cuDevicePrimaryCtxRetain and cuDevicePrimaryCtxRelease, where each makes and ends a context
    Context,
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
    /// Free a random one of them instead of the newest
    #[arg(long)]
    random: bool,
    /// Processes with a context that live meanwhile
    #[arg(long, default_value_t = 0)]
    beside: u32,
    /// The driver's own file: timed in turns, second on each line
    #[arg(long)]
    bare: Option<String>,
    /// The driver's own file for NVML
    #[arg(long, default_value = NVML)]
    bare_nvml: String,
}

/// One way to the driver, and what a call needs.
struct Way {
    driver: Driver,
    /// `None` where the calls make the process's only context.
    work: Option<Work>,
    mathematics: Library,
    nvml: Option<(Nvml, usize)>,
    /// Allocations of which a random one is freed, and the number that chooses it.
    pool: RefCell<(Vec<u64>, u64)>,
}

/// What a launch needs.
#[derive(Clone, Copy)]
struct Work {
    kernel: Kernel,
    graph: usize,
    stream: usize,
}

impl Work {
    fn new(driver: &Driver) -> Result<Self> {
        let kernel = Kernel::working(driver, "1ns")?;
        Ok(Self { kernel, graph: kernel.graph(driver, 1, 1)?, stream: driver.stream()? })
    }
}

impl Cost {
    /// Prints one line a round: picoseconds a call, and after a space those of the driver's own file if there
    /// is one.
    ///
    /// # Errors
    /// When the driver refuses anything.
    pub fn run(&self) -> Result<()> {
        let (driver, work) = if self.call == Call::Context {
            let driver = Driver::open(SONAME)?;
            done((driver.init)(0), "cuInit")?;
            (driver, None)
        } else {
            let driver = Driver::start(SONAME)?;
            let work = Work::new(&driver)?;
            (driver, Some(work))
        };
        let _beside = Beside::start(self.beside, Family::Linear)?;
        let way = |driver, nvml| -> Result<Way> {
            let mathematics = Library::open("libm.so.6")?;
            let nvml = (self.call == Call::DeviceMemory).then(|| sizes::first_gpu(nvml)).transpose()?;
            Ok(Way { driver, work, mathematics, nvml, pool: RefCell::new((Vec::new(), 1)) })
        };
        // Handles of one are good for the other: both lead to the same driver.
        let bare = self.bare.as_deref().map(Driver::open).transpose()?;
        let bare = bare.map(|driver| way(driver, &self.bare_nvml)).transpose()?;
        let ours = way(driver, NVML)?;
        // What one way allocates, it has to free too.
        for way in [Some(&ours), bare.as_ref().filter(|_| self.random)].into_iter().flatten() {
            way.fill(self.live)?;
        }
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
            Call::Allocate if self.random => way.free_one_and_allocate(),
            Call::Allocate => way.allocate_and_free(),
            Call::DeviceMemory => way.device_memory(),
            Call::Memory => way.driver.memory().map(|told| {
                black_box(told);
            }),
            Call::Launch => way.launch(),
            Call::Graph => way.launch_graph(),
            Call::Context => way.context(),
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

    fn fill(&self, live: u32) -> Result<()> {
        let mut pool = self.pool.borrow_mut();
        for _ in 0..live {
            let mut pointer = 0;
            done((self.driver.allocate)(&mut pointer, 512), "cuMemAlloc")?;
            pool.0.push(pointer);
        }
        Ok(())
    }

    fn free_one_and_allocate(&self) -> Result<()> {
        let mut pool = self.pool.borrow_mut();
        let (pool, state) = &mut *pool;
        // The multiplier and addend of Knuth's MMIX: any order will do that caches cannot foresee.
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let length = pool.len().max(1) as u64;
        let place = usize::try_from((*state >> 33) % length)?;
        let pointer = pool.get_mut(place).context("--random needs --live")?;
        done((self.driver.free)(*pointer), "cuMemFree")?;
        done((self.driver.allocate)(pointer, 512), "cuMemAlloc")
    }

    fn device_memory(&self) -> Result<()> {
        let (nvml, device) = self.nvml.as_ref().context("NVML is not open")?;
        let mut memory = [0; 3];
        done((nvml.memory)(*device, &mut memory), "nvmlDeviceGetMemoryInfo")?;
        black_box(memory);
        Ok(())
    }

    fn work(&self) -> Result<&Work> {
        self.work.as_ref().context("there is no context")
    }

    fn launch(&self) -> Result<()> {
        let work = self.work()?;
        work.kernel.launch(&self.driver, 1, work.stream)
    }

    fn launch_graph(&self) -> Result<()> {
        let work = self.work()?;
        done((self.driver.graph_launch)(work.graph, work.stream), "cuGraphLaunch")
    }

    fn context(&self) -> Result<()> {
        let mut context = 0;
        done((self.driver.context_retain)(&mut context, 0), "cuDevicePrimaryCtxRetain")?;
        done((self.driver.context_release)(0), "cuDevicePrimaryCtxRelease")
    }
}
