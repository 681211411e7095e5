//! Measures the delay that a container causes on its node when it takes every kernel file lease (F_SETLEASE)
//! that it can get.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};

use crate::measure::{Sample, milliseconds, nanoseconds, timed};
use crate::meter::Meter;
use crate::table::{Row, Table};

const ROUNDS: usize = 20;
/// Most nanoseconds that a call may take in addition to the same call without the attacker.
const MOST: i64 = 10_000_000;
const CLIENT: &str = "/bin/gpushare-tests-client";
/// All files of gpushare in a container; [`DRIVERS`] lists those of the driver.
const OURS: &str = "/usr/lib/gpushare/limits /usr/lib/gpushare/usage /usr/lib/x86_64-linux-gnu/libcuda.so.1 \
                    /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";
const DRIVERS: &str = "/usr/lib/gpushare/driver/cuda /usr/lib/gpushare/driver/nvidia-ml";
/// Uid that owns gpushare's files. A process in a container can change to it.
const NOBODYS: &str = "2147483600";

/// Measures the section.
///
/// # Errors
/// If a container or the meter fails.
pub fn section() -> Result<Table> {
    crate::need_runtime()?;
    let mut table = Table::default();
    beside_leases(&mut table)?;
    Ok(table)
}

/// Names of the timed calls, in order.
const CALLS: [&str; 7] = [
    "create and start",
    "a CUDA program: dlopen, first allocation",
    "update of its limit",
    "sweep",
    "inventory refresh",
    "delete",
    "ps",
];

fn beside_leases(table: &mut Table) -> Result<()> {
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let share = |args: &[&str]| Bundle::with_client().env("GPUSHARE_MEMORY", "1GiB").args(args);
    let takes = format!("{CLIENT} lease --uid {NOBODYS} {OURS} & exec {CLIENT} lease {DRIVERS}");
    let (first, attacker) = (share(&["sleep", "10000"]), share(&["sh", "-c", &takes]));
    let _first = runtime.run(&first); // keeps the meter running
    let _meter = Meter::start(&node)?;
    sleep(Duration::from_secs(2));
    let victim = share(&["sleep", "10000"]);
    let mut times: [[Vec<i64>; 2]; CALLS.len()] = Default::default();
    for round in 0..=ROUNDS {
        for attacked in [false, true] {
            let attacking = attacked.then(|| runtime.run(&attacker));
            if let Some(attacking) = &attacking {
                let begun = || attacking.stdout().matches("leases").count() == 2;
                if !eventually(Duration::from_secs(10), begun) {
                    bail!("the attacker does not begin: {}", attacking.stderr());
                }
            }
            let all = calls(&runtime, &victim)?;
            // The first round creates files and caches that later rounds find, so it does not count.
            for (times, time) in times.iter_mut().zip(all).filter(|_| round > 0) {
                times[usize::from(attacked)].push(time);
            }
        }
    }
    for (what, [without, with]) in CALLS.into_iter().zip(times) {
        let differences = with.iter().zip(&without).map(|(with, without)| with - without).collect();
        let longest = |times: &[i64]| times.iter().copied().max().unwrap_or_default();
        let spread =
            format!("longest {} beside {} ms", milliseconds(longest(&with)), milliseconds(longest(&without)));
        let differences = Sample::new(differences)?;
        table.push(
            Row::difference(&format!("{what}, beside file leases to without"), &differences)
                .spread(spread)
                .target("<= +10 ms", differences.median() <= MOST),
        );
    }
    Ok(())
}

/// Times one of each call, in the order of [`CALLS`].
fn calls(runtime: &Runtime, victim: &Bundle) -> Result<[i64; CALLS.len()]> {
    let cli = |args: &[&str]| {
        let mut command = Command::new(artifacts::cli());
        command.args(args).env("GPUSHARE_CONFIG", runtime.config()).stdout(std::process::Stdio::null());
        timed(&mut command)
    };
    let start = Instant::now();
    let container = runtime.run(victim);
    let create = nanoseconds(start.elapsed());
    let program = program(&container)?;
    let update = cli(&["update", victim.id(), "--memory", "2GiB"])?;
    let (sweep, refresh) = (cli(&["sweep"])?, cli(&["inventory", "refresh"])?);
    let ps = cli(&["ps"])?;
    let start = Instant::now();
    drop(container);
    Ok([create, program, update, sweep, refresh, nanoseconds(start.elapsed()), ps])
}

fn program(container: &Container<'_>) -> Result<i64> {
    let start = Instant::now();
    let told = container.exec(&["/bin/gpushare-simulator", "probe", "--json", "--allocate", "64MiB"]);
    if !told.success() {
        bail!("the CUDA program fails: {told:?}");
    }
    Ok(nanoseconds(start.elapsed()))
}
