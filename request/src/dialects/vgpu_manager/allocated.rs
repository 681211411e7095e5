//! Reads the note of vgpu-manager's scheduler or plugin on the pod: `CONTAINER[INDEX_UUID_CORES_MIB,…];…`
//! (vgpu-manager pkg/device/types.go).

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::quantity;
use crate::sources::names;
use gpushare_claims::{Amount, Cap, Claim, MemoryRequest, NodeGpus, RequestError, Word, Words, has_double};

/// The plugin's annotation with what it gave, and the scheduler's with what it planned.
const KEYS: [&str; 2] = ["nvidia.com/real-allocated", "nvidia.com/pre-allocated"];

/// The entries of this container, `INDEX_UUID_CORES_MIB,…` and the closing bracket. The plan counts only if
/// the plugin's annotation has no entry of the same rank.
pub(super) fn entries<'a>(words: &Words<'a>) -> Vec<(Word<'a>, &'a str)> {
    let name = words.container.name_in_pod();
    let ours = |entry: &'a str| entry.trim().strip_prefix(name?)?.strip_prefix('[');
    let mut found: Vec<(Word, &str)> = Vec::new();
    for word in KEYS.into_iter().filter_map(|key| words.annotation(key)) {
        let is_new = found.iter().all(|(before, _)| before.rank != word.rank);
        let entries = word.value.split(';').filter_map(ours).filter(|entry| is_new && *entry != "]");
        found.extend(entries.map(|entry| (word, entry)));
    }
    found
}

/// One claim for each entry; the smallest amount counts.
pub(super) fn claims(words: &Words, node: NodeGpus) -> Result<Vec<Claim>, RequestError> {
    entries(words).into_iter().map(|(word, entry)| claim(word, entry, node)).collect()
}

fn claim(word: Word, entry: &str, node: NodeGpus) -> Result<Claim, RequestError> {
    let remedy = "delete the pod, so that it is scheduled anew: an entry is CONTAINER[INDEX_UUID_CORES_MIB,…], of at most 100 cores";
    let parts = entry.strip_suffix(']').ok_or_else(|| word.wrong(remedy))?;
    let mut gpus: Vec<&Gpu> = Vec::new();
    let mut amounts = Vec::new();
    for part in parts.split(',').map(str::trim) {
        let (uuid, amount) = amount(part).ok_or_else(|| word.wrong(remedy))?;
        gpus.push(names::gpu(word, uuid, node)?);
        amounts.push(amount);
    }
    if has_double(&gpus) {
        return Err(word.wrong("delete the pod, so that it is scheduled anew: it names one GPU twice"));
    }
    Claim::by(word).naming(&gpus).on(&gpus, |position, _| Ok(amounts[position]))
}

/// Reads one GPU's part of an entry. 0 cores or 0 MiB mean that none was requested.
fn amount(part: &str) -> Option<(&str, Amount)> {
    let [index, uuid, cores, mib] = part.split('_').collect::<Vec<_>>()[..] else { return None };
    quantity::whole::<u64>(index)?;
    let cores = match quantity::whole(cores)? {
        0 => None,
        percent => Some(Cap::of(percent)?),
    };
    let bytes = quantity::whole::<u64>(mib)?.checked_mul(1 << 20)?;
    let memory = (bytes > 0).then(|| MemoryRequest::Bytes(DeviceMemory::from_bytes(bytes)));
    Some((uuid, Amount { memory, cores }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_0_states_nothing() {
        let (cores, memory) = (Cap::of(30), Amount::memory(DeviceMemory::from_bytes(3000 << 20)));
        assert_eq!(amount("0_GPU-a_30_3000"), Some(("GPU-a", Amount { cores, ..memory })));
        assert_eq!(amount("0_GPU-a_0_3000"), Some(("GPU-a", memory)));
        assert_eq!(amount("0_GPU-a_30_0"), Some(("GPU-a", Amount { memory: None, cores })));
    }
}
