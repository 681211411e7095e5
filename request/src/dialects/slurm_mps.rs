//! Slurm's gres `mps`: `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` in a job (slurm src/plugins/gres/mps/gres_mps.c). Memory is not
//! limited there, unless the settings take the percentage for one of memory, too.

use gpushare_inventory::DeviceMemory;

use super::{Dialect, nvidia_mps, slurm};
use crate::cards::{Cards, total};
use crate::claim::{Amount, Cap, Claim};
use crate::error::RequestError;
use crate::mps::{PERCENTAGE, PIPE};
use crate::quantity::{self, Decimal};
use crate::reading::{Reading, Said};

pub(super) static DIALECT: Dialect = Dialect { name: "slurm-mps", detects, read, owns, by_position: false };

fn detects(reading: &Reading) -> bool {
    reading.has(PERCENTAGE) && reading.has("SLURM_JOB_ID") && !slurm::has_no_gpu(reading)
}

fn owns(key: &str) -> bool {
    matches!(key, PERCENTAGE | PIPE)
}

/// Of several GPUs the percentage is the sum, by the count of one of them, and more on each than was asked for
/// (`MULTIPLE_SHARING_GRES_PJ`).
fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(first) = reading.named(PERCENTAGE).next() else { return Ok(Vec::new()) };
    let gpus = slurm::gpus(reading, cards, first)?;
    if gpus.len() > 1 {
        return Err(
            first.wrong("how the percentage is split over several GPUs is unknown: ask for mps of one GPU")
        );
    }
    let Some((said, percent)) = reading.least(PERCENTAGE, percentage)? else { return Ok(Vec::new()) };
    nvidia_mps::note_mode(reading);
    let part = slurm::part_of_task(reading, said, Decimal { numerator: percent.into(), denominator: 100 })?;
    let claim = Claim::by(said).on(&gpus, |_, gpu| {
        let memory = reading.policy.dialects.slurm_mps_memory.then(|| total(gpu)).transpose()?;
        let memory = memory.map(|memory| DeviceMemory::from_bytes(part.of(memory.bytes())));
        Ok(Amount { memory, cores: Cap::of(part.of(100)) })
    })?;
    Ok(vec![claim])
}

/// Slurm makes it of the job's count and the GPU's, and gets 0 or too much where the latter is wrong.
fn percentage(said: Said) -> Result<u8, RequestError> {
    let percent = quantity::whole(said.value).and_then(|percent| u8::try_from(percent).ok());
    percent.filter(|percent| (1..=100).contains(percent)).ok_or_else(|| {
        said.wrong("Slurm's percentage is a whole number from 1 to 100: check gres.conf Count of mps")
    })
}
