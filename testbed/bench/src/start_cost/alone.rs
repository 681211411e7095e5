//! Measures the wrapper alone, in front of a low-level runtime that does nothing: its time, its memory, and
//! the hooks that it adds.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};

use super::cycle::{Contender, Program};
use super::{MS, SHARE};
use crate::measure::{Sample, timed};
use crate::quota;
use crate::table::{Row, Table};

const RUNS: usize = 500;
/// The first runs create the quota store and fill the caches.
const UNCOUNTED: usize = 5;

/// Number of figures that are measured alternately.
const FIGURES: usize = 6;

/// Adds the rows of the wrapper alone.
///
/// # Errors
/// If a call fails.
pub fn rows(node: &SimulatedNode, table: &mut Table) -> Result<()> {
    let noop = crate::noop()?;
    let candidates = format!("[runtime]\ncandidates = [{:?}]", noop.display().to_string());
    let config = node.config_with("noop", &candidates);
    let wrapper = || Program::Ours(Runtime::with_config(LowLevel::Runc, &config));
    let share = Contender::new(wrapper(), Some(SHARE));
    let plain = Contender::new(wrapper(), None);

    let [empty, twice, create, store, nothing, pass] = turns(&noop, &share, &plain)?;
    table.push(Row::duration("an empty static process", &empty));
    table.push(Row::duration("an empty static process that becomes another", &twice));
    table.push(
        Row::duration("wrapper alone at create, no-op runtime", &create)
            .target("<= 1.3 ms", create.median() <= MS * 13 / 10),
    );
    table.push(
        Row::duration("  of it the quota store (in a new process)", &store)
            .target("<= 0.15 ms", store.median() <= MS * 15 / 100),
    );
    table.push(Row::duration("the same, container without a request", &nothing));
    table.push(
        Row::duration("pass-through of `state`, no-op runtime", &pass)
            .target("<= 0.5 ms", pass.median() <= MS / 2),
    );
    let peak = peak(&noop, &share)?;
    let words = format!("{}.{} MiB", peak / 1024, peak % 1024 * 10 / 1024);
    table.push(Row::plain("peak memory of the wrapper at create", words).target("<= 3.5 MiB", peak <= 3584));
    let hooks = hooks(&share)?;
    table.push(Row::plain("hooks run", hooks.to_string()).target("1", hooks == 1));
    Ok(())
}

fn turns(noop: &Path, share: &Contender, plain: &Contender) -> Result<[Sample; FIGURES]> {
    let state = quota::State::new()?;
    let quiet = |words: &[&OsStr]| {
        let mut command = Command::new(noop);
        timed(command.args(words).env_clear().stdin(Stdio::null()).stdout(Stdio::null()))
    };
    let mut figures = [const { Vec::new() }; FIGURES];
    for run in 0..UNCOUNTED + RUNS {
        let turn: [i64; FIGURES] = [
            quiet(&[])?,
            quiet(&["--become".as_ref(), noop.as_os_str()])?,
            share.create()?,
            quota::in_a_new_process(state.path())?,
            plain.create()?,
            share.call(&["state".as_ref(), share.id().as_ref()])?,
        ];
        share.delete(&["--force"])?;
        if run >= UNCOUNTED {
            figures.iter_mut().zip(turn).for_each(|(figure, time)| figure.push(time));
        }
    }
    let samples = figures.into_iter().map(Sample::new).collect::<Result<Vec<_>>>()?;
    samples.try_into().map_err(|_| anyhow::anyhow!("a figure is missing"))
}

/// Returns the number of hooks that the wrapper puts into config.json.
fn hooks(share: &Contender) -> Result<usize> {
    share.create()?;
    let hooks = share.hooks();
    share.delete(&["--force"])?;
    hooks
}

/// Returns the peak of the wrapper's resident memory in KiB, including the pages of its program.
fn peak(noop: &Path, share: &Contender) -> Result<i64> {
    let create = share.create_command();
    let mut command = Command::new(noop);
    command.arg("--peak").arg(create.get_program()).args(create.get_args()).env_clear();
    command.envs(create.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.stdin(Stdio::null()).output()?;
    share.delete(&["--force"])?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    text.parse().with_context(|| format!("no memory size: {text:?}"))
}
