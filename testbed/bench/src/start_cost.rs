//! Measures a share's cost at the start of a container: the whole start compared with plain runc, and the
//! wrapper alone in front of a low-level runtime that does nothing.

mod alone;
mod crowded;
mod cycle;

use std::env;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use cycle::{Contender, Lap, Program};
use gpushare_tests::artifacts;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;

use crate::measure::{self, Sample};
use crate::table::{Row, Table};

/// Environment variable with the path of a peer's wrapper: any program that is called like runc.
const PEER: &str = "NVIDIA_CONTAINER_RUNTIME";
const SHARE: (&str, &str) = ("GPUSHARE_MEMORY", "4GiB");
/// runc varies by ten milliseconds from run to run, so fewer pairs would not show a difference of two.
const LAPS: usize = 200;
const MS: i64 = 1_000_000;

/// Selects the calls of a lap that a figure covers.
type Part = fn(Lap) -> i64;

/// Measures the section.
///
/// # Errors
/// If a runtime fails.
pub fn section() -> Result<Table> {
    crate::need_runtime()?;
    nix::sys::prctl::set_child_subreaper(true).context("cannot become the reaper of containers")?;
    let node = SimulatedNode::one_gpu();
    let mut table = Table::default();
    with_share(&node, &mut table)?;
    without_request(&node, &mut table)?;
    alone::rows(&node, &mut table)?;
    crowded::rows(&mut table)?;
    if let Some(path) = peer() {
        table.note(format!("peer: {}", path.display()));
    }
    Ok(table)
}

