//! Allocates until the driver refuses: with one family of functions, in one or several processes at once.
//!
//! Each process is this program again. It prints `ready` once it has a context, waits for a byte on its
//! standard input, fills, prints what it holds, and holds that until its standard input ends.

use std::env;
use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::driver::{Driver, OUT_OF_MEMORY, SONAME, SUCCESS, done};

const MIB: usize = 1 << 20;

/// Functions that give memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Family {
    /// cuMemAlloc
    Linear,
    /// cuMemAllocPitch
    Pitch,
    /// cuMemAllocManaged
    Managed,
    /// cuMemAllocAsync, from the current pool
    Async,
    /// cuMemAllocFromPoolAsync, from a pool of its own
    Pool,
    /// cuMemCreate, mapped, the handle released
    Virtual,
    /// cuArrayCreate
    Array,
    /// cuMipmappedArrayCreate
    Mipmap,
    /// A graph's allocation node
    Graph,
}

/// What to fill.
#[derive(clap::Args)]
pub struct Fill {
    family: Family,
    /// Processes that fill at once
    #[arg(long, default_value_t = 1)]
    processes: u32,
    /// How often, each time by new processes
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Largest allocation in MiB; halved after each refusal
    #[arg(long, default_value_t = 64)]
    largest: usize,
    /// Milliseconds for which all hold what they have
    #[arg(long, default_value_t = 30)]
    hold: u64,
    /// Kill the processes instead of letting them end
    #[arg(long)]
    kill: bool,
    /// One of the processes (used by this program itself)
    #[arg(long, hide = true)]
    child: bool,
}

impl Fill {
    /// Prints `held BYTES` for each round: the sum of what was asked and granted.
    ///
    /// # Errors
    /// When the driver answers anything but success and out of memory.
    pub fn run(&self) -> Result<()> {
        if self.child {
            return self.child();
        }
        for _ in 0..self.rounds {
            let mut processes = (0..self.processes)
                .map(|_| Process::start(self.family, self.largest))
                .collect::<Result<Vec<_>>>()?;
            processes.iter_mut().try_for_each(|one| one.expect("ready").map(drop))?;
            processes.iter_mut().try_for_each(Process::go)?;
            let held = processes.iter_mut().map(|one| one.expect("held")).collect::<Result<Vec<_>>>()?;
            println!("held {}", held.iter().sum::<usize>());
            std::thread::sleep(Duration::from_millis(self.hold));
            if self.kill {
                processes.iter_mut().try_for_each(|one| one.child.kill())?;
            }
        }
        Ok(())
    }

    fn child(&self) -> Result<()> {
        let driver = Driver::start(SONAME)?;
        let mut stores = Stores::new(&driver, self.family)?;
        say("ready 0")?;
        let mut byte = [0];
        if stdin().read(&mut byte)? > 0 && self.largest > 0 {
            say(&format!("held {}", stores.fill(self.largest * MIB)?))?;
        }
        // Waits until the parent closes the other end.
        stdin().read_to_end(&mut Vec::new())?;
        Ok(())
    }
}

fn say(line: &str) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{line}")?;
    out.flush().context("stdout")
}

/// One of the processes. It ends when this value is dropped.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(family: Family, largest: usize) -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        let family = family.to_possible_value().context("every family has a name")?;
        command.args(["fill", family.get_name(), "--child", "--largest", &largest.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("stdout was asked for")?);
        Ok(Self { child, input, output })
    }

    /// The number after `word` on the next line that the process prints.
    fn expect(&mut self, word: &str) -> Result<usize> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        match line.trim().split_once(' ') {
            Some((first, number)) if first == word => number.parse().context("no number"),
            _ => bail!("{word:?} was expected of process {}, not {line:?}", self.child.id()),
        }
    }

    fn go(&mut self) -> Result<()> {
        let input = self.input.as_mut().context("the process was let go")?;
        input.write_all(b"g").context("the process is gone")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.input = None;
        // The process ends by itself now, or was killed.
        let _ = self.child.wait();
    }
}

/// Processes that have a context and do nothing. They end when this value is dropped.
pub struct Beside {
    _processes: Vec<Process>,
}

impl Beside {
    /// Starts `count` processes.
    ///
    /// # Errors
    /// When one gets no context.
    pub fn start(count: u32, family: Family) -> Result<Self> {
        let started = (0..count).map(|_| Process::start(family, 0)).collect::<Result<Vec<_>>>();
        let mut processes = started?;
        processes.iter_mut().try_for_each(|one| one.expect("ready").map(drop))?;
        Ok(Self { _processes: processes })
    }
}

