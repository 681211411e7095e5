//! Keeps a GPU busy: kernels of one duration, launched in one way, as fast as the driver takes them.

use std::env;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::driver::{Driver, SONAME, done};
use crate::kernel::{Kernel, THREADS, blocks};

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Way {
    /// cuLaunchKernel
    Plain,
    /// cuLaunchKernelEx
    Ex,
    /// cuLaunchCooperativeKernel
    Cooperative,
    /// cuGraphLaunch of four nodes
    Graph,
}

/// Kernel nodes of a graph.
const NODES: u32 = 4;

/// What to launch.
#[derive(clap::Args)]
pub struct Launch {
    /// What a kernel takes on a GPU of its own, such as 100us, 1ms or 10ms
    #[arg(default_value = "1ms")]
    kernel: String,
    #[arg(long, value_enum, default_value_t = Way::Plain)]
    way: Way,
    /// Blocks; 0 = one for each multiprocessor
    #[arg(long, default_value_t = 1)]
    grid: u32,
    /// Seconds
    #[arg(long, default_value_t = 11.0)]
    seconds: f64,
    /// Synchronise after this many launches; 0 = never
    #[arg(long, default_value_t = 0)]
    every: u32,
    /// Milliseconds of pause after each synchronisation
    #[arg(long, default_value_t = 0)]
    pause: u64,
    /// Milliseconds before the first launch
    #[arg(long, default_value_t = 0)]
    after: u64,
    /// Processes that do so at once
    #[arg(long, default_value_t = 1)]
    processes: u32,
}

impl Launch {
    /// Prints `kernels COUNT` and `rate KERNELS_A_SECOND` for each process. The rate is over the time until
    /// the last kernel has run.
    ///
    /// # Errors
    /// When the driver refuses a launch.
    pub fn run(&self) -> Result<()> {
        if self.processes < 2 {
            return self.alone();
        }
        let children = (0..self.processes).map(|number| self.child(number).spawn());
        let children = children.collect::<std::io::Result<Vec<_>>>()?;
        for mut child in children {
            let status = child.wait()?;
            if !status.success() {
                bail!("a process ended with {status}");
            }
        }
        Ok(())
    }

    /// One of several processes. Each starts 7 ms after the one before, since programs do not start in step
    /// either.
    fn child(&self, number: u32) -> Command {
        let mut command = Command::new(env::current_exe().unwrap_or_default());
        let way = self.way.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        command.args(["launch", &self.kernel, "--way", &way]);
        for (name, value) in [("--grid", self.grid), ("--every", self.every)] {
            command.args([name, &value.to_string()]);
        }
        command.args(["--seconds", &self.seconds.to_string(), "--pause", &self.pause.to_string()]);
        command.args(["--after", &(self.after + 7 * u64::from(number)).to_string()]);
        command
    }

    fn alone(&self) -> Result<()> {
        let driver = Driver::start(SONAME)?;
        let kernel = Kernel::working(&driver, &self.kernel)?;
        let (stream, grid) = (driver.stream()?, blocks(&driver, self.grid)?);
        let nodes = if self.way == Way::Graph { NODES } else { 1 };
        let graph = if self.way == Way::Graph { kernel.graph(&driver, grid, NODES)? } else { 0 };
        std::thread::sleep(Duration::from_millis(self.after));
        let (start, time) = (Instant::now(), Duration::from_secs_f64(self.seconds));
        let mut launches = 0_u32;
        while start.elapsed() < time {
            self.launch(&driver, kernel, graph, grid, stream)?;
            launches += 1;
            if self.every > 0 && launches.is_multiple_of(self.every) {
                done((driver.stream_synchronize)(stream), "cuStreamSynchronize")?;
                std::thread::sleep(Duration::from_millis(self.pause));
            }
        }
        done((driver.synchronize)(), "cuCtxSynchronize")?;
        let kernels = f64::from(launches) * f64::from(nodes);
        println!("kernels {kernels}\nrate {:.3}", kernels / start.elapsed().as_secs_f64());
        Ok(())
    }

    fn launch(&self, driver: &Driver, kernel: Kernel, graph: usize, grid: u32, stream: usize) -> Result<()> {
        match self.way {
            Way::Plain => kernel.launch(driver, grid, stream),
            Way::Ex => {
                let configuration = Kernel::configuration(grid, stream);
                done((driver.launch_ex)(&configuration, kernel.handle(), 0, 0), "cuLaunchKernelEx")
            }
            Way::Cooperative => {
                let launch = driver.launch_cooperative;
                let status = launch(kernel.handle(), grid, 1, 1, THREADS, 1, 1, 0, stream, 0);
                done(status, "cuLaunchCooperativeKernel")
            }
            Way::Graph => done((driver.graph_launch)(graph, stream), "cuGraphLaunch"),
        }
    }
}
