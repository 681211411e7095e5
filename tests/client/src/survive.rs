//! Measures how long others are held up when a process is killed. Victims and survivors allocate and free
//! without pause. Each victim is killed at a random moment, wherever it is then.
//!
//! A survivor that is ready to run and has no processor is not held up by a kill. The kernel counts that time
//! for each thread, and it is subtracted.

use std::env;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::driver::{Driver, SONAME, done};

/// Nanoseconds; calls that take longer are recorded.
const SLOW: u64 = 50_000;
/// Nanoseconds; a call that begins later than this after a kill is not held up by it.
const AFTERMATH: u64 = 50_000_000;

/// What to do.
#[derive(clap::Args)]
pub struct Survive {
    /// Processes to kill, one after the other
    #[arg(long, default_value_t = 1000)]
    kills: u32,
    /// Processes that live on
    #[arg(long, default_value_t = 1)]
    survivors: u32,
    /// One of the victims (used by this program itself)
    #[arg(long, hide = true)]
    victim: bool,
    /// One of the survivors (used by this program itself)
    #[arg(long, hide = true)]
    survivor: bool,
}

impl Survive {
    /// Prints for each kill the longest time in nanoseconds for which it held up a survivor's call. It prints
    /// 0 for less than 50 µs.
    ///
    /// # Errors
    /// When a process does not start, or a survivor meets an error.
    pub fn run(&self) -> Result<()> {
        if self.victim || self.survivor {
            return work(self.survivor);
        }
        let survivors =
            (0..self.survivors).map(|_| Worker::start("--survivor")).collect::<Result<Vec<_>>>()?;
        let mut random = 0x2545_f491_4f6c_dd1d_u64 ^ now();
        let mut kills = Vec::new();
        for _ in 0..self.kills {
            let mut victim = Worker::start("--victim")?;
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

/// A call that took long.
#[derive(Clone, Copy, Debug)]
struct Slow {
    /// Nanoseconds of the monotonic clock.
    start: u64,
    end: u64,
    /// Nanoseconds of the call in which the thread was ready and had no processor.
    queued: u64,
}

/// Nanoseconds that the most delayed of the calls `slow` lost, of those that were under way at the moment
/// `kill` or began soon after it.
fn held_up(kill: u64, slow: &[Slow]) -> u64 {
    let touched = slow.iter().filter(|call| call.end > kill && call.start < kill + AFTERMATH);
    let lost = |call: &Slow| {
        (call.end - kill.max(call.start)).min((call.end - call.start).saturating_sub(call.queued))
    };
    touched.map(lost).max().unwrap_or(0)
}

/// A process that allocates and frees.
struct Worker {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Worker {
    fn start(role: &str) -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.args(["survive", role]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut output = BufReader::new(child.stdout.take().context("stdout was asked for")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        if line != "ready\n" {
            bail!("a process did not start: {line:?}");
        }
        Ok(Self { child, output })
    }

    /// Ends the process and returns its slow calls.
    fn finish(mut self) -> Result<Vec<Slow>> {
        drop(self.child.stdin.take());
        let mut text = String::new();
        self.output.read_to_string(&mut text)?;
        if !self.child.wait()?.success() {
            bail!("a survivor failed");
        }
        let calls = text.lines().map(|line| {
            let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
            let [start, end, queued] = numbers[..] else { bail!("three numbers were expected: {line:?}") };
            Ok(Slow { start, end, queued })
        });
        calls.collect()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Allocates and frees until standard input ends. A survivor then prints its slow calls.
fn work(survives: bool) -> Result<()> {
    static OVER: AtomicBool = AtomicBool::new(false);
    let driver = Driver::start(SONAME)?;
    println!("ready");
    stdout().flush()?;
    std::thread::spawn(|| {
        // Waits until the parent closes the other end.
        let _ = stdin().read_to_end(&mut Vec::new());
        OVER.store(true, Ordering::Relaxed);
    });
    let mut watch = survives.then(Watch::new).transpose()?;
    while !OVER.load(Ordering::Relaxed) {
        let mut pointer = 0;
        let status = timed(&mut watch, || (driver.allocate)(&mut pointer, 4096))?;
        done(status, "cuMemAlloc")?;
        done(timed(&mut watch, || (driver.free)(pointer))?, "cuMemFree")?;
    }
    let slow = watch.map(|watch| watch.slow).unwrap_or_default();
    slow.iter().for_each(|call| println!("{} {} {}", call.start, call.end, call.queued));
    Ok(())
}

/// Keeps a thread's slow calls.
struct Watch {
    /// The kernel's figures of this thread: time on a processor, time queued for one, number of turns.
    schedule: File,
    slow: Vec<Slow>,
}

impl Watch {
    fn new() -> Result<Self> {
        let schedule =
            File::open("/proc/thread-self/schedstat").context("the kernel keeps no schedule figures")?;
        Ok(Self { schedule, slow: Vec::new() })
    }

    /// Nanoseconds for which this thread has been queued since it started.
    fn queued(&self) -> Result<u64> {
        let mut bytes = [0; 96];
        let length = self.schedule.read_at(&mut bytes, 0)?;
        let text = std::str::from_utf8(&bytes[..length])?;
        text.split(' ').nth(1).context("no second figure")?.parse().context("no number")
    }
}

fn timed(watch: &mut Option<Watch>, call: impl FnOnce() -> i32) -> Result<i32> {
    let Some(watch) = watch else { return Ok(call()) };
    let (queued, start) = (watch.queued()?, now());
    let status = call();
    let end = now();
    if end - start > SLOW {
        let queued = watch.queued()?.saturating_sub(queued);
        watch.slow.push(Slow { start, end, queued });
    }
    Ok(status)
}

/// Nanoseconds of the machine's monotonic clock, which is the same for all processes.
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
        for ((start, end, queued), want) in [
            ((10, 20, 0), 8),
            ((13, 20, 0), 7),
            ((5, 12, 0), 0),
            ((5, 13, 0), 1),
            ((70, 90, 0), 0),
            ((10, 20, 1), 8),
            ((10, 20, 7), 3),
            ((10, 20, 11), 0),
        ] {
            let slow = [Slow { start: start * ms, end: end * ms, queued: queued * ms }];
            assert_eq!(held_up(12 * ms, &slow), want * ms, "{slow:?}");
        }
        assert_eq!(held_up(12 * ms, &[]), 0);
    }
}
