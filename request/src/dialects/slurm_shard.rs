//! Slurm's gres `shard`: `SLURM_SHARDS_ON_NODE` (slurm src/plugins/gres/shard/gres_shard.c). How many shards a GPU has stands
//! in gres.conf and not in the environment, so the settings say it here.

use super::{Dialect, slurm};
use crate::cards::{Cards, total};
use crate::claim::{Amount, Cap, Claim};
use crate::error::RequestError;
use crate::quantity::{self, Decimal};
use crate::reading::{Reading, Said};

pub(super) static DIALECT: Dialect = Dialect { name: "slurm-shard", detects, read, owns, by_position: false };

const SHARDS: &str = "SLURM_SHARDS_ON_NODE";

fn detects(reading: &Reading) -> bool {
    reading.has(SHARDS) && !slurm::has_no_gpu(reading)
}

fn owns(key: &str) -> bool {
    key == SHARDS
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some((said, shards)) = reading.least(SHARDS, shards)? else { return Ok(Vec::new()) };
    let Some(all) = reading.policy.dialects.slurm_shards_per_gpu else {
        return Err(said.wrong(
            "how many shards a GPU has is not set: have the administrator set dialects.slurm.shards_per_gpu",
        ));
    };
    let gpus = slurm::gpus(reading, cards, said)?;
    let all = u64::from(all);
    if gpus.len() > 1 {
        return Err(
            said.wrong("how the shards are split over several GPUs is unknown: ask for shards of one GPU")
        );
    }
    if shards > all {
        return Err(said.wrong(format!(
            "a GPU has {all} shards (dialects.slurm.shards_per_gpu): ask for fewer, or correct the setting"
        )));
    }
    let part = slurm::part_of_task(reading, said, Decimal { numerator: shards, denominator: all })?;
    let claim = Claim::by(said).on(&gpus, |_, gpu| {
        let memory = gpushare_inventory::DeviceMemory::from_bytes(part.of(total(gpu)?.bytes()));
        Ok(Amount { memory: Some(memory), cores: Cap::of(part.of(100).max(1)) })
    })?;
    Ok(vec![claim])
}

fn shards(said: Said) -> Result<u64, RequestError> {
    let shards = quantity::whole(said.value).filter(|shards| *shards > 0);
    shards.ok_or_else(|| said.wrong("a count of shards is a whole number from 1"))
}
