//! Checks whether programs get their container's share of a GPU's time. Real processes run in real containers
//! on a simulated GPU that works in real time, and the GPU's own books provide the figures.

mod cases;
mod verdict;

use std::env;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cases::{Case, Device, Expect, Tenant};
use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use verdict::Figures;

use crate::books::Course;
use crate::meter::Meter;
use crate::place;
use crate::table::{Row, Table};

/// Environment variable: seconds of a case after its first one. The targets are stated for 10.
const SECONDS: &str = "GPUSHARE_BENCH_SECONDS";
/// Environment variable: selects cases by a part of their name.
const CASES: &str = "GPUSHARE_BENCH_CASES";
/// Time between two reads of the books.
const FOLLOW: Duration = Duration::from_millis(50);
/// A program that has not used the GPU after this time never will.
const BEGIN: Duration = Duration::from_secs(20);

/// Measures the section.
///
/// # Errors
/// If a program fails or does not use the GPU at all.
pub fn section() -> Result<Table> {
    crate::need_runtime()?;
    let seconds = env::var(SECONDS).map_or(Ok(10), |text| text.parse()).context(SECONDS)?;
    let wanted = env::var(CASES).unwrap_or_default();
    let mut table = Table::default();
    for device in [Device::Fifo, Device::Slices] {
        let chosen = |case: &Case| case.device == device && case.name().contains(&wanted);
        let (metered, alone): (Vec<_>, Vec<_>) =
            cases::all().into_iter().filter(chosen).partition(|case| case.meter);
        for (cases, meter) in [(alone, false), (metered, true)] {
            if cases.is_empty() {
                continue;
            }
            let node = place::node(device.arguments());
            let _meter = meter.then(|| Meter::start(&node)).transpose()?;
            cases.iter().try_for_each(|case| run(&node, case, seconds).map(|row| table.push(row)))?;
        }
    }
    table.note(format!(
        "mean: error over {seconds} s after the first, points; worst: error of any 1-s window after the first second (50-ms steps), \
         points; first: the first second in % of the limit. Of several containers the worst figure is shown."
    ));
    Ok(table)
}

fn run(node: &SimulatedNode, case: &Case, seconds: u64) -> Result<Row> {
    let runtime = Runtime::wrapped(LowLevel::Runc, node);
    let bundles: Vec<Bundle> = case.tenants.iter().map(|tenant| bundle(tenant, seconds)).collect();
    let ids = bundles.iter().map(|bundle| bundle.id().to_owned()).collect();
    let mut course = Course::begin(&node.shared(), ids)?;
    let containers: Vec<_> = bundles.iter().map(|bundle| runtime.run(bundle)).collect();
    let start = Instant::now();
    let enough = |course: &Course| {
        (0..bundles.len()).all(|index| Figures::enough(course.since_first_work(index), seconds))
    };
    while !enough(&course) {
        std::thread::sleep(FOLLOW);
        course.follow();
        let waited = start.elapsed();
        if let Some(silent) = (0..bundles.len()).find(|index| course.since_first_work(*index).is_empty())
            && waited > BEGIN
        {
            bail!(
                "{}: container {silent} does not work: {}",
                case.name(),
                containers[silent].stderr().trim()
            );
        }
        if waited > BEGIN + Duration::from_secs(seconds + 1) {
            bail!("{}: a program ended too early", case.name());
        }
    }
    let figures =
        case.tenants.iter().enumerate().map(|(index, tenant)| {
            Figures::of(course.since_first_work(index), f64::from(tenant.cores), seconds)
        });
    let figures = figures.collect::<Vec<_>>();
    course.end();
    Ok(row(case, &figures))
}

/// Returns the bundle of a container whose program is the client.
fn bundle(tenant: &Tenant, seconds: u64) -> Bundle {
    let client = artifacts::client();
    // The first second, `seconds` more, and 3 s until the last container has started.
    let lasts = (seconds + 4).to_string();
    let mut words = vec![client.to_string_lossy().into_owned(), "launch".to_owned()];
    words.extend(tenant.words.iter().map(|word| (*word).to_owned()));
    words.extend(["--seconds".to_owned(), lasts]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Bundle::host_root()
        .env("GPUSHARE_SIMULATOR_RUN", "0")
        .env("GPUSHARE_MEMORY", "8GiB")
        .env("GPUSHARE_CORES", &tenant.cores.to_string())
        .env("GPUSHARE_COMPUTE_POLICY", tenant.policy)
        .args(&words)
}

fn row(case: &Case, figures: &[Figures]) -> Row {
    let words = figures.iter().map(|one| format!("{:.1}", one.mean)).collect::<Vec<_>>().join(" + ");
    if case.expect == Expect::Everything {
        let used: f64 = figures.iter().map(|one| one.mean).sum();
        let kept = figures.iter().all(|one| one.least >= one.limit - 4.0);
        return Row::plain(&case.name(), format!("{words} % used"))
            .spread(format!("least {:.1} % in 1 s", least(figures)))
            .target(">= 97 %, guarantees -4", used >= 97.0 && kept);
    }
    let worst = |figure: fn(&Figures) -> f64| figures.iter().map(figure).fold(0.0, f64::max);
    let (mean, window, first) =
        (worst(Figures::mean_error), worst(Figures::window_error), worst(Figures::first));
    // Without a meter, a program cannot know how long others had the GPU between two events.
    let (most, longest) = match (case.device, case.meter) {
        (Device::Fifo, _) => (0.5, "3"),
        (Device::Slices, true) => (1.0, "4"),
        (Device::Slices, false) => (4.0, "-"),
    };
    let within = mean <= most && window <= longest.parse().unwrap_or(f64::INFINITY) && first <= 110.0;
    Row::plain(&case.name(), format!("{words} %: mean {mean:.1}"))
        .spread(format!("worst {window:.1}, first {first:.0} %"))
        .target(&format!("<= {most}, {longest}, 110 %"), within)
}

fn least(figures: &[Figures]) -> f64 {
    figures.iter().map(|one| one.least).fold(f64::INFINITY, f64::min)
}
