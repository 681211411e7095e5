//! Slurm's gres `shard`: `SLURM_SHARDS_ON_NODE` (slurm src/plugins/gres/shard/gres_shard.c). The number of
//! shards of a GPU is in gres.conf and not in the environment, so gpushare's settings have to state it.

use gpushare_inventory::Gpu;

use crate::dialect::{Dialect, Speech};
use crate::dialects::slurm;
use crate::quantity::{self, Decimal};
use gpushare_claims::{Amount, Cap, Claim, NodeGpus, RequestError, Word, Words, total};

pub(super) static DIALECT: Dialect = Dialect {
    name: "slurm-shard",
    speech: |words| Speech::asking(words.has(SHARDS) && !slurm::has_no_gpu(words)),
    read,
    owns: |key| key == SHARDS,
    ..Dialect::PLAIN
};

const SHARDS: &str = "SLURM_SHARDS_ON_NODE";

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(first) = words.named(SHARDS).next() else { return Ok(Vec::new()) };
    let Some(all) = words.policy.dialects.slurm_shards_per_gpu.map(u64::from) else {
        return Err(first.wrong(
            "how many shards a GPU has is not set: have the administrator set dialects.slurm.shards_per_gpu",
        ));
    };
    let whole = |word: Word| Ok(Decimal { numerator: shards(word, all)?, denominator: all });
    let amount = |part: Decimal, gpu: &Gpu| {
        let memory = part.of_memory(total(gpu)?);
        Ok(Amount { cores: Cap::of(part.of(100).max(1)), ..Amount::memory(memory) })
    };
    let several = "how the shards are split over several GPUs is unknown: ask for shards of one GPU";
    slurm::claims(words, node, (SHARDS, several), whole, amount)
}

fn shards(word: Word, all: u64) -> Result<u64, RequestError> {
    let shards = quantity::whole::<u64>(word.value).filter(|shards| *shards > 0);
    let shards = shards.ok_or_else(|| word.wrong("a count of shards is a whole number from 1"))?;
    match shards <= all {
        true => Ok(shards),
        false => Err(word.wrong(format!(
            "a GPU has {all} shards (dialects.slurm.shards_per_gpu): ask for fewer, or correct the setting"
        ))),
    }
}
