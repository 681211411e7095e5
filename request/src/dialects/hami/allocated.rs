//! Reads the note of HAMi's or Volcano's scheduler on the pod: `UUID,TYPE,MEMORY,PERCENT:` for each GPU, `;`
//! after each container (HAMi pkg/device/devices.go; Volcano pkg/scheduler/api/devices/nvidia/vgpu).
//!
//! The entries follow the order of the pod's containers, and a bundle does not show its container's place. An
//! entry belongs to this container if it is the only one with exactly the container's GPUs. Otherwise the
//! note is a limit: no container of the pod has a GPU outside all entries, or more of a GPU than the largest
//! entry. `hami.io/vgpu-devices-to-allocate` is not read: it is emptied before a container starts.

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::quantity;
use crate::sources::names;
use gpushare_claims::{Amount, Cap, Claim, MemoryRequest, NodeGpus, RequestError, Word, Words, contains};

/// HAMi's annotation; its memory is in MiB.
const HAMI: &str = "hami.io/vgpu-devices-allocated";
/// Volcano's annotation. Its memory is not read: the unit is only in the scheduler's settings.
const VOLCANO: &str = "volcano.sh/vgpu-ids-new";
const REMEDY: &str =
    "an entry is UUID,TYPE,MEMORY,PERCENT with memory above 0 and 0 to 100 percent: delete the pod";

/// Whether the bundle has such a note. Reads only the bundle.
pub(super) fn is_noted(words: &Words) -> bool {
    words.annotation(HAMI).is_some() || words.annotation(VOLCANO).is_some()
}

/// One container's share of one GPU.
struct Part<'a> {
    gpu: &'a Gpu,
    amount: Amount,
}

/// The claims of the annotations for this container. `gpus` are the GPUs that other words give it.
pub(super) fn claims(words: &Words, gpus: &[&Gpu], node: NodeGpus) -> Result<Vec<Claim>, RequestError> {
    let notes = [HAMI, VOLCANO].into_iter().filter_map(|key| words.annotation(key));
    notes.filter_map(|word| claim(word, gpus, node).transpose()).collect()
}

fn claim(word: Word, gpus: &[&Gpu], node: NodeGpus) -> Result<Option<Claim>, RequestError> {
    let entries = word.value.split(';').filter(|entry| parts_of(entry).next().is_some());
    let entries = entries.map(|entry| parts(word, entry, node)).collect::<Result<Vec<_>, _>>()?;
    let is_own =
        |entry: &&Vec<Part>| entry.len() == gpus.len() && entry.iter().all(|part| contains(gpus, part.gpu));
    let own: Vec<&Vec<Part>> = entries.iter().filter(is_own).collect();
    let (entry, is_told): (Vec<&Part>, bool) = match own[..] {
        [own] => (own.iter().collect(), true),
        _ => (entries.iter().flatten().collect(), false),
    };
    if entry.is_empty() {
        return Ok(None);
    }
    let mut named: Vec<&Gpu> =
        gpus.iter().copied().filter(|gpu| entry.iter().any(|part| part.gpu.uuid == gpu.uuid)).collect();
    named.extend(entry.iter().map(|part| part.gpu).filter(|gpu| !contains(gpus, gpu)));
    let largest = |gpu: &Gpu| {
        let of_gpu = entry.iter().filter(|part| part.gpu.uuid == gpu.uuid).map(|part| part.amount);
        of_gpu.reduce(larger).unwrap_or_default()
    };
    let claim = Claim::by(word).naming(&named).on(&named, |_, gpu| Ok(largest(gpu)))?;
    Ok(Some(if is_told { claim } else { claim.bounding() }))
}

/// The larger of two containers' amounts. There is no limit if one of them has none.
fn larger(first: Amount, second: Amount) -> Amount {
    let bytes = |amount: Amount| amount.memory.and_then(|memory| memory.bytes());
    let memory = first.memory.zip(second.memory);
    Amount {
        memory: memory.map(|(one, other)| if bytes(first) >= bytes(second) { one } else { other }),
        cores: first.cores.zip(second.cores).map(|(one, other)| one.max(other)),
    }
}

/// Splits an entry into its parts, one for each GPU.
fn parts_of(entry: &str) -> impl Iterator<Item = &str> {
    entry.split(':').map(str::trim).filter(|part| !part.is_empty())
}

fn parts<'a>(word: Word, entry: &str, node: NodeGpus<'a>) -> Result<Vec<Part<'a>>, RequestError> {
    let part = |text: &str| {
        let (uuid, amount) = amount(word.key, text).ok_or_else(|| word.wrong(REMEDY))?;
        Ok(Part { gpu: names::gpu(word, uuid, node)?, amount })
    };
    parts_of(entry).map(part).collect()
}

fn amount<'a>(key: &str, part: &'a str) -> Option<(&'a str, Amount)> {
    let [uuid, _, memory, percent] = part.split(',').collect::<Vec<_>>()[..] else { return None };
    let (uuid, _instance) = uuid.split_once('[').unwrap_or((uuid, "")); // of MIG
    let bytes = quantity::whole::<u64>(memory).filter(|memory| *memory > 0)?.checked_mul(1 << 20)?;
    let cores = match quantity::whole(percent)? {
        0 => Cap::Unlimited,
        percent => Cap::of(percent)?,
    };
    let memory = (key == HAMI).then_some(MemoryRequest::Bytes(DeviceMemory::from_bytes(bytes)));
    Some((uuid, Amount { memory, cores: Some(cores) }))
}
