//! Volcano's first GPU sharing: `VOLCANO_GPU_ALLOCATED` beside the card's total, which nothing enforces (volcano-sh/devices
//! pkg/plugin/nvidia/const.go, server.go).
//!
//! The same keys count whole cards for `volcano.sh/gpu-number`, which has no factor.

use gpushare_inventory::DeviceMemory;

use super::Dialect;
use crate::cards::{Cards, IndexMeaning};
use crate::claim::{Amount, Claim};
use crate::device_list::limited;
use crate::error::RequestError;
use crate::quantity;
use crate::reading::{Reading, Said, conflict};

pub(super) static DIALECT: Dialect =
    Dialect { name: "volcano-legacy", detects, read, owns, by_position: false };

const ALLOCATED: &str = "VOLCANO_GPU_ALLOCATED";
const FACTOR: &str = "VOLCANO_GPU_FACTOR";
/// Later and earlier name.
const TOTALS: [&str; 2] = ["VOLCANO_GPU_MEMORY_TOTAL", "VOLCANO_GPU_TOTAL"];
/// No node has more cards, and no share so little memory.
const MOST_CARDS: u64 = 16;

fn detects(reading: &Reading) -> bool {
    reading.has(ALLOCATED) && TOTALS.into_iter().any(|total| reading.has(total))
}

fn owns(key: &str) -> bool {
    matches!(key, ALLOCATED | FACTOR) || TOTALS.contains(&key)
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some((said, allocated)) = reading.least(ALLOCATED, number)? else { return Ok(Vec::new()) };
    let (_, gpus) = limited(reading, cards, IndexMeaning::Pci, said)?;
    let claim = Claim::by(said).naming(&gpus);
    if counts_cards(reading, gpus.len()) {
        reading.note(format!(
            "{said} counts whole cards (volcano.sh/gpu-number), not MiB: no memory limit is stated"
        ));
        return Ok(vec![claim]);
    }
    for total in TOTALS {
        let Some((total, most)) = reading.least(total, number)? else { continue };
        if allocated > most {
            return Err(said.wrong(format!("more than the whole card has, {total}: ask for less")));
        }
    }
    let factor = reading.one(FACTOR)?;
    // The plugin that writes this total has multiplied already.
    if let (Some(factor), Some(total)) = (factor, reading.named(TOTALS[0]).next()) {
        return Err(conflict(factor, total));
    }
    let factor = factor.map_or(Ok(1), number)?;
    let bytes = allocated.checked_mul(factor).and_then(|mebibytes| mebibytes.checked_mul(1 << 20));
    let memory = bytes
        .map(DeviceMemory::from_bytes)
        .ok_or_else(|| said.wrong(format!("times {FACTOR} MiB is more than any GPU has: ask for less")))?;
    Ok(vec![claim.each(Amount { memory: Some(memory), cores: None })])
}

/// Whether whole cards are counted. Units of a factor are memory, however few, and a count that a pod puts beside a limit of
/// memory takes none of it away.
fn counts_cards(reading: &Reading, gpus: usize) -> bool {
    let gpus = u64::try_from(gpus).ok().filter(|gpus| *gpus <= MOST_CARDS);
    let is_count = |said| number(said).is_ok_and(|number| Some(number) == gpus);
    !reading.has(FACTOR) && reading.named(ALLOCATED).all(is_count)
}

fn number(said: Said) -> Result<u64, RequestError> {
    let number = quantity::whole(said.value).filter(|number| *number > 0);
    number.ok_or_else(|| {
        said.wrong("Volcano writes digits without a unit, and not 0: MiB, or units of its memory factor")
    })
}
