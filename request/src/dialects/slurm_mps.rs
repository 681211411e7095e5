//! Slurm's gres `mps`: `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` in a job (slurm src/plugins/gres/mps/gres_mps.c).
//! It does not limit memory, unless the settings apply the percentage to memory too.

use gpushare_inventory::DeviceMemory;

use crate::dialect::{Dialect, Speech};
use crate::dialects::mps::{PERCENTAGE, PIPE, mode};
use crate::dialects::slurm;
use crate::quantity::{self, Decimal};
use gpushare_claims::{Amount, Cap, Claim, NodeGpus, RequestError, Word, Words, total};

pub(super) static DIALECT: Dialect = Dialect {
    name: "slurm-mps",
    speech,
    read,
    owns: |key| matches!(key, PERCENTAGE | PIPE),
    over: &["nvfractions", "nvidia-mps"],
    ..Dialect::PLAIN
};

fn speech(words: &Words) -> Speech {
    Speech::asking(words.has(PERCENTAGE) && words.has("SLURM_JOB_ID") && !slurm::has_no_gpu(words))
}

/// Several GPUs are refused. Slurm then writes the sum, computed with the count of one of them, which is more
/// on each GPU than was asked for (`MULTIPLE_SHARING_GRES_PJ`).
fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(first) = words.named(PERCENTAGE).next() else { return Ok(Vec::new()) };
    let (by, gpus) = slurm::gpus(words, node, first)?;
    if gpus.len() > 1 {
        return Err(
            first.wrong("how the percentage is split over several GPUs is unknown: ask for mps of one GPU")
        );
    }
    let mut claims = vec![Claim { notes: mode(words).into_iter().collect(), ..Claim::by(by).naming(&gpus) }];
    for word in words.named(PERCENTAGE) {
        let whole = Decimal { numerator: percentage(word)?.into(), denominator: 100 };
        let (part, note) = slurm::part_of_task(words, word, whole)?;
        let claim = Claim::by(word).on(&node.all(), |_, gpu| {
            let memory = words.policy.dialects.slurm_mps_memory.then(|| total(gpu)).transpose()?;
            let memory = memory.map(|memory| DeviceMemory::from_bytes(part.of(memory.bytes())));
            let amount = memory.map(Amount::memory).unwrap_or_default();
            Ok(Amount { cores: Cap::of(part.of(100)), ..amount })
        })?;
        claims.push(Claim { notes: note.into_iter().collect(), ..claim });
    }
    Ok(claims)
}

/// Reads the percentage. Slurm computes it from the job's count and the GPU's, and gets 0 or too much where
/// the GPU's count is wrong.
fn percentage(word: Word) -> Result<u8, RequestError> {
    let percent = quantity::whole(word.value).and_then(|percent| u8::try_from(percent).ok());
    percent.filter(|percent| (1..=100).contains(percent)).ok_or_else(|| {
        word.wrong("Slurm's percentage is a whole number from 1 to 100: check gres.conf Count of mps")
    })
}