fn peer() -> Option<PathBuf> {
    env::var_os(PEER).filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn peer_program() -> Option<Program> {
    peer().map(|path| Program::Peer { path, scratch: Scratch::new("peer") })
}

/// Measures the time that a supervisor adds to the start and the end of a container.
///
/// # Errors
/// If a runtime fails.
pub fn supervised(table: &mut Table) -> Result<()> {
    crate::need_runtime()?;
    nix::sys::prctl::set_child_subreaper(true).context("cannot become the reaper of containers")?;
    let node = SimulatedNode::one_gpu();
    let program = artifacts::supervisor();
    let required =
        format!("[supervisor]\nmode = \"required\"\n[paths]\nsupervisor = \"{}\"\n", program.display());
    let held = node.config_with("supervised", &LowLevel::Runc.settings());
    let more = held.with_extension("toml.d");
    fs::create_dir_all(&more)?;
    fs::write(more.join("supervisor.toml"), required)?;
    let contender = |runtime| Contender::new(Program::Ours(runtime), Some(SHARE));
    let contenders = [
        contender(Runtime::wrapped(LowLevel::Runc, &node)),
        contender(Runtime::with_config(LowLevel::Runc, &held)),
    ];
    contenders.iter().try_for_each(|contender| contender.lap().map(drop))?;
    let laps = race(&contenders)?;
    let target = MS * 3 / 2;
    let whole = differences(&laps[1], &laps[0], Lap::whole)?;
    table.push(
        Row::difference("create+start+delete, to a share without one", &whole)
            .target("<= +1.5 ms", whole.median() <= target),
    );
    push_cpu(table, &laps, target)
}

/// Returns plain runc, the wrapper, and the peer if there is one. All have the same bundle except for the
/// settings that request a GPU.
fn contenders(node: &SimulatedNode, share: bool) -> Vec<Contender> {
    let env = share.then_some(SHARE);
    let bare = Contender::new(Program::Ours(Runtime::bare(LowLevel::Runc)), env);
    let ours = Contender::new(Program::Ours(Runtime::wrapped(LowLevel::Runc, node)), env);
    let peer = peer_program()
        .map(|program| Contender::new(program, share.then_some(("NVIDIA_VISIBLE_DEVICES", "all"))));
    [bare, ours].into_iter().chain(peer).collect()
}

/// Runs laps of each contender. Each turn has one lap of each, and the order rotates.
fn race(contenders: &[Contender]) -> Result<Vec<Vec<Lap>>> {
    let mut laps = vec![Vec::new(); contenders.len()];
    for turn in 0..LAPS {
        for place in 0..contenders.len() {
            let who = (turn + place) % contenders.len();
            laps[who].push(contenders[who].lap()?);
        }
    }
    Ok(laps)
}

/// Returns the differences between `laps` and `base`, turn by turn.
fn differences(laps: &[Lap], base: &[Lap], part: Part) -> Result<Sample> {
    Sample::new(laps.iter().zip(base).map(|(lap, base)| part(*lap) - part(*base)).collect())
}

/// Returns the peer's median difference from plain runc, as a cell; `None` without a peer.
fn peer_cell(laps: &[Vec<Lap>], part: Part) -> Result<Option<String>> {
    let Some(peer) = laps.get(2) else { return Ok(None) };
    Ok(Some(format!("{} ms", measure::difference(differences(peer, &laps[0], part)?.median()))))
}

fn with_share(node: &SimulatedNode, table: &mut Table) -> Result<()> {
    let contenders = contenders(node, true);
    let files = |contenders: &[Contender]| -> Result<Vec<usize>> {
        contenders.iter().map(Contender::files_in_image).collect()
    };
    // The first start creates mount targets, the quota store and the inventory's cache, so it does not count
    // as a lap.
    let fresh = files(&contenders)?;
    contenders.iter().try_for_each(|contender| contender.lap().map(drop))?;
    let first = files(&contenders)?;
    let laps = race(&contenders)?;
    let last = files(&contenders)?;

    let base = Sample::new(laps[0].iter().map(|lap| lap.whole()).collect())?;
    table.push(Row::duration("create+start+delete, plain runc", &base));
    let whole = differences(&laps[1], &laps[0], Lap::whole)?;
    table.push(
        Row::difference("with a GPU share, to plain runc", &whole)
            .target("<= +6 ms", whole.median() <= 6 * MS)
            .peer(peer_cell(&laps, Lap::whole)?),
    );
    push_cpu(table, &laps, 6 * MS)?;
    let calls: [(&str, Part); 3] = [
        ("  of it create (wrapper, mounts, prestart hook)", |lap| lap.create),
        ("  of it start", |lap| lap.start),
        ("  of it delete (wrapper)", |lap| lap.delete),
    ];
    for (what, part) in calls {
        let part_of = differences(&laps[1], &laps[0], part)?;
        table.push(Row::difference(what, &part_of).peer(peer_cell(&laps, part)?));
    }
    let added = |who: usize| (first[who] - fresh[who], last[who].abs_diff(first[who]));
    let words = |(at_first, later): (usize, usize)| format!("{at_first} + {later}");
    table.push(
        Row::plain(&format!("files in the image: first start + {LAPS} restarts"), words(added(1)))
            .runs(LAPS)
            .target("none after the first", added(1).1 == 0)
            .peer((contenders.len() > 2).then(|| words(added(2)))),
    );
    Ok(())
}

/// Adds the processor time of the same laps, which varies less than their duration.
fn push_cpu(table: &mut Table, laps: &[Vec<Lap>], target: i64) -> Result<()> {
    let cpu: Part = |lap| lap.cpu;
    let difference = differences(&laps[1], &laps[0], cpu)?;
    table.push(
        Row::difference("  its processor time, user and system", &difference)
            .target(&format!("<= {} ms", measure::difference(target)), difference.median() <= target)
            .peer(peer_cell(laps, cpu)?),
    );
    Ok(())
}

fn without_request(node: &SimulatedNode, table: &mut Table) -> Result<()> {
    let contenders = contenders(node, false);
    contenders.iter().try_for_each(|contender| contender.lap().map(drop))?;
    let laps = race(&contenders)?;
    let whole = differences(&laps[1], &laps[0], Lap::whole)?;
    table.push(
        Row::difference("without a request, to plain runc", &whole)
            .target("<= +1.5 ms", whole.median() <= MS * 3 / 2)
            .peer(peer_cell(&laps, Lap::whole)?),
    );
    push_cpu(table, &laps, MS * 3 / 2)
}
