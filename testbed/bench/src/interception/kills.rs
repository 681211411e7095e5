//! Measures how long the other processes of a container wait after a SIGKILL, minus the time in which they
//! were ready to run but had no processor. The bare driver's figure is listed for comparison.

use anyhow::{Context, Result};

use crate::measure::{Sample, milliseconds};
use crate::place::{self, Limited};
use crate::table::{Row, Table};

/// Environment variable with the number of kills; the target is stated for 10,000.
const KILLS: &str = "GPUSHARE_BENCH_KILLS";
const DEFAULT: usize = 1000;
/// Kills in one call of the client, which must end within the test harness's deadline.
const BATCH: usize = 250;
const MS: i64 = 1_000_000;

/// Adds the rows of kills.
///
/// # Errors
/// If a program fails. A survivor fails if any of its calls is refused.
pub fn rows(table: &mut Table) -> Result<()> {
    let kills = std::env::var(KILLS).map_or(Ok(DEFAULT), |text| text.parse()).context(KILLS)?;
    let node = place::node(&[]);
    let limited = Limited::new(&node, &[("GPUSHARE_MEMORY", "8GiB")]);
    let container = limited.start();
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for _ in 0..kills.div_ceil(BATCH).max(1) {
        let batch = BATCH.min(kills).to_string();
        let words = ["survive", "--kills", &batch];
        ours.extend(delays(&place::inside(&container, &words)?)?);
        others.extend(delays(&place::inside_bare(&container, &words)?)?);
    }
    let (ours, bare) = (Sample::new(ours)?, Sample::new(others)?);
    let longest = ours.percentile(100);
    table.push(
        Row::plain("others held up after a SIGKILL, longest", format!("{} ms", milliseconds(longest)))
            .spread(format!("bare {} ms", milliseconds(bare.percentile(100))))
            .runs(ours.runs())
            .target("<= 10 ms", longest <= 10 * MS),
    );
    table.push(
        Row::plain("  p99", format!("{} ms", milliseconds(ours.percentile(99))))
            .spread(format!("bare {} ms", milliseconds(bare.percentile(99))))
            .runs(ours.runs()),
    );
    table.push(
        Row::plain("  median", format!("{} ms", milliseconds(ours.median())))
            .spread(format!("bare {} ms", milliseconds(bare.median())))
            .runs(ours.runs()),
    );
    Ok(())
}

fn delays(told: &str) -> Result<Vec<i64>> {
    told.lines().map(|line| line.parse().context("nanoseconds")).collect()
}
