//! Volcano's first GPU sharing: `VOLCANO_GPU_ALLOCATED` and the GPU's total (volcano-sh/devices
//! pkg/plugin/nvidia/const.go, server.go). Nothing in Volcano enforces it.
//!
//! For `volcano.sh/gpu-number`, which has no factor, the same keys count whole GPUs.

use gpushare_inventory::DeviceMemory;

use crate::dialect::{Dialect, Speech};
use crate::sources::list::limited;
use crate::{limit, quantity};
use gpushare_claims::{Amount, Claim, IndexMeaning, NodeGpus, RequestError, Word, Words, conflict};

pub(super) static DIALECT: Dialect = Dialect {
    name: "volcano-legacy",
    speech: |words| Speech::asking(words.has(ALLOCATED) && TOTALS.into_iter().any(|total| words.has(total))),
    read,
    owns: |key| matches!(key, ALLOCATED | FACTOR) || TOTALS.contains(&key),
    ..Dialect::PLAIN
};

const ALLOCATED: &str = "VOLCANO_GPU_ALLOCATED";
const FACTOR: &str = "VOLCANO_GPU_FACTOR";
/// The total's later and earlier name.
const TOTALS: [&str; 2] = ["VOLCANO_GPU_MEMORY_TOTAL", "VOLCANO_GPU_TOTAL"];
/// Up to this number a value may be a count of GPUs: no node has more, and no share has so few MiB.
const MOST_CARDS: u64 = 16;

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(first) = words.named(ALLOCATED).next() else { return Ok(Vec::new()) };
    let allocated = limit::each(words.named(ALLOCATED), number)?;
    let (_, gpus) = limited(words, node, IndexMeaning::Pci, first)?;
    if counts_gpus(words, &allocated, gpus.len()) {
        let note =
            format!("{first} counts whole cards (volcano.sh/gpu-number), not MiB: no memory limit is stated");
        return Ok(vec![Claim::by(first).noting([note])]);
    }
    let totals = limit::each(TOTALS.into_iter().flat_map(|total| words.named(total)), number)?;
    let factor = factor(words)?;
    let claim = |(word, allocated): (Word, u64)| {
        if let Some((total, _)) = totals.iter().find(|(_, most)| allocated > *most) {
            return Err(word.wrong(format!("more than the whole card has, {total}: ask for less")));
        }
        let bytes = allocated.checked_mul(factor).and_then(|mebibytes| mebibytes.checked_mul(1 << 20));
        let memory = bytes.map(DeviceMemory::from_bytes).ok_or_else(|| {
            word.wrong(format!("times {FACTOR} MiB is more than any GPU has: ask for less"))
        })?;
        Ok(Claim::by(word).each(Amount::memory(memory)))
    };
    allocated.into_iter().map(claim).collect()
}

/// The unit of memory in MiB. The plugin that writes the total's later name has already multiplied by the
/// factor.
fn factor(words: &Words) -> Result<u64, RequestError> {
    let factor = words.one(FACTOR)?;
    if let (Some(factor), Some(total)) = (factor, words.named(TOTALS[0]).next()) {
        return Err(conflict(factor, total));
    }
    factor.map_or(Ok(1), number)
}

/// Whether the words count whole GPUs. With a factor they count memory, no matter how small. All words must
/// be counts: a word that a pod adds must not turn off a memory limit.
fn counts_gpus(words: &Words, allocated: &[(Word, u64)], gpus: usize) -> bool {
    let gpus = u64::try_from(gpus).ok().filter(|gpus| *gpus <= MOST_CARDS);
    !words.has(FACTOR) && allocated.iter().all(|(_, number)| Some(*number) == gpus)
}

fn number(word: Word) -> Result<u64, RequestError> {
    let number = quantity::whole::<u64>(word.value).filter(|number| *number > 0);
    number.ok_or_else(|| {
        word.wrong("Volcano writes digits without a unit, and not 0: MiB, or units of its memory factor")
    })
}
