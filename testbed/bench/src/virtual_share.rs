//! Measures shares of compute in virtual time: the limiter itself, with the clock and the GPU of a
//! simulation. A run of ten seconds takes milliseconds, so this covers many more cases than real time allows.

use std::env;
use std::thread;

use anyhow::{Context, Result, bail};
use gpushare_intercept_trial::{
    Bounds, Case, Container, Discipline, Estimates, Load, MILLISECOND, Setting, Summary, Trial, cases,
};

use crate::table::{Row, Table};

/// Environment variable with the number of runs of each case, each with different random numbers.
const SEEDS: &str = "GPUSHARE_BENCH_SEEDS";
const DEFAULT: u64 = 3;
/// First seed. No constant of the limiter was chosen with it or with later ones.
const FIRST: u64 = 1000;

const SLICES: Discipline = Discipline::Slices(2 * MILLISECOND);

/// Returns the devices: one runs work to its end, the other takes turns of 2 ms, with which a sharing
/// container falls short.
fn settings() -> [(&'static str, Setting); 2] {
    let setting = |device, mean, second| {
        let bounds = Bounds { mean, second, first: 95.0..=110.0 };
        Setting { device, bounds }
    };
    [("FIFO", setting(Discipline::Submission, 0.5, 3.0)), ("slices", setting(SLICES, 1.0, 4.0))]
}

/// Measures the section.
///
/// # Errors
/// If a simulation panics.
pub fn section() -> Result<Table> {
    let seeds = env::var(SEEDS).map_or(Ok(DEFAULT), |text| text.parse()).context(SEEDS)?;
    let mut table = Table::default();
    for case in cases() {
        for (told, (name, setting)) in each(&case, seeds)?.iter().zip(settings()) {
            table.push(summary(&format!("{}; {name}", case.name), told, &setting.bounds));
        }
    }
    table.push(control());
    table.note(format!(
        "{seeds} seeds from {FIRST} on. Worst figures of all containers: mean and any 1-s window (50-ms steps) in points of the \
         GPU, the first second in % of the share."
    ));
    Ok(table)
}

/// Runs a case in each setting, each in a thread of its own.
fn each(case: &Case, seeds: u64) -> Result<Vec<Summary>> {
    thread::scope(|scope| {
        let run = |(_, setting)| scope.spawn(move || case.run(&setting, FIRST..FIRST + seeds, 1));
        let summaries = settings().map(run).into_iter().map(thread::ScopedJoinHandle::join);
        summaries.map(|told| told.or_else(|_| bail!("a simulation of {:?} panicked", case.name))).collect()
    })
}

fn summary(what: &str, told: &Summary, bounds: &Bounds) -> Row {
    let worst = &told.worst;
    let first = format!("{:.0} to {:.0} %", worst.least_first, worst.first);
    let words = format!("mean {:.1}, worst {:.1}, first {first}", worst.mean.abs(), worst.worst);
    Row::plain(what, format!("{} missed", told.misses))
        .spread(words)
        .runs(told.containers)
        .target(&format!("0; {}, {}, 95 to 110 %", bounds.mean, bounds.second), told.misses == 0)
}

/// Returns the figures of a limiter that learns nothing. If they were good, the other rows would prove
/// nothing.
fn control() -> Row {
    let container = Container::fixed(25, 1, Load::steady(10 * MILLISECOND, 0));
    let trial = Trial::new(vec![container], SLICES, FIRST);
    let figures = Trial { estimates: Estimates::Pinned, ..trial }.run();
    let words = figures.iter().map(|one| format!("mean {:.1}, first {:.0} %", one.mean, one.first));
    Row::plain("negative control: estimates pinned", "must fail").spread(words.collect::<Vec<_>>().join("; "))
}
