//! Compares placement of a production trace's tasks with the best published policy: the experiment of the FGD
//! study (Weng et al., "Beware of Fragmentation", USENIX ATC 2023).
//!
//! `TRACES` names a directory with the study's lists of nodes and tasks. Tasks are drawn from a list in a
//! random order and placed one after the other, and none leaves, until the tasks that have arrived need 130 %
//! of the cluster's GPUs. The figure is the part that is allocated then, in percent of all GPUs, as the mean
//! over ten orders.

mod arrivals;
mod extender;
mod fgd;
mod leaving;
mod scale;
mod trace;

use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, Result};
use gpushare_placement::{Binpack, Fill, Policy, Spread};

use crate::table::{Row, Table};
use arrivals::Outcome;
use fgd::Fgd;
use trace::{Trace, popularity};

/// The seeds of the orders, as in the study.
const SEEDS: std::ops::Range<u64> = 42..52;

/// The study's own figures for FGD, and how many points `fill` should exceed them.
const STUDY: [(&str, f64, f64); 8] = [
    ("default", 95.39, 0.5),
    ("cpu100", 95.35, 0.5),
    ("gpushare40", 94.15, 0.5),
    ("gpushare100", 86.90, 1.0),
    ("multigpu20", 95.65, 0.5),
    ("multigpu50", 97.18, 0.2),
    ("gpuspec10", 94.95, 1.0),
    ("gpuspec33", 94.55, 1.0),
];

/// The policies, in the order of their figures.
const POLICIES: [&str; 4] = ["fill", "FGD", "binpack", "spread"];

/// Measures the section.
///
/// # Errors
/// If a list cannot be read.
pub fn section() -> Result<Table> {
    let mut table = Table::default();
    let Some(folder) = std::env::var_os("TRACES").map(PathBuf::from) else {
        table.note("left out: TRACES names no folder with the lists of the study (openb_pod_list_*.csv.gz)");
        return Ok(table);
    };
    let lists = trace::lists(&folder).with_context(|| format!("in {}", folder.display()))?;
    for (name, trace) in lists {
        let outcomes = of_list(&trace);
        row(&name, &outcomes, &mut table);
    }
    for (name, trace) in trace::lists(&folder)?.into_iter().filter(|(name, _)| name == "default") {
        leaving::rows(&name, &trace, &mut table);
        scale::rows(&trace, &mut table)?;
        extender::rows(&trace, &mut table)?;
    }
    table.note(
        "refused: CPU-only tasks and tasks of eight GPUs, in percent of those that arrived; FGD's beside them; all policies \
         see the same arrivals, and take the first of equals in the same fixed order of nodes",
    );
    Ok(table)
}

/// Returns the mean outcome of each policy.
fn of_list(trace: &Trace) -> [Outcome; 4] {
    let demand = popularity(&trace.tasks);
    let runs: Mutex<Vec<[Outcome; 4]>> = Mutex::default();
    let seeds = Mutex::new(SEEDS);
    let work = || {
        while let Some(seed) = seeds.lock().ok().and_then(|mut seeds| seeds.next()) {
            let outcome = [
                arrivals::run(trace, seed, Fill::new(&demand)),
                arrivals::run(trace, seed, Fgd::new(&demand)),
                arrivals::run(trace, seed, Binpack),
                arrivals::run(trace, seed, Spread),
            ];
            if let Ok(mut runs) = runs.lock() {
                runs.push(outcome);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let runs = runs.into_inner().unwrap_or_default();
    std::array::from_fn(|policy| Outcome::mean(runs.iter().map(|run| &run[policy])))
}

fn row(name: &str, outcomes: &[Outcome; 4], table: &mut Table) {
    let [fill, fgd, binpack, spread] = outcomes;
    let refused = |outcome: &Outcome| format!("{:.1}, {:.1}", outcome.refused_cpu, outcome.refused_eight);
    let row = Row::plain(&format!("{name}: allocated, {}", POLICIES[0]), format!("{:.2} %", fill.allocated))
        .spread(format!(
            "FGD {:.2}, binpack {:.2}, spread {:.2}; refused {} (FGD {})",
            fgd.allocated,
            binpack.allocated,
            spread.allocated,
            refused(fill),
            refused(fgd),
        ))
        .runs(SEEDS.count());
    let known = STUDY.iter().find(|(list, ..)| *list == name);
    table.push(match known {
        Some((_, theirs, above)) => row.target(
            &format!(">= {:.2}", theirs + above),
            fill.allocated >= theirs + above
                && fill.refused_cpu <= fgd.refused_cpu + 2.0
                && fill.refused_eight <= fgd.refused_eight + 8.0,
        ),
        None => row,
    });
}

/// Returns the policies that depend on demand, with their names.
fn policies(demand: &gpushare_placement::Demand) -> [(&'static str, Box<dyn Policy>); 2] {
    [(POLICIES[0], Box::new(Fill::new(demand))), (POLICIES[1], Box::new(Fgd::new(demand)))]
}
