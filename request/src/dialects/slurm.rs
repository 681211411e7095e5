//! The parts common to Slurm's ways of sharing GPUs: which GPUs a step has (slurm
//! src/plugins/gres/common/gres_common.c), and which part of the step's amount a container has.
//! `SLURM_STEP_GPUS` and `SLURM_JOB_GPUS` number the node's GPUs, `CUDA_VISIBLE_DEVICES` those of the step.
//! Each task is a container and carries the amount of the whole step.
//!
//! The bundle's variables replace what srun sends. slurmstepd then writes its own over both: the GPUs and
//! amounts, and last `SLURM_GTIDS` and similar ones (slurm src/slurmd/slurmstepd, container.c, slurmstepd.c
//! and task.c).

use gpushare_inventory::Gpu;

use crate::quantity::{self, Decimal};
use crate::sources::handed;
use crate::sources::names::Gpus;
use crate::sources::names::{items, selectors};
use gpushare_claims::{Amount, Claim, DeviceSelector, IndexMeaning, NodeGpus, RequestError, Word, Words};

const STEP: &str = "SLURM_STEP_GPUS";
const JOB: &str = "SLURM_JOB_GPUS";
const LOCAL: &str = "CUDA_VISIBLE_DEVICES";
const STEP_ID: &str = "SLURM_STEP_ID";
/// Step numbers from here on denote special kinds of steps, such as a batch job's script or salloc's shell
/// (`SLURM_MAX_NORMAL_STEP_ID`).
const FIRST_KIND: u64 = 0xffff_fff0;
/// The numbers of the step's tasks on this node. slurmstepd writes it into each task.
const TASKS: &str = "SLURM_GTIDS";
/// The number of tasks on each node of the step. srun sends it.
const TASKS_OF_NODES: &str = "SLURM_STEP_TASKS_PER_NODE";
const NODE: &str = "SLURM_NODEID";

/// Whether Slurm says that the step has no GPU. Slurm before 19.05 wrote `NoDevFiles`.
pub(super) fn has_no_gpu(words: &Words) -> bool {
    words.named(LOCAL).any(|word| matches!(word.value, "NoDevFiles" | "-1"))
}

/// The step's GPUs in the node's numbering, and the word that names them; `None` if no word does.
pub(super) fn global<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Option<Gpus<'a>>, RequestError> {
    // Slurm writes one of the two. The other may be left over from the bundle, the user or the batch job.
    let keys = if is_of_job(words) { [JOB, STEP] } else { [STEP, JOB] };
    for key in keys {
        if let Some(word) = words.one(key)? {
            return Ok(Some((word, node.find_each(word.key, &listed(word)?)?)));
        }
    }
    Ok(None)
}

/// The step's GPUs, and the word that names them. `by` is the word that asks for a share, for the error.
fn gpus<'a>(words: &Words<'a>, node: NodeGpus<'a>, by: Word) -> Result<Gpus<'a>, RequestError> {
    if let Some(global) = global(words, node)? {
        return Ok(global);
    }
    let Some(word) = words.one(LOCAL)? else {
        return Err(by.wrong(
            "a share without a GPU: Slurm sets SLURM_STEP_GPUS or SLURM_JOB_GPUS, which is missing here",
        ));
    };
    let list = listed(word)?;
    let is_local = |selector: &&DeviceSelector| matches!(selector, DeviceSelector::Index(_));
    match list.iter().filter(is_local).count() {
        0 => Ok((word, node.find_each(word.key, &list)?)),
        // If every handed GPU is in the list, the order of the device nodes does not matter.
        local => match handed::gpus(words, node)? {
            Some((_, gpus)) if gpus.len() == local && local == list.len() => Ok((word, gpus)),
            _ => Err(word.wrong(
                "the index is local to the step: pass SLURM_STEP_GPUS or SLURM_JOB_GPUS, or write UUIDs",
            )),
        },
    }
}

/// Whether slurmstepd created the container for the job itself (a batch script, the shell of salloc). For a
/// step of srun it writes the step's number.
fn is_of_job(words: &Words) -> bool {
    let is_sruns = |word: Word| quantity::whole::<u64>(word.value).is_some_and(|number| number < FIRST_KIND);
    words.has(TASKS) && !words.named(STEP_ID).any(is_sruns)
}

