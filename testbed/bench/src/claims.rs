//! The agent for Kubernetes: the cost of preparing a claim, and of running with many claims.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gpushare_tests::artifacts;
use gpushare_tests::cluster::{ClusterNode, Settings};

use crate::measure::{Sample, nanoseconds};
use crate::table::{Row, Table};

/// Claims that the node holds at once.
const CLAIMS: usize = 100;
const GPUS: usize = 8;
const WATCHED: Duration = Duration::from_secs(20);
/// Seconds between the agent's checks of its claims, instead of 30, so that one falls into the measured time.
const PERIOD: u64 = 10;

/// Measures the section.
///
/// # Errors
/// If the agent is not built, or refuses a claim.
pub fn section() -> Result<Table> {
    let program = program()?;
    let node = ClusterNode::start(&program, GPUS, Settings { period: PERIOD, ..Settings::default() });
    let gpus = node.gpus();
    let mut prepared = Vec::new();
    for number in 0..CLAIMS {
        let share = ClusterNode::share_of("gpu", &gpus[number % GPUS], "6Gi", "0");
        node.api.claim(&name(number), &uid(number), &[share], &[]);
        prepared.push(timed(|| node.kubelet.prepare(&name(number), &uid(number)))?);
    }
    let memory = resident(node.pid())?;
    let (before, start) = (processor_time(node.pid())?, Instant::now());
    sleep(WATCHED);
    let used = processor_time(node.pid())?.checked_sub(before).context("time ran backwards")?;
    let percent = used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
    let mut released = Vec::new();
    for number in 0..CLAIMS {
        released.push(timed(|| node.kubelet.unprepare(&name(number), &uid(number)))?);
    }
    let left = node.left();
    if left != (0, 0, 0) {
        bail!("of all claims (leases, CDI files, regions) {left:?} are left");
    }
    let (prepared, released) = (Sample::new(prepared)?, Sample::new(released)?);
    let mut table = Table::default();
    table.push(
        Row::duration(
            "a claim is prepared, with kubelet's connection and the API server's answer",
            &prepared,
        )
        .target("<= 5 ms", prepared.median() <= 5_000_000),
    );
    table.push(Row::duration("a claim is unprepared", &released));
    let mebibytes = memory / 1024;
    table.push(
        Row::plain(&format!("memory of the agent with {CLAIMS} claims"), format!("{mebibytes} MiB"))
            .target("<= 30 MiB", mebibytes <= 30),
    );
    table.push(
        Row::plain(&format!("the agent, {CLAIMS} claims without a container"), format!("{percent:.2} %"))
            .spread(format!("of a core, over {} s", WATCHED.as_secs()))
            .target("<= 1 %", percent <= 1.0),
    );
    Ok(table)
}

pub fn program() -> Result<PathBuf> {
    let path = artifacts::checkout().join("target/release/gpushare-kube");
    if !path.exists() {
        bail!("{} is missing: run `make kube` first", path.display());
    }
    Ok(path)
}

fn name(number: usize) -> String {
    format!("claim-{number}")
}

fn uid(number: usize) -> String {
    format!("00000000-0000-4000-8000-{number:012}")
}

fn timed<T>(call: impl FnOnce() -> Result<T, String>) -> Result<i64> {
    let start = Instant::now();
    let answer = call();
    let elapsed = nanoseconds(start.elapsed());
    match answer {
        Ok(_) => Ok(elapsed),
        Err(why) => bail!("{why}"),
    }
}

/// Returns the processor time that all threads of a process have used so far.
fn processor_time(pid: i32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit(") ").next().unwrap_or_default();
    // utime and stime, in hundredths of a second (proc(5), fields 14 and 15).
    let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<u64>).sum::<Result<u64, _>>()?;
    Ok(Duration::from_millis(ticks * 10))
}

/// Returns the resident memory of a process, in KiB.
pub fn resident(pid: i32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the kernel tells no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
