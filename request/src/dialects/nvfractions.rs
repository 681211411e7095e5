//! KAI's NvFractions and Run:ai 3: annotations `nvidia.com/container.<container>.gpu-memory.limit`. An NRI
//! plugin turns them into `NVIDIA_GPU_MEMORY_LIMIT` and MPS's variables (kai-gpu-fractioning
//! fractiond/internal/annotations, fractiond/internal/injection).
//!
//! In that system a request is guaranteed memory, and a limit is memory that may be used. gpushare guarantees
//! the limit.

use gpushare_inventory::DeviceMemory;

use crate::dialect::{Dialect, Speech};
use crate::dialects::mps;
use crate::sources::list::named;
use crate::sources::names::Gpus;
use crate::sources::names::gpus;
use crate::{limit, quantity};
use gpushare_claims::{
    Amount, Cap, Claim, Container, IndexMeaning, NodeGpus, RequestError, Word, Words, conflict,
};

/// The dialect owns MPS's variables too, if its own words are in the bundle.
pub(super) static DIALECT: Dialect = Dialect {
    name: "nvfractions",
    speech,
    read,
    owns: |key| is_variable(key) || matches!(key, mps::PINNED | mps::PERCENTAGE | mps::PIPE),
    over: &["nvidia-mps"],
    by_position: true,
    is_mps: |words| annotations(words, &MODE).any(|word| word.value.trim() == SM_SHARING),
    ..Dialect::PLAIN
};

/// Memory limits in MiB. Early versions use the plural.
const LIMITS: [&str; 2] = ["NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_LIMITS"];
const REQUESTS: [&str; 2] = ["NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_REQUESTS"];

/// Prefixes before the container's name in annotations. KAI-Scheduler issue 1505 proposes the second and
/// third.
const PREFIXES: [&str; 3] = ["nvidia.com/container.", "nvidia.cdi.k8s.io/container.", PROPOSED];
const PROPOSED: &str = "nvidia.cdi.k8s.io/";

/// The part that follows the container's name.
const LIMIT_PARTS: [&str; 2] = ["gpu-memory.limit", "gpu-memory.limits"];
const REQUEST_PARTS: [&str; 2] = ["gpu-memory.request", "gpu-memory.requests"];
const MODE: [&str; 1] = ["gpu-compute.mode"];
/// The mode in which programs share multiprocessors under MPS.
const SM_SHARING: &str = "sm-sharing";
const PORTION: [&str; 1] = ["gpu-compute.portion"];
const DEVICES: [&str; 1] = ["gpus.devices"];
const PARTS: [&[&str]; 5] = [&LIMIT_PARTS, &REQUEST_PARTS, &MODE, &PORTION, &DEVICES];

fn speech(words: &Words) -> Speech {
    let is_memory =
        |key: &str| part(key, words.container).is_some_and(|part| part.starts_with("gpu-memory."));
    let is_annotated = || words.container.annotations().keys().any(|key| is_memory(key));
    Speech::asking(words.variables().any(|word| is_variable(word.key)) || is_annotated())
}

fn is_variable(key: &str) -> bool {
    LIMITS.contains(&key) || REQUESTS.contains(&key)
}

/// The part of the key after this container's name; `None` for another container's annotation.
fn part<'k>(key: &'k str, container: &Container) -> Option<&'k str> {
    let name = container.name_in_pod()?;
    PREFIXES.iter().find_map(|prefix| key.strip_prefix(prefix)?.strip_prefix(name)?.strip_prefix('.'))
}

fn annotations<'a>(words: &Words<'a>, parts: &'static [&'static str]) -> impl Iterator<Item = Word<'a>> {
    let is_one = |word: &Word| part(word.key, words.container).is_some_and(|part| parts.contains(&part));
    words.annotations().filter(is_one)
}

/// Refuses an unknown part that begins with `gpu`: a misspelt limit would otherwise be no limit at all. Other
/// unknown parts may belong to another container, in a pod that has a container called `container`.
fn refuse_unknown(words: &Words) -> Result<(), RequestError> {
    let is_unknown = |word: &Word| {
        let part = part(word.key, words.container).filter(|part| part.starts_with("gpu"));
        part.is_some_and(|part| !PARTS.iter().any(|names| names.contains(&part)))
    };
    let Some(word) = words.annotations().find(is_unknown) else { return Ok(()) };
    let known: Vec<&str> = PARTS.iter().map(|names| names[0]).collect();
    Err(word.wrong(format!("unknown; known are {}: correct or remove it", known.join(", "))))
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    refuse_unknown(words)?;
    let mut claims = hard(annotations(words, &LIMIT_PARTS), annotations(words, &REQUEST_PARTS), quantity)?;
    claims.extend(hard(of(words, &LIMITS), of(words, &REQUESTS), limit::mebibytes)?);
    claims.extend(portions(words)?);
    claims.extend(mps::percentages(words)?);
    let devices = devices(words, node)?;
    let listed = named(words, node, IndexMeaning::Pci)?.or_else(|| devices.clone());
    // Without a GPU there is no position to which a pinned limit could apply.
    if let Some((_, gpus)) = listed {
        claims.extend(mps::pinned(words, node, &gpus)?);
    } else if devices.is_none() {
        let by = claims.first().map(|claim| claim.by.clone()).unwrap_or_default();
        return Err(RequestError::LimitWithoutGpu { by });
    }
    claims.extend(devices.map(|(word, gpus)| Claim::by(word).naming(&gpus)));
    Ok(claims)
}

