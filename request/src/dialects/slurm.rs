//! What both of Slurm's ways to share GPUs have in common. Which GPUs a step has (slurm
//! src/plugins/gres/common/gres_common.c): `SLURM_STEP_GPUS` and `SLURM_JOB_GPUS` count the node's GPUs,
//! `CUDA_VISIBLE_DEVICES` those of the step. And which part of the step's amount a container has: each task is a container
//! and carries the amount of the whole step.
//!
//! The bundle's variables replace what srun sends. slurmstepd then writes its own over both: the GPUs and amounts, and last
//! `SLURM_GTIDS` and the like (slurm src/slurmd/slurmstepd, container.c, slurmstepd.c and task.c).

use gpushare_inventory::Gpu;

use crate::cards::{Cards, IndexMeaning};
use crate::device_list::{found, items, nodes, selectors};
use crate::error::RequestError;
use crate::grammar::DeviceSelector;
use crate::quantity::{self, Decimal};
use crate::reading::{Reading, Said};

const STEP: &str = "SLURM_STEP_GPUS";
const JOB: &str = "SLURM_JOB_GPUS";
const LOCAL: &str = "CUDA_VISIBLE_DEVICES";
const STEP_ID: &str = "SLURM_STEP_ID";
/// From here up a step's number is a kind: of a batch job's script, of salloc's shell (`SLURM_MAX_NORMAL_STEP_ID`).
const FIRST_KIND: u64 = 0xffff_fff0;
/// The numbers of the step's tasks on this node, which slurmstepd writes into each task.
const TASKS: &str = "SLURM_GTIDS";
/// How many tasks each node of the step has, which srun sends.
const TASKS_OF_NODES: &str = "SLURM_STEP_TASKS_PER_NODE";
const NODE: &str = "SLURM_NODEID";

/// Whether the step has no GPU, in so many words: `NoDevFiles` is Slurm's before 19.05.
pub(super) fn has_no_gpu(reading: &Reading) -> bool {
    reading.named(LOCAL).any(|said| matches!(said.value, "NoDevFiles" | "-1"))
}

/// The step's GPUs; `by` is what makes a request of them.
pub(super) fn gpus<'a>(
    reading: &Reading<'a>,
    cards: Cards<'a>,
    by: Said,
) -> Result<Vec<&'a Gpu>, RequestError> {
    // Slurm writes one of both and leaves the other as the bundle, the user or the batch job has it.
    let global = if is_of_job(reading) { [JOB, STEP] } else { [STEP, JOB] };
    for key in global {
        if let Some(said) = reading.one(key)? {
            return found(cards, said, &listed(said)?);
        }
    }
    let Some(said) = reading.one(LOCAL)? else {
        return Err(by.wrong(
            "a share without a GPU: Slurm sets SLURM_STEP_GPUS or SLURM_JOB_GPUS, which is missing here",
        ));
    };
    let list = listed(said)?;
    let is_local = |selector: &&DeviceSelector| matches!(selector, DeviceSelector::Index(_));
    match list.iter().filter(is_local).count() {
        0 => found(cards, said, &list),
        // Only where the step has every GPU that it sees does the order of the nodes not matter.
        local => match nodes(reading, cards)? {
            Some((_, gpus)) if gpus.len() == local && local == list.len() => Ok(gpus),
            _ => Err(said.wrong(
                "the index is local to the step: pass SLURM_STEP_GPUS or SLURM_JOB_GPUS, or write UUIDs",
            )),
        },
    }
}

/// Whether slurmstepd made the container for the job itself (a batch script, the shell of salloc) and not for a step of srun,
/// whose number it writes.
fn is_of_job(reading: &Reading) -> bool {
    let is_sruns = |said: Said| quantity::whole(said.value).is_some_and(|number| number < FIRST_KIND);
    reading.has(TASKS) && !reading.named(STEP_ID).any(is_sruns)
}

/// The part of a GPU that this container has of the `whole` that `by` gives the step: the step's tasks on this node share it
/// equally.
///
/// # Errors
/// When the number of tasks cannot be read, or less than a percent of compute is left for each.
pub(super) fn part_of_task(reading: &Reading, by: Said, whole: Decimal) -> Result<Decimal, RequestError> {
    let tasks = tasks(reading)?;
    if tasks == 1 {
        return Ok(whole);
    }
    let part = Decimal { denominator: whole.denominator.saturating_mul(tasks), ..whole };
    if part.of(100) == 0 {
        return Err(by.wrong(format!(
            "the step's {tasks} tasks on this node would have less than one percent of compute each: ask for more, or \
             start fewer"
        )));
    }
    reading.note(format!(
        "{by} is the whole step's: each of its {tasks} tasks on this node has an equal part of it"
    ));
    Ok(part)
}

/// How many tasks the step has on this node, at least one. `SLURM_GTIDS` is Slurm's own; only where it was taken away does
/// the list count, which a bundle may have replaced. `SLURM_TASKS_PER_NODE` says nothing here: a batch script is one
/// container, whatever its job may start.
fn tasks(reading: &Reading) -> Result<u64, RequestError> {
    if let Some(said) = reading.one(TASKS)? {
        let is_number = |item: &str| quantity::whole(item).is_some();
        let count = said.value.split(',').try_fold(0, |count, item| is_number(item).then_some(count + 1));
        return count.ok_or_else(|| said.wrong("Slurm's list of a step's tasks holds whole numbers, as 0,1"));
    }
    reading.one(TASKS_OF_NODES)?.map_or(Ok(1), |said| tasks_of_node(reading, said))
}

/// This node's entry of a list as `2(x3),1`: two tasks on each of three nodes, and one on the fourth.
fn tasks_of_node(reading: &Reading, said: Said) -> Result<u64, RequestError> {
    let runs: Option<Vec<(u64, u64)>> = said.value.split(',').map(run).collect();
    let runs = runs.ok_or_else(|| said.wrong("Slurm's list of tasks is counts from 1, as 2(x3),1"))?;
    if let [(tasks, _)] = runs[..] {
        return Ok(tasks); // the same on every node
    }
    let Some(node) = reading.one(NODE)? else {
        return Err(
            said.wrong("it is not said which node this is: Slurm sets SLURM_NODEID, which is missing here")
        );
    };
    let mut before =
        quantity::whole(node.value).ok_or_else(|| node.wrong("a node's number is a whole number"))?;
    for (tasks, nodes) in runs {
        match before.checked_sub(nodes) {
            Some(rest) => before = rest,
            None => return Ok(tasks),
        }
    }
    Err(node.wrong(format!("{said} names fewer nodes: pass both as Slurm set them")))
}

/// A count of tasks, and how many nodes in a row have it.
fn run(text: &str) -> Option<(u64, u64)> {
    let count = |text| quantity::whole(text).filter(|count| (1..=u64::from(u32::MAX)).contains(count));
    match text.split_once("(x") {
        Some((tasks, nodes)) => Some((count(tasks)?, count(nodes.strip_suffix(')')?)?)),
        None => Some((count(text)?, 1)),
    }
}

fn listed(said: Said) -> Result<Vec<DeviceSelector>, RequestError> {
    let list = selectors(said, items(said.value), IndexMeaning::Pci)?;
    if list.is_empty() { Err(said.wrong("it names no GPU: write indexes or UUIDs")) } else { Ok(list) }
}