/// What a family of functions needs to allocate.
struct Stores<'d> {
    driver: &'d Driver,
    family: Family,
    pool: usize,
    range: u64,
    random: u64,
}

/// Bytes of address space for mapped memory: more than any GPU has.
const RANGE: usize = 1 << 40;
const PAGE: usize = 2 * MIB;

impl<'d> Stores<'d> {
    fn new(driver: &'d Driver, family: Family) -> Result<Self> {
        let (mut pool, mut range) = (0, 0);
        if family == Family::Pool {
            // Properties of pinned memory of GPU 0.
            let properties = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            done((driver.pool_create)(&mut pool, &properties), "cuMemPoolCreate")?;
        }
        if family == Family::Virtual {
            done((driver.range_reserve)(&mut range, RANGE, 0, 0, 0), "cuMemAddressReserve")?;
        }
        Ok(Self { driver, family, pool, range, random: u64::from(std::process::id()) << 20 | 1 })
    }

    /// Allocates sizes up to `largest` until even the smallest is refused. Returns the bytes that were
    /// granted.
    fn fill(&mut self, mut largest: usize) -> Result<usize> {
        let mut held = 0;
        while largest >= 512 {
            let bytes = self.some_size(largest);
            match self.allocate(bytes)? {
                true => held += bytes,
                false => largest /= 2,
            }
        }
        Ok(held)
    }

    /// A size between half of `largest` and `largest`, such that no driver rounds it up.
    fn some_size(&mut self, largest: usize) -> usize {
        // Marsaglia's xorshift. Any sequence will do that differs between processes.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let part = usize::try_from(self.random % 1024).unwrap_or(0);
        let bytes = largest / 2 + largest / 2048 * part;
        let unit = if bytes < PAGE { 512 } else { PAGE };
        bytes.max(unit) / unit * unit
    }

    fn allocate(&mut self, bytes: usize) -> Result<bool> {
        let driver = self.driver;
        let (mut pointer, mut handle) = (0, 0);
        let rows = |width: usize| (bytes / width).max(1) as u64;
        let status = match self.family {
            Family::Linear => (driver.allocate)(&mut pointer, bytes),
            Family::Pitch => (driver.allocate_pitch)(&mut pointer, &mut handle, 512, (bytes / 512).max(1), 4),
            Family::Managed => (driver.allocate_managed)(&mut pointer, bytes, 1),
            Family::Async => (driver.allocate_async)(&mut pointer, bytes, 0),
            Family::Pool => (driver.allocate_from_pool)(&mut pointer, bytes, self.pool, 0),
            Family::Virtual => return self.map(bytes.div_ceil(PAGE) * PAGE),
            // Each element is one float; format and channels share a word.
            Family::Array => (driver.array_create)(&mut handle, &[128, rows(512), 1 << 32 | 0x20]),
            Family::Mipmap => (driver.mipmap_create)(&mut handle, &[128, rows(512), 0, 1 << 32 | 0x20, 0], 4),
            Family::Graph => return self.launch_allocation(bytes),
        };
        granted(status)
    }

    /// Maps physical memory and releases its handle, so that only the mapping keeps it.
    fn map(&mut self, bytes: usize) -> Result<bool> {
        let mut handle = 0;
        if !granted((self.driver.physical_create)(&mut handle, bytes, &[1, 1, 0, 0], 0))? {
            return Ok(false);
        }
        done((self.driver.range_map)(self.range, bytes, 0, handle, 0), "cuMemMap")?;
        self.range += bytes as u64;
        done((self.driver.physical_release)(handle), "cuMemRelease")?;
        Ok(true)
    }

    /// Launches, once, a graph that allocates and does not free.
    fn launch_allocation(&mut self, bytes: usize) -> Result<bool> {
        let driver = self.driver;
        let (mut graph, mut node, mut executable) = (0, 0, 0);
        let mut parameters = [0; 16];
        (parameters[0], parameters[1], parameters[13]) = (1, 1, bytes as u64);
        done((driver.graph_create)(&mut graph, 0), "cuGraphCreate")?;
        let added = (driver.graph_add_allocation)(&mut node, graph, 0, 0, &mut parameters);
        if !granted(added)? || !granted((driver.graph_instantiate)(&mut executable, graph, 0))? {
            return Ok(false);
        }
        granted((driver.graph_launch)(executable, 0))
    }
}

fn granted(status: i32) -> Result<bool> {
    match status {
        SUCCESS => Ok(true),
        OUT_OF_MEMORY => Ok(false),
        other => bail!("an allocation was answered {other}"),
    }
}
