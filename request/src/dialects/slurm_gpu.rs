//! Slurm's gres `gpu`, whole GPUs of a step: `SLURM_STEP_GPUS` and `SLURM_JOB_GPUS`. They do not ask for a
//! share. They limit which GPUs other words may choose: gpushare's keys may state the amount, but Slurm
//! chooses the GPU.

use crate::dialect::{Dialect, Speech};
use crate::dialects::slurm;
use gpushare_claims::{Claim, NodeGpus, RequestError, Words};

pub(super) static DIALECT: Dialect = Dialect { name: "slurm-gpu", speech, read, ..Dialect::PLAIN };

fn speech(words: &Words) -> Speech {
    match words.has("SLURM_JOB_ID") && !slurm::has_no_gpu(words) {
        true => Speech::Bounds,
        false => Speech::Silent,
    }
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let global = slurm::global(words, node)?;
    Ok(global.map(|(word, gpus)| Claim::by(word).naming(&gpus)).into_iter().collect())
}
