//! Nanoseconds that the library adds to a call. Each program times rounds of calls through the library and,
//! in turns, through the driver's own file in the same process. The figure is the median of the paired
//! differences.

use anyhow::{Context, Result};
use gpushare_tests::runtime::Container;

use crate::measure::Sample;
use crate::place::{self, Limited, OnHost};
use crate::table::{Row, Table};

/// Enough for 64 processes with a context of 776 MiB each, and for allocations.
const MEMORY: &str = "60GiB";
const MEMORY_MIB: u64 = 60 << 10;
/// A compute limit that these loops never reach.
const CORES: u32 = 90;
const NS: i64 = 1000;
/// Number of processes with a peer, each paired with one on the bare driver.
const PEER_TURNS: usize = 3;
/// Number of processes that only look names up, each paired with one on the bare driver.
const LOOKUP_TURNS: usize = 15;

/// One row: the call, the client's arguments for it, and the largest acceptable overhead in nanoseconds.
struct Figure {
    what: &'static str,
    words: &'static [&'static str],
    limited: bool,
    target: Option<i64>,
}

const fn figure(what: &'static str, words: &'static [&'static str], target: i64) -> Figure {
    Figure { what, words, limited: false, target: Some(target) }
}

const fn with_cores(what: &'static str, words: &'static [&'static str], target: Option<i64>) -> Figure {
    Figure { what, words, limited: true, target }
}

const SHORT: &[&str] = &["launch", "--rounds", "2001", "--calls", "100"];
const GRAPH: &[&str] = &["graph", "--rounds", "2001", "--calls", "100"];

const NVML: &[&str] =
    &["device-memory", "--rounds", "801", "--bare-nvml", "/usr/lib/gpushare/driver/nvidia-ml"];

const FIGURES: [Figure; 13] = [
    figure("cuMemAlloc + cuMemFree", &["allocate", "--rounds", "801"], 60),
    figure("  4,000 live allocations", &["allocate", "--rounds", "801", "--live", "4000"], 60),
    figure("  100,000 live allocations", &["allocate", "--rounds", "801", "--live", "100000"], 100),
    figure(
        "  100,000, a random one is freed",
        &["allocate", "--rounds", "801", "--live", "100000", "--random"],
        130,
    ),
    figure("  64 live processes", &["allocate", "--rounds", "401", "--beside", "63"], 75),
    figure("cuMemGetInfo", &["memory", "--rounds", "801"], 12),
    figure("  64 live processes", &["memory", "--rounds", "2001", "--calls", "10", "--beside", "63"], 30),
    figure("a context made and ended", &["context", "--rounds", "401", "--calls", "5"], 5_000_000),
    figure("nvmlDeviceGetMemoryInfo", NVML, 60),
    figure("cuLaunchKernel, no compute limit", SHORT, 1),
    with_cores("  limit 90, budget left", SHORT, Some(8)),
    figure("cuGraphLaunch, no compute limit", GRAPH, 1),
    with_cores("  limit 90, budget left", GRAPH, Some(8)),
];

/// Adds the rows of calls.
///
/// # Errors
/// If a program fails.
pub fn rows(table: &mut Table) -> Result<()> {
    let node = place::node(&[]);
    let unlimited = Limited::new(&node, &[("GPUSHARE_MEMORY", MEMORY)]);
    let cores = CORES.to_string();
    let limited = Limited::new(&node, &[("GPUSHARE_MEMORY", MEMORY), ("GPUSHARE_CORES", &cores)]);
    let bare = OnHost::bare(&node);
    let mut rows = Vec::new();
    // Run one after the other, because two shares of 40 GiB fill the GPU.
    for with_cores in [false, true] {
        let container = if with_cores { limited.start() } else { unlimited.start() };
        for (place, figure) in FIGURES.iter().enumerate().filter(|(_, figure)| figure.limited == with_cores) {
            let peer = OnHost::peer(&node, MEMORY_MIB, if with_cores { CORES } else { 100 });
            let peer = peer.map(|peer| peer_cell(&peer, &bare, figure.words)).transpose()?;
            rows.push((place, row(&container, figure)?.peer(peer)));
        }
        if !with_cores {
            let peer = OnHost::peer(&node, MEMORY_MIB, 100);
            rows.push((FIGURES.len(), lookup(&container, &bare, peer.as_ref())?));
        }
    }
    rows.sort_by_key(|(place, _)| *place);
    rows.into_iter().for_each(|(_, row)| table.push(row));
    Ok(())
}

fn row(container: &Container<'_>, figure: &Figure) -> Result<Row> {
    let told = place::inside(container, &[&["cost"], figure.words, &["--bare", place::DRIVER]].concat())?;
    let pairs = told.lines().map(|line| line.split_once(' ').context("two figures a round"));
    let pairs =
        pairs.map(|pair| pair.and_then(|(ours, bare)| Ok((ours.parse::<i64>()?, bare.parse::<i64>()?))));
    let pairs = pairs.collect::<Result<Vec<_>>>()?;
    let added = Sample::new(pairs.iter().map(|(ours, bare)| ours - bare).collect())?;
    let bare = Sample::new(pairs.into_iter().map(|(_, bare)| bare).collect())?;
    let what = format!("{} (bare {} ns)", figure.what, bare.median() / NS);
    let row = Row::added(&what, &added);
    Ok(match figure.target {
        Some(most) => row.target(&format!("<= +{most} ns"), added.median() <= most * NS),
        None => row,
    })
}

/// Returns the median picoseconds of a call in a process that calls only one driver.
fn alone(told: &str) -> Result<i64> {
    let rounds = told.lines().map(|line| line.parse::<i64>().context("one figure a round"));
    Ok(Sample::new(rounds.collect::<Result<_>>()?)?.median())
}

/// Returns the nanoseconds that a peer adds. A peer is loaded into its whole process, so the bare driver is
/// timed in separate processes.
fn peer_cell(peer: &OnHost, bare: &OnHost, words: &[&str]) -> Result<String> {
    let words = [&["cost"], words].concat();
    let turn = |_| Ok(alone(&peer.run(&words)?)? - alone(&bare.run(&words)?)?);
    let added = Sample::new((0..PEER_TURNS).map(turn).collect::<Result<_>>()?)?;
    Ok(format!("{} ns", crate::measure::added(added.median())))
}

/// Measures the time of dlsym in processes with the library, minus that in others. dlsym is not hooked, so
/// one process has nothing to pair.
fn lookup(container: &Container<'_>, bare: &OnHost, peer: Option<&OnHost>) -> Result<Row> {
    let words = ["cost", "lookup", "--rounds", "51", "--calls", "5000"];
    let mut added = Vec::new();
    for _ in 0..LOOKUP_TURNS {
        added.push(
            alone(&place::inside(container, &words)?)? - alone(&place::inside_bare(container, &words)?)?,
        );
    }
    let peer = peer.map(|peer| peer_cell(peer, bare, &words[1..])).transpose()?;
    let added = Sample::new(added)?;
    let row = Row::added("dlsym of a function of another library", &added).peer(peer);
    // Two processes always differ by some nanoseconds, so 2 ns are allowed. The spread does not count,
    // because noise would meet any target.
    let is_none = added.median().abs() <= 2 * NS;
    Ok(row.target("0: not hooked", is_none))
}
