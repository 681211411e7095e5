//! Measures the cost of a decision in a large cluster: pods of a list come and go at random, and the nodes
//! stay nearly full. For each pod, the scheduler extender decides the worth of every node, and the GPUs on
//! the best one.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};
use fastrand::Rng;
use gpushare_placement::{Fill, Gpu, Machine, WHOLE};

use super::trace::{self, Trace, needs, popularity};
use crate::table::{Row, Table};

/// Numbers of nodes with eight GPUs: the smaller and the larger cluster.
const NODES: [usize; 2] = [1000, 5000];
/// Pods that arrive in a cluster.
const PODS: usize = 100_000;
/// Decisions that do not count: each kind of pod is judged on every node when it first arrives.
const WARM: usize = 2000;
/// Allocated part of the GPUs while pods come and go, in percent.
const GIVEN: u64 = 92;

/// Nanoseconds of each decision.
struct Costs(Vec<u64>);

/// Adds the rows, with the pods of one list.
///
/// # Errors
/// If the kernel does not report the program's memory.
pub fn rows(trace: &Trace, table: &mut Table) -> Result<()> {
    let before = resident()?;
    let [small, large] = NODES.map(|nodes| run(nodes, trace));
    let memory = resident()?.saturating_sub(before);
    let (p99, most) = (large.quantile(99, 100), large.quantile(1, 1));
    let times = |nanoseconds: u64| format!("{:.2} ms", micros(nanoseconds) / 1000.0);
    table.push(
        Row::plain(&format!("{} nodes of 8 GPUs: a decision, 99 of 100", NODES[1]), times(p99))
            .spread(format!("median {}, most {}", times(large.quantile(1, 2)), times(most)))
            .runs(large.0.len())
            .target("<= 5 ms, most 20", p99 <= 5_000_000 && most <= 20_000_000),
    );
    let ratio = micros(large.sum()) / micros(small.sum()).max(1.0);
    table.push(
        Row::plain(
            &format!("the same beside {} nodes: all decisions", NODES[0]),
            format!("{ratio:.1} times"),
        )
        .spread(format!("99 of 100 {}, most {}", times(small.quantile(99, 100)), times(small.quantile(1, 1))))
        .target("<= 6", ratio <= 6.0),
    );
    table.push(
        Row::plain("memory of both", format!("{} MiB", memory >> 20)).target("<= 1 GiB", memory <= 1 << 30),
    );
    Ok(())
}

/// Runs the pods on a cluster of this many nodes.
fn run(nodes: usize, trace: &Trace) -> Costs {
    let memory = u64::from(WHOLE);
    let gpu = Gpu { memory, per_share: memory, is_open: true, ..Gpu::default() };
    let machine = Machine { cpu: 128_000, memory: 1 << 20, model: 0, gpus: vec![gpu; 8] };
    let machines: Vec<Machine> = vec![machine; nodes];
    let capacity = trace::capacity(&machines);
    let mut ledger = trace::ledger(machines.into_iter(), Fill::new(&popularity(&trace.tasks)));
    let mut random = Rng::with_seed(42);
    let mut running: Vec<(usize, usize, u64)> = Vec::new();
    let (mut given, mut costs) = (0, Vec::with_capacity(PODS));
    for pod in 0..PODS {
        let mut task = trace.tasks[random.usize(..trace.tasks.len())].task;
        task.models = gpushare_placement::Models::ANY;
        let needs = needs(&task);
        let started = Instant::now();
        let node = ledger.best(&needs);
        let places = node.and_then(|node| ledger.places(node, &needs).ok());
        costs.push(u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX));
        if let Some((node, places)) = node.zip(places) {
            ledger.hold(node, pod, needs, places);
            given += task.demand();
            running.push((node, pod, task.demand()));
        }
        while given * 100 > capacity * GIVEN && !running.is_empty() {
            let (node, pod, demand) = running.swap_remove(random.usize(..running.len()));
            ledger.release(node, &pod);
            given -= demand;
        }
    }
    costs.drain(..WARM);
    costs.sort_unstable();
    Costs(costs)
}

impl Costs {
    fn quantile(&self, part: usize, of: usize) -> u64 {
        let index = (self.0.len() * part / of).min(self.0.len().saturating_sub(1));
        self.0.get(index).copied().unwrap_or(0)
    }

    fn sum(&self) -> u64 {
        self.0.iter().sum()
    }
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of minutes at most")]
fn micros(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1000.0
}

/// Returns the resident memory of the program in bytes.
fn resident() -> Result<u64> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kilobytes << 10)
}
