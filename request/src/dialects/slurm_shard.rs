//! Slurm's gres `shard`: `SLURM_SHARDS_ON_NODE` (slurm src/plugins/gres/shard/gres_shard.c). The number of
//! shards of a GPU is in gres.conf and not in the environment, so gpushare's settings have to state it.

use gpushare_inventory::DeviceMemory;

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
    let (by, gpus) = slurm::gpus(words, node, first)?;
    if gpus.len() > 1 {
        return Err(
            first.wrong("how the shards are split over several GPUs is unknown: ask for shards of one GPU")
        );
    }
    let mut claims = vec![Claim::by(by).naming(&gpus)];
    for word in words.named(SHARDS) {
        let shards = shards(word, all)?;
        let whole = Decimal { numerator: shards, denominator: all };
        let (part, note) = slurm::part_of_task(words, word, whole)?;
        let claim = Claim::by(word).on(&node.all(), |_, gpu| {
            let memory = DeviceMemory::from_bytes(part.of(total(gpu)?.bytes()));
            Ok(Amount { cores: Cap::of(part.of(100).max(1)), ..Amount::memory(memory) })
        })?;
        claims.push(Claim { notes: note.into_iter().collect(), ..claim });
    }
    Ok(claims)
}

fn shards(word: Word, all: u64) -> Result<u64, RequestError> {
    let shards = quantity::whole(word.value).filter(|shards| *shards > 0);
    let shards = shards.ok_or_else(|| word.wrong("a count of shards is a whole number from 1"))?;
    match shards <= all {
        true => Ok(shards),
        false => Err(word.wrong(format!(
            "a GPU has {all} shards (dialects.slurm.shards_per_gpu): ask for fewer, or correct the setting"
        ))),
    }
}
