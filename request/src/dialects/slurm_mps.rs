//! Slurm's gres `mps`: `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` in a job (slurm src/plugins/gres/mps/gres_mps.c).
//! It does not limit memory, unless the settings apply the percentage to memory too.

use gpushare_inventory::Gpu;

use crate::dialect::{Dialect, Speech};
use crate::dialects::mps::{PERCENTAGE, PIPE, mode};
use crate::dialects::slurm;
use crate::quantity::{self, Decimal};
use gpushare_claims::{Amount, Cap, Claim, MemoryRequest, NodeGpus, RequestError, Word, Words, total};

pub(super) static DIALECT: Dialect = Dialect {
    name: "slurm-mps",
    speech,
    read,
    owns: |key| matches!(key, PERCENTAGE | PIPE),
    over: &["nvfractions", "nvidia-mps"],
    is_mps: |_| true,
    ..Dialect::PLAIN
};

fn speech(words: &Words) -> Speech {
    Speech::asking(words.has(PERCENTAGE) && words.has("SLURM_JOB_ID") && !slurm::has_no_gpu(words))
}

/// Several GPUs are refused: Slurm then writes the sum, computed with the count of one of them, which is more
/// on each GPU than was requested (`MULTIPLE_SHARING_GRES_PJ`).
fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let whole = |word: Word| Ok(Decimal { numerator: percentage(word)?, denominator: 100 });
    let amount = |part: Decimal, gpu: &Gpu| {
        let memory = words.policy.dialects.slurm_mps_memory.then(|| total(gpu)).transpose()?;
        let memory = memory.map(|memory| MemoryRequest::Bytes(part.of_memory(memory)));
        Ok(Amount { memory, cores: Cap::of(part.of(100)) })
    };
    let several = "how the percentage is split over several GPUs is unknown: ask for mps of one GPU";
    let mut claims = slurm::claims(words, node, (PERCENTAGE, several), whole, amount)?;
    if let Some(first) = claims.first_mut() {
        first.notes.extend(mode(words));
    }
    Ok(claims)
}

/// Reads the percentage. Slurm computes it from the job's count and the GPU's count. If the GPU's count is
/// wrong, the result is 0 or too high.
fn percentage(word: Word) -> Result<u64, RequestError> {
    quantity::whole::<u64>(word.value).filter(|percent| (1..=100).contains(percent)).ok_or_else(|| {
        word.wrong("Slurm's percentage is a whole number from 1 to 100: check gres.conf Count of mps")
    })
}