/// The claims of a share of one GPU. One claim names the GPU; for each variable `key`, another states the
/// amount that `amount` computes from the container's part of a GPU. `whole` reads the step's part, and
/// `several` is the error's text for several GPUs.
pub(super) fn claims<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
    (key, several): (&str, &str),
    whole: impl Fn(Word) -> Result<Decimal, RequestError>,
    amount: impl Fn(Decimal, &Gpu) -> Result<Amount, RequestError>,
) -> Result<Vec<Claim>, RequestError> {
    let Some(first) = words.named(key).next() else { return Ok(Vec::new()) };
    let (by, gpus) = gpus(words, node, first)?;
    if gpus.len() > 1 {
        return Err(first.wrong(several));
    }
    let mut claims = vec![Claim::by(by).naming(&gpus)];
    for word in words.named(key) {
        let (part, note) = part_of_task(words, word, whole(word)?)?;
        claims.push(Claim::by(word).on(&node.all(), |_, gpu| amount(part, gpu))?.noting(note));
    }
    Ok(claims)
}

/// This container's part of `whole`, the part of a GPU that `by` gives the step, and a note. The step's tasks
/// on this node share it equally. Less than a percent of compute for each is an error.
fn part_of_task(words: &Words, by: Word, whole: Decimal) -> Result<(Decimal, Option<String>), RequestError> {
    let tasks = tasks(words)?;
    if tasks == 1 {
        return Ok((whole, None));
    }
    let part = Decimal { denominator: whole.denominator.saturating_mul(tasks), ..whole };
    if part.of(100) == 0 {
        return Err(by.wrong(format!(
            "the step's {tasks} tasks on this node would have less than one percent of compute each: ask for more, or \
             start fewer"
        )));
    }
    let note =
        format!("{by} is the whole step's: each of its {tasks} tasks on this node has an equal part of it");
    Ok((part, Some(note)))
}

/// The number of the step's tasks on this node, at least one. `SLURM_GTIDS` comes from Slurm itself. The list
/// of tasks per node counts only if `SLURM_GTIDS` is missing, because a bundle may have replaced the list.
/// `SLURM_TASKS_PER_NODE` is not read: a batch script is one container, no matter what its job may start.
fn tasks(words: &Words) -> Result<u64, RequestError> {
    if let Some(word) = words.one(TASKS)? {
        let is_number = |item: &str| quantity::whole::<u64>(item).is_some();
        let count = word.value.split(',').try_fold(0, |count, item| is_number(item).then_some(count + 1));
        return count.ok_or_else(|| word.wrong("Slurm's list of a step's tasks holds whole numbers, as 0,1"));
    }
    words.one(TASKS_OF_NODES)?.map_or(Ok(1), |word| tasks_of_node(words, word))
}

/// This node's entry in a list such as `2(x3),1`: two tasks on each of three nodes, and one on the fourth.
fn tasks_of_node(words: &Words, word: Word) -> Result<u64, RequestError> {
    let runs: Option<Vec<(u64, u64)>> = word.value.split(',').map(run).collect();
    let runs = runs.ok_or_else(|| word.wrong("Slurm's list of tasks is counts from 1, as 2(x3),1"))?;
    if let [(tasks, _)] = runs[..] {
        return Ok(tasks); // the same on every node
    }
    let Some(node) = words.one(NODE)? else {
        return Err(
            word.wrong("it is not said which node this is: Slurm sets SLURM_NODEID, which is missing here")
        );
    };
    let mut before: u64 =
        quantity::whole(node.value).ok_or_else(|| node.wrong("a node's number is a whole number"))?;
    for (tasks, nodes) in runs {
        match before.checked_sub(nodes) {
            Some(rest) => before = rest,
            None => return Ok(tasks),
        }
    }
    Err(node.wrong(format!("{word} names fewer nodes: pass both as Slurm set them")))
}

/// Reads a count of tasks and the number of consecutive nodes that have it.
fn run(text: &str) -> Option<(u64, u64)> {
    let count = |text| quantity::whole::<u32>(text).filter(|count| *count > 0).map(u64::from);
    match text.split_once("(x") {
        Some((tasks, nodes)) => Some((count(tasks)?, count(nodes.strip_suffix(')')?)?)),
        None => Some((count(text)?, 1)),
    }
}

fn listed(word: Word) -> Result<Vec<DeviceSelector>, RequestError> {
    let list = selectors(word, items(word.value), IndexMeaning::Pci)?;
    if list.is_empty() { Err(word.wrong("it names no GPU: write indexes or UUIDs")) } else { Ok(list) }
}
