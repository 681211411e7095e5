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

use crate::driver::{Driver, SONAME};
use crate::stores::{Family, MIB, Stores};

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
    /// Move managed memory to the GPU, which has it there only once it is used
    #[arg(long)]
    resident: bool,
    /// Kill the processes instead of letting them end
    #[arg(long)]
    kill: bool,
    /// One of the processes (used by this program itself)
    #[arg(long, hide = true)]
    child: bool,
}

impl Fill {
    /// Prints `held BYTES` for each round: the sum of what was granted, with all levels of a mipmapped array.
    ///
    /// # Errors
    /// When the driver answers anything but success and out of memory.
    pub fn run(&self) -> Result<()> {
        if self.child {
            return self.child();
        }
        for _ in 0..self.rounds {
            let mut processes = (0..self.processes)
                .map(|_| Process::start(self.family, self.largest, self.resident))
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
        let mut stores = Stores::new(&driver, self.family, self.resident)?;
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
    fn start(family: Family, largest: usize, resident: bool) -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        let family = family.to_possible_value().context("every family has a name")?;
        command.args(["fill", family.get_name(), "--child", "--largest", &largest.to_string()]);
        if resident {
            command.arg("--resident");
        }
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
        let started = (0..count).map(|_| Process::start(family, 0, false)).collect::<Result<Vec<_>>>();
        let mut processes = started?;
        processes.iter_mut().try_for_each(|one| one.expect("ready").map(drop))?;
        Ok(Self { _processes: processes })
    }
}
