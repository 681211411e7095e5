//! Measures a supervisor's cost to its programs: the calls that it performs or lets through, calls that only
//! pass its filter, the start of a container, and its own memory.
//!
//! The resource manager is a simulated one, a file system in user space. Each figure is a difference of
//! pairs, which cancels the time of the manager's calls. The manager is a third process on a machine that may
//! have two processors, and a program that has waited for a supervisor waits longer for it. The cost of a
//! report is therefore also measured on plain files.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gpushare_attackers::{Place, supervisors};
use gpushare_tests::artifacts;
use gpushare_tests::node::driver_version;
use tempfile::TempDir;

use crate::measure::Sample;
use crate::start_cost;
use crate::table::{Row, Table};

/// Pairs of runs, each of which makes its call thousands of times.
const PAIRS: usize = 11;
const GIB: u64 = 1 << 30;
/// A microsecond in picoseconds.
const US: i64 = 1_000_000;
/// The most objects that a supervisor tracks.
const MOST_OBJECTS: usize = 65_000;
/// Time during which an idle supervisor must not run.
const IDLE: Duration = Duration::from_secs(3);

/// Measures the section.
///
/// # Errors
/// If a program fails.
pub fn section() -> Result<Table> {
    let folder = TempDir::new()?;
    let place = Place::new(folder.path(), &driver_version())?;
    let mut table = Table::default();
    // For calls below a microsecond, use the fastest tenth: the machine causes the rest of the variation.
    let plain_folder = TempDir::new()?;
    let plain = Place::of_plain_files(plain_folder.path(), &driver_version())?;
    let bare = added(&plain, "alone", 50, &|| Ok("-".into()))?;
    table.push(Row::added("a call that a thread lets through at once, plain files", &bare));
    let decided = added(&plain, "alone", 50, &|| plain.start_supervisor(&artifacts::supervisor(), GIB))?;
    table.push(
        Row::added("a call that is let through, plain files", &decided)
            .target(&format!("<= {} ns", 20 * US / 1000), decided.median() <= 20 * US),
    );
    for (call, percentile, what, target) in [
        ("control", 50, "a call that is let through", 0),
        ("allocate", 50, "an allocation that is performed", 20 * US),
        ("free", 50, "a FREE, with the questions to the resource manager about it", 0),
        ("other", 10, "another ioctl", 60_000),
        ("getppid", 10, "another call, beside a filter of the container's own", 1_000),
    ] {
        let start = || place.start_supervisor(&artifacts::supervisor(), 4 * GIB);
        let added = added(&place, call, percentile, &start)?;
        let row = Row::added(what, &added);
        table.push(match target {
            0 => row,
            _ => row.target(&format!("<= {} ns", target / 1000), added.median() <= target),
        });
    }
    start_cost::supervised(&mut table)?;
    own_memory(&place, &mut table)?;
    table.note(
        "calls: added to each, as medians of pairs of runs; the simulated resource manager's own time is subtracted",
    );
    Ok(table)
}

/// Returns the picoseconds that the process started by `start` adds to a call: the differences of this
/// percentile in pairs of runs.
fn added(
    place: &Place,
    call: &str,
    percentile: usize,
    start: &dyn Fn() -> Result<PathBuf>,
) -> Result<Sample> {
    let mut differences = Vec::with_capacity(PAIRS);
    for pair in 0..PAIRS {
        let bare = || timed(place, call, None, percentile);
        let held = || timed(place, call, Some(start()?), percentile);
        // Alternate which one of a pair runs first.
        let (bare, held) = if pair % 2 == 0 { (bare()?, held()?) } else { swapped(held()?, bare()?) };
        differences.push(held - bare);
    }
    Sample::new(differences)
}

fn swapped<T>(first: T, second: T) -> (T, T) {
    (second, first)
}

fn calls() -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("gpushare-bench-calls");
    if !path.is_file() {
        bail!("{} is missing: run `make bench`", path.display());
    }
    Ok(path)
}

/// Returns this percentile of one run's calls, in picoseconds.
fn timed(place: &Place, call: &str, socket: Option<PathBuf>, percentile: usize) -> Result<i64> {
    let output = Command::new(calls()?).arg(place.dev()).arg(call).args(socket).output()?;
    if !output.status.success() {
        bail!("{call}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let lines = String::from_utf8(output.stdout)?;
    Ok(Sample::new(lines.lines().filter_map(|line| line.parse().ok()).collect())?.percentile(percentile))
}

/// Measures the memory of the keeper and the worker, and checks that they sleep while their container has no
/// client.
fn own_memory(place: &Place, table: &mut Table) -> Result<()> {
    for (objects, most) in [(120, 3), (MOST_OBJECTS, 12)] {
        let socket = start_alone(place, 80 * GIB)?;
        let mut held = Command::new(calls()?);
        held.arg(place.dev()).arg("hold").arg(&socket).arg(objects.to_string());
        let mut held = held.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut got = String::new();
        let _ = BufReader::new(held.stdout.take().context("no pipe")?).read_line(&mut got)?;
        let pss: u64 = pids(place)?.into_iter().map(pss_kib).sum::<Result<u64>>()?;
        held.kill()?;
        held.wait()?;
        if got.trim() != objects.to_string() {
            bail!("{} of {objects} objects", got.trim());
        }
        table.push(
            Row::plain(
                &format!("memory of keeper and worker (PSS), {objects} objects"),
                format!("{pss} KiB"),
            )
            .target(&format!("<= {most} MiB"), pss <= most << 10),
        );
    }
    let socket = start_alone(place, GIB)?;
    let mut idle = Command::new(calls()?);
    let mut idle = idle
        .arg(place.dev())
        .arg("sleep")
        .arg(&socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let _ = BufReader::new(idle.stdout.take().context("no pipe")?).read_line(&mut String::new())?;
    let before = switches(place)?;
    std::thread::sleep(IDLE);
    let woken = switches(place)? - before;
    idle.kill()?;
    idle.wait()?;
    table.push(
        Row::plain(&format!("wake-ups in {} s without a client", IDLE.as_secs()), woken.to_string())
            .target("0", woken == 0),
    );
    Ok(())
}

/// Starts a supervisor once an earlier one has ended, which takes a moment after its last program.
fn start_alone(place: &Place, limit: u64) -> Result<PathBuf> {
    const PATIENCE: Duration = Duration::from_secs(20);
    let begun = Instant::now();
    while !supervisors(&place.dev())?.is_empty() {
        if begun.elapsed() > PATIENCE {
            bail!("an earlier supervisor does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    place.start_supervisor(&artifacts::supervisor(), limit)
}

/// Returns the PIDs of this place's keeper and worker.
fn pids(place: &Place) -> Result<Vec<i32>> {
    let pids = supervisors(&place.dev())?;
    if pids.len() != 2 {
        bail!("{} processes of the supervisor's", pids.len());
    }
    Ok(pids)
}

fn pss_kib(pid: i32) -> Result<u64> {
    number(Path::new(&format!("/proc/{pid}/smaps_rollup")), "Pss:")
}

/// Returns how often they have gone to sleep so far.
fn switches(place: &Place) -> Result<u64> {
    let of = |pid: i32| number(Path::new(&format!("/proc/{pid}/status")), "voluntary_ctxt_switches:");
    pids(place)?.into_iter().map(of).sum()
}

fn number(path: &Path, name: &str) -> Result<u64> {
    let text = fs::read_to_string(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|line| line.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).with_context(|| format!("no {name} in {}", path.display()))
}
