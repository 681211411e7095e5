//! Which GPUs a step of Slurm has, for both of its ways to share them (slurm src/plugins/gres/common/gres_common.c):
//! `SLURM_STEP_GPUS` and `SLURM_JOB_GPUS` count the node's GPUs, `CUDA_VISIBLE_DEVICES` those of the step.
//!
//! The bundle's variables replace what srun sends. slurmstepd then writes its own over both: the GPUs and amounts, and last
//! `SLURM_GTIDS` and the like (slurm src/slurmd/slurmstepd, container.c, slurmstepd.c and task.c).

use gpushare_inventory::Gpu;

use crate::cards::{Cards, IndexMeaning};
use crate::device_list::{found, items, nodes, selectors};
use crate::error::RequestError;
use crate::grammar::DeviceSelector;
use crate::quantity;
use crate::reading::{Reading, Said};

const STEP: &str = "SLURM_STEP_GPUS";
const JOB: &str = "SLURM_JOB_GPUS";
const LOCAL: &str = "CUDA_VISIBLE_DEVICES";
const STEP_ID: &str = "SLURM_STEP_ID";
/// From here up a step's number is a kind: of a batch job's script, of salloc's shell (`SLURM_MAX_NORMAL_STEP_ID`).
const FIRST_KIND: u64 = 0xffff_fff0;
/// The numbers of the step's tasks on this node, which slurmstepd writes into each task.
const TASKS: &str = "SLURM_GTIDS";

/// Whether the step has no GPU, in so many words: `NoDevFiles` is Slurm's before 19.05.
pub(super) fn has_no_gpu(reading: &Reading) -> bool {
    reading.variables().any(|said| said.key == LOCAL && matches!(said.value, "NoDevFiles" | "-1"))
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

fn listed(said: Said) -> Result<Vec<DeviceSelector>, RequestError> {
    let list = selectors(said, items(said.value), IndexMeaning::Pci)?;
    if list.is_empty() { Err(said.wrong("it names no GPU: write indexes or UUIDs")) } else { Ok(list) }
}
