//! Checks whether a container ever exceeds its limit, in bytes by the simulated GPU's books.

use anyhow::{Context, Result, bail};
use gpushare_tests::node::SimulatedNode;

use crate::books::Peak;
use crate::place::{self, Limited, OnHost};
use crate::table::{Row, Table};

const LIMIT: &str = "8GiB";
const LIMIT_MIB: u64 = 8 << 10;
const MIB: u64 = 1 << 20;
/// Time that the driver takes for an allocation, in nanoseconds; long enough for a race between check and use
/// to show.
const SLOW: &str = "200000";
const RACES: usize = 20;
const DEATHS: usize = 10;

/// One attempt: its name, the client's arguments for it, and how many bytes short of the limit it may stay.
/// An attempt that stays further below proves nothing.
struct Try {
    what: &'static str,
    words: Vec<String>,
    rounds: usize,
    processes: u64,
    short_of: u64,
}

fn tried(what: &'static str, family: &str, processes: u64, rounds: usize, more: &[&str]) -> Try {
    let numbers = [processes.to_string(), rounds.to_string()];
    let words = ["fill", family, "--processes", &numbers[0], "--rounds", &numbers[1]];
    let words = words.iter().chain(more).map(|word| (*word).to_owned()).collect();
    // A pool grows by 32 MiB in each process. Anything else leaves at least a page of 2 MiB.
    let step = if matches!(family, "pool" | "async" | "graph") { 32 } else { 2 };
    Try { what, words, rounds, processes, short_of: processes * step * MIB }
}

/// Adds the rows of memory over the limit.
///
/// # Errors
/// If a program fails, or fills so little that it proves nothing.
pub fn rows(table: &mut Table) -> Result<()> {
    let node = place::node(&[]);
    for family in ["linear", "virtual", "async"] {
        let what = match family {
            "linear" => "memory over the limit: 8 processes race, slow driver",
            "virtual" => "  the same, cuMemCreate",
            _ => "  the same, stream-ordered",
        };
        let slow = &[("GPUSHARE_SIMULATOR_ALLOCATION_NS", SLOW)];
        table.push(row(&node, slow, &tried(what, family, 8, RACES, &[]))?);
    }
    for (what, family) in [
        ("  through cuMemAllocPitch", "pitch"),
        ("  through managed memory", "managed"),
        ("  through the default pool", "async"),
        ("  through a pool of its own", "pool"),
        ("  through cuMemCreate, released while mapped", "virtual"),
        ("  through arrays", "array"),
        ("  through mipmapped arrays", "mipmap"),
        ("  through a graph's allocation nodes", "graph"),
    ] {
        table.push(row(&node, &[], &tried(what, family, 2, 3, &[]))?);
    }
    table.push(row(&node, &[], &tried("  after processes died", "linear", 4, DEATHS, &["--kill"]))?);
    Ok(())
}

fn row(node: &SimulatedNode, environment: &[(&str, &str)], attempt: &Try) -> Result<Row> {
    let limited = Limited::new(node, &[&[("GPUSHARE_MEMORY", LIMIT)], environment].concat());
    let words: Vec<&str> = attempt.words.iter().map(String::as_str).collect();
    let container = limited.start();
    let (most, told) = peak(node, || place::inside(&container, &words))?;
    drop(container);
    let limit = LIMIT_MIB * MIB;
    reached(attempt, most, &told, limit)?;
    let peer = OnHost::peer(node, LIMIT_MIB, 100).map(|peer| {
        let peer = environment.iter().fold(peer, |peer, (name, value)| peer.env(name, value));
        peak(node, || peer.run(&words)).map(|(most, _)| over(most, limit))
    });
    Ok(Row::plain(attempt.what, over(most, limit))
        .spread(format!("peak {:.1} of {LIMIT_MIB} MiB", in_mib(most)))
        .runs(attempt.rounds)
        .target("0 bytes", most <= limit)
        // If a peer cannot run this, the cell shows its error and the row stays.
        .peer(peer.map(|told| told.unwrap_or_else(|error| error.to_string()))))
}

fn peak(node: &SimulatedNode, run: impl FnOnce() -> Result<String>) -> Result<(u64, String)> {
    let peak = Peak::watch(&node.shared())?;
    let told = run()?;
    Ok((peak.bytes(), told))
}

/// Fails if the row would prove nothing: the attempt must have reached the limit, and every round must have
/// got its part, even after a process died.
fn reached(attempt: &Try, most: u64, told: &str, limit: u64) -> Result<()> {
    if most < limit - attempt.short_of {
        bail!("{}: only {most} bytes were ever held", attempt.what);
    }
    let number = |line: &str| line.strip_prefix("held ").and_then(|bytes| bytes.parse::<u64>().ok());
    let held =
        told.lines().map(|line| number(line).with_context(|| format!("no line of the client: {line:?}")));
    let held = held.collect::<Result<Vec<_>>>()?;
    let due = (limit - attempt.processes * place::CONTEXT) / 10 * 7;
    match held.iter().find(|held| **held < due) {
        Some(little) => bail!("{}: only {little} bytes were granted in a round", attempt.what),
        None if held.len() != attempt.rounds => bail!("{}: rounds are missing", attempt.what),
        None => Ok(()),
    }
}

fn over(most: u64, limit: u64) -> String {
    match most.saturating_sub(limit) {
        0 => "0 bytes".to_owned(),
        more => format!("{more} bytes ({:.1} %)", in_mib(more) * 100.0 / in_mib(limit)),
    }
}

fn in_mib(bytes: u64) -> f64 {
    std::time::Duration::from_micros(bytes).as_secs_f64() * 1e6 / 1048576.0
}
