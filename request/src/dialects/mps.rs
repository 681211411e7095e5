//! Reads MPS's own limits, which several systems write: `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` by position in the
//! device list or by UUID, and `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`.

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::quantity;
use crate::sources::names::{items, selector};
use gpushare_claims::{
    Amount, Cap, Claim, DeviceSelector, IndexMeaning, NodeGpus, RequestError, Word, Words,
};

pub(crate) const PINNED: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
pub(crate) const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
pub(crate) const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// The claims of the pinned memory limits. With several GPUs, two differing texts are a conflict on every
/// node: the smallest limit of each GPU might then be neither text, but one of the two must remain in the
/// container and state what was granted.
pub(crate) fn pinned(words: &Words, node: NodeGpus, gpus: &[&Gpu]) -> Result<Vec<Claim>, RequestError> {
    if gpus.len() > 1 {
        words.one(PINNED)?;
    }
    let claim = |word: Word| {
        let limits = limits(word, node, gpus)?;
        Claim::by(word).on(gpus, |position, _| Ok(Amount::memory(limits[position])))
    };
    words.named(PINNED).map(claim).collect()
}

/// The claims of the percentages, for every GPU.
pub(crate) fn percentages(words: &Words) -> Result<Vec<Claim>, RequestError> {
    Claim::each_of(words.named(PERCENTAGE), |word| Ok(Amount::cores(percentage(word)?)))
}

/// The note for a container with MPS's pipe directory: it gets a gpushare share. The limit of each GPU in one
/// text. A GPU without a limit counts as a mistake, never as "no limit".
pub(crate) fn mode(words: &Words) -> Option<String> {
    let pipe = words.named(PIPE).next()?;
    Some(format!("{pipe}: the share's limits are gpushare's, those of MPS's daemon are not read"))
}

/// The limit of each GPU in one text. A GPU without a limit is taken for a mistake, never for "no limit".
fn limits(word: Word, node: NodeGpus, gpus: &[&Gpu]) -> Result<Vec<DeviceMemory>, RequestError> {
    let mut limits: Vec<Option<DeviceMemory>> = vec![None; gpus.len()];
    for item in items(word.value) {
        let remedy = "a limit is a position or UUID, = and memory, as 0=1G,1=512M";
        let (gpu, memory) = item.split_once('=').ok_or_else(|| word.wrong(remedy))?;
        match limits.get_mut(position(word, gpu, node, gpus)?) {
            Some(slot @ None) => *slot = Some(bytes(word, memory)?),
            Some(Some(_)) => return Err(word.wrong("two limits of one GPU: remove one of them")),
            None => {
                let count = gpus.len();
                return Err(
                    word.wrong(format!("the container has only {count} GPU(s): remove the others' limits"))
                );
            }
        }
    }
    let missing = limits.iter().filter(|limit| limit.is_none()).count();
    let all = limits.into_iter().collect::<Option<Vec<_>>>();
    all.ok_or_else(|| {
        word.wrong(format!(
            "{missing} of {} GPUs have no limit: give each its own, as 0=1G,1=512M",
            gpus.len()
        ))
    })
}

/// The GPU's position in the list; past the end for a GPU that is not in it.
fn position(word: Word, gpu: &str, node: NodeGpus, gpus: &[&Gpu]) -> Result<usize, RequestError> {
    let selector = selector(word, gpu, IndexMeaning::Pci)?;
    if let DeviceSelector::Index(position) = selector {
        return Ok(usize::try_from(position).unwrap_or(usize::MAX));
    }
    let named = node.find(word.key, &selector)?;
    Ok(gpus.iter().position(|gpu| gpu.uuid == named.uuid).unwrap_or(gpus.len()))
}

/// Reads a number with K, M or G, and optionally a B. MPS treats these as binary units.
fn bytes(word: Word, text: &str) -> Result<DeviceMemory, RequestError> {
    let number =
        text.strip_suffix(['B', 'b']).filter(|number| !number.ends_with(|c: char| c.is_ascii_digit()));
    match quantity::binary(number.unwrap_or(text)) {
        None => Err(word.wrong("memory is digits and one of K, M, G, perhaps with B, as 0=1G or 0=1000MB")),
        Some(0..=0xf_ffff) => Err(word.wrong("a limit below 1 MiB: write the unit, as 0=512M")),
        Some(bytes) => Ok(DeviceMemory::from_bytes(bytes)),
    }
}

/// Reads the percentage, rounded down to whole percent. MPS also accepts fractions.
fn percentage(word: Word) -> Result<Cap, RequestError> {
    let remedy = "a percentage is from 1 to 100";
    let decimal = quantity::decimal(word.value).ok_or_else(|| word.wrong(remedy))?;
    if decimal.numerator == 0 {
        return Err(word.wrong("0 means unlimited to MPS: write 1 to 100, or leave it out"));
    }
    let is_above = decimal.of(1_000_000_000) > 100_000_000_000;
    Cap::of(decimal.of(1)).filter(|_| !is_above).ok_or_else(|| word.wrong(remedy))
}