fn of<'a>(words: &Words<'a>, keys: &[&str]) -> impl Iterator<Item = Word<'a>> {
    words.variables().filter(|word| keys.contains(&word.key))
}

/// The memory claims of one channel. If only a request or only a limit is stated, it counts as both.
fn hard<'a>(
    limits: impl Iterator<Item = Word<'a>>,
    requests: impl Iterator<Item = Word<'a>>,
    parse: impl Fn(Word<'a>) -> Result<DeviceMemory, RequestError>,
) -> Result<Vec<Claim>, RequestError> {
    let (limits, requests) = (limit::each(limits, &parse)?, limit::each(requests, &parse)?);
    let mut note = None;
    let least = limits.iter().min_by_key(|(_, memory)| *memory);
    if let (Some((limit, hard)), Some((request, soft))) = (least, requests.first()) {
        if soft > hard {
            let why = format!("more than the limit of {hard}: lower it, or raise {}", limit.key);
            return Err(request.wrong(why));
        }
        let why = "there are no soft limits here, the whole limit is granted";
        note = (soft < hard).then(|| format!("{request} is less than {limit}: {why}"));
    }
    let stated = if limits.is_empty() { requests } else { limits };
    let mut claims: Vec<Claim> =
        stated.into_iter().map(|(word, memory)| Claim::by(word).each(Amount::memory(memory))).collect();
    if let Some(first) = claims.first_mut() {
        first.notes.extend(note);
    }
    Ok(claims)
}

/// Reads an annotation's memory and rounds it up to whole MiB, as the plugin does.
fn quantity(word: Word) -> Result<DeviceMemory, RequestError> {
    const MIB: u64 = 1 << 20;
    let spelt_out =
        word.value.strip_suffix('B').filter(|text| text.ends_with('i') && word.key.starts_with(PROPOSED));
    let bytes = quantity::kubernetes(spelt_out.unwrap_or(word.value));
    let bytes = bytes.ok_or_else(|| word.wrong("memory is a Kubernetes quantity, as 8Gi or 7680Mi"))?;
    let whole = bytes.div_ceil(MIB).checked_mul(MIB).filter(|_| bytes >= MIB);
    whole.map(DeviceMemory::from_bytes).ok_or_else(|| {
        word.wrong("memory is at least 1 MiB and fits into 64 bits: write it as 8Gi or 7680Mi")
    })
}

/// The compute limits. They exist only in the mode `sm-sharing`; time-slicing, the default, leaves idle time
/// to everyone.
fn portions(words: &Words) -> Result<Vec<Claim>, RequestError> {
    let mut shares = false;
    for word in annotations(words, &MODE) {
        match word.value.trim() {
            SM_SHARING => shares = true,
            "time-slicing" => {}
            _ => return Err(word.wrong("unknown mode: known are time-slicing and sm-sharing")),
        }
    }
    let claims = Claim::each_of(annotations(words, &PORTION), |word| Ok(Amount::cores(percent(word)?)))?;
    Ok(if shares { claims } else { Vec::new() })
}

/// Reads a portion of compute, rounded down to whole percent, but never to 0, which means unlimited to MPS.
fn percent(word: Word) -> Result<Cap, RequestError> {
    let decimal = quantity::decimal(word.value);
    let percent = decimal
        .filter(|part| part.numerator > 0 && part.numerator <= part.denominator)
        .map(|part| part.of(100).max(1));
    percent
        .and_then(Cap::of)
        .ok_or_else(|| word.wrong("a portion of compute is above 0 and at most 1, as 0.5"))
}

/// The GPUs that the scheduler's binder recorded.
fn devices<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Option<Gpus<'a>>, RequestError> {
    let mut all = annotations(words, &DEVICES);
    let Some(word) = all.next() else { return Ok(None) };
    if let Some(other) = all.find(|other| other.value != word.value) {
        return Err(conflict(word, other));
    }
    let gpus = gpus(word, node, IndexMeaning::Pci)?;
    Ok((!gpus.is_empty()).then_some((word, gpus)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Policy;
    use gpushare_claims::four;

    #[test]
    fn a_portion_of_compute_without_memory_is_no_request() {
        let container = Container::from_json(&json!({
            "annotations": {
                "io.kubernetes.cri.container-type": "container",
                "io.kubernetes.cri.container-name": "trainer",
                "nvidia.com/container.trainer.gpu-compute.mode": "sm-sharing",
                "nvidia.com/container.trainer.gpu-compute.portion": "0.125",
            },
            "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]},
        }));
        let request = crate::read::read(&container, &Policy::default(), &four()).unwrap().unwrap();
        assert_eq!((request.dialects.len(), request.cores), (0, None));
    }
}
