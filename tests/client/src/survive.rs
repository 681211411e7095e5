//! How long others are held up when a process is killed: victims and survivors allocate and free without pause; each
//! victim is killed at a random moment, wherever it is then.

use std::env;
use std::io::{BufRead, BufReader, Read, stdin, stdout};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::driver::{Driver, SONAME, done};

/// Calls that take longer are written down, nanoseconds.
const SLOW: u64 = 50_000;
/// A call that begins later than this after a kill is not held up by it, nanoseconds.
const AFTERMATH: u64 = 50_000_000;

/// What to do.
#[derive(clap::Args)]
pub struct Survive {
    /// Processes to kill, one after the other
    #[arg(long, default_value_t = 1000)]
    kills: u32,
    /// Processes that live on
    #[arg(long, default_value_t = 2)]
    survivors: u32,
    /// One of the processes (used by this program itself)
    #[arg(long, hide = true)]
    child: bool,
}

impl Survive {
    /// Prints for each kill the nanoseconds for which a survivor's call was held up, at most; 0 for less than 50 µs.
    ///
    /// # Errors
    /// When a process does not start, or a survivor meets an error.
    pub fn run(&self) -> Result<()> {
        if self.child {
            return work();
        }
        let survivors = (0..self.survivors).map(|_| Worker::start()).collect::<Result<Vec<_>>>()?;
        let mut random = 0x2545_f491_4f6c_dd1d_u64 ^ now();
        let mut kills = Vec::new();
        for _ in 0..self.kills {
            let mut victim = Worker::start()?;
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            std::thread::sleep(Duration::from_nanos((random >> 33) % 3_000_000));
            kills.push(now());
            victim.child.kill()?;
            victim.child.wait()?;
        }
        std::thread::sleep(Duration::from_nanos(AFTERMATH));
        let slow = survivors.into_iter().map(Worker::finish).collect::<Result<Vec<_>>>()?.concat();
        kills.iter().for_each(|kill| println!("{}", held_up(*kill, &slow)));
        Ok(())
    }
}

/// What the longest of the calls `slow` lost that were under way at the moment `kill` or began soon after it.
fn held_up(kill: u64, slow: &[(u64, u64)]) -> u64 {
    let touched = slow.iter().filter(|(start, end)| *end > kill && *start < kill + AFTERMATH);
    touched.map(|(start, end)| end - kill.max(*start)).max().unwrap_or(0)
}

/// A process that allocates and frees.
struct Worker {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Worker {
    fn start() -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.args(["survive", "--child"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut output = BufReader::new(child.stdout.take().context("stdout was asked for")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        if line != "ready\n" {
            bail!("a process did not start: {line:?}");
        }
        Ok(Self { child, output })
    }

    /// Ends it; begin and end of its slow calls.
    fn finish(mut self) -> Result<Vec<(u64, u64)>> {
        drop(self.child.stdin.take());
        let mut text = String::new();
        self.output.read_to_string(&mut text)?;
        if !self.child.wait()?.success() {
            bail!("a survivor failed");
        }
        let calls = text.lines().map(|line| {
            let (start, end) = line.split_once(' ').context("two numbers")?;
            Ok((start.parse()?, end.parse()?))
        });
        calls.collect()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn work() -> Result<()> {
    static OVER: AtomicBool = AtomicBool::new(false);
    let driver = Driver::start(SONAME)?;
    println!("ready");
    std::io::Write::flush(&mut stdout())?;
    std::thread::spawn(|| {
        // Until our parent lets go of the other end.
        let _ = stdin().read_to_end(&mut Vec::new());
        OVER.store(true, Ordering::Relaxed);
    });
    let mut slow = Vec::new();
    let mut timed = |call: &dyn Fn() -> Result<u64>| -> Result<u64> {
        let start = now();
        let answer = call()?;
        let end = now();
        if end - start > SLOW {
            slow.push((start, end));
        }
        Ok(answer)
    };
    while !OVER.load(Ordering::Relaxed) {
        let pointer = timed(&|| {
            let mut pointer = 0;
            done((driver.allocate)(&mut pointer, 4096), "cuMemAlloc").map(|()| pointer)
        })?;
        timed(&|| done((driver.free)(pointer), "cuMemFree").map(|()| 0))?;
    }
    slow.iter().for_each(|(start, end)| println!("{start} {end}"));
    Ok(())
}

/// The machine's monotonic clock, nanoseconds: the same for all processes.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one structure of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_held_up_from_the_kill_or_its_own_begin_until_its_end() {
        let ms = 1_000_000;
        for (call, want) in [((10, 20), 8), ((13, 20), 7), ((5, 12), 0), ((5, 13), 1), ((70, 90), 0)] {
            let slow = [(call.0 * ms, call.1 * ms)];
            assert_eq!(held_up(12 * ms, &slow), want * ms, "{call:?}");
        }
        assert_eq!(held_up(12 * ms, &[]), 0);
    }
}
