//! KAI's NvFractions and Run:ai 3: annotations `nvidia.com/container.<container>.gpu-memory.limit`, and the variables
//! `NVIDIA_GPU_MEMORY_LIMIT` and MPS's, which an NRI plugin makes of them (kai-gpu-fractioning fractiond/internal/annotations,
//! fractiond/internal/injection).
//!
//! A request is memory that is guaranteed, a limit what may be used. gpushare guarantees what may be used.

use gpushare_inventory::{DeviceMemory, Gpu};

use super::Dialect;
use crate::cards::{Cards, IndexMeaning};
use crate::claim::{Amount, Cap, Claim};
use crate::container::Container;
use crate::device_list::{claimed, items, selector};
use crate::error::RequestError;
use crate::reading::{Reading, Said, conflict};
use crate::{limit, mps, quantity};

pub(super) static DIALECT: Dialect = Dialect { name: "nvfractions", detects, read, owns, by_position: true };

/// In MiB. Early versions have the plural.
const LIMITS: [&str; 2] = ["NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_LIMITS"];
const REQUESTS: [&str; 2] = ["NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_REQUESTS"];

/// Before the container's name in annotations. The others are those that KAI-Scheduler issue 1505 proposes.
const PREFIXES: [&str; 3] = ["nvidia.com/container.", "nvidia.cdi.k8s.io/container.", PROPOSED];
const PROPOSED: &str = "nvidia.cdi.k8s.io/";

/// Behind it.
const LIMIT_PARTS: [&str; 2] = ["gpu-memory.limit", "gpu-memory.limits"];
const REQUEST_PARTS: [&str; 2] = ["gpu-memory.request", "gpu-memory.requests"];
const MODE: [&str; 1] = ["gpu-compute.mode"];
const PORTION: [&str; 1] = ["gpu-compute.portion"];
const DEVICES: [&str; 1] = ["gpus.devices"];
const PARTS: [&[&str]; 5] = [&LIMIT_PARTS, &REQUEST_PARTS, &MODE, &PORTION, &DEVICES];

fn detects(reading: &Reading) -> bool {
    let is_memory =
        |key: &str| part(key, reading.container).is_some_and(|part| part.starts_with("gpu-memory."));
    reading.variables().any(|said| is_variable(said.key))
        || reading.container.annotations().keys().any(|key| is_memory(key))
}

/// Its own variables, and what MPS's say where they stand beside them.
fn owns(key: &str) -> bool {
    is_variable(key) || matches!(key, mps::PINNED | mps::PERCENTAGE | mps::PIPE)
}

fn is_variable(key: &str) -> bool {
    LIMITS.contains(&key) || REQUESTS.contains(&key)
}

/// What an annotation of exactly this container's is about.
fn part<'k>(key: &'k str, container: &Container) -> Option<&'k str> {
    let name = container.name_in_pod()?;
    PREFIXES.iter().find_map(|prefix| key.strip_prefix(prefix)?.strip_prefix(name)?.strip_prefix('.'))
}

fn annotations<'a>(reading: &Reading<'a>, parts: &'static [&'static str]) -> impl Iterator<Item = Said<'a>> {
    let is_one = |said: &Said| part(said.key, reading.container).is_some_and(|part| parts.contains(&part));
    reading.annotations().filter(is_one)
}

/// A slip in a part would be no limit at all. What does not begin as the parts do may be another container's, of a pod that
/// has one by the name of `container`.
fn refuse_unknown(reading: &Reading) -> Result<(), RequestError> {
    let is_unknown = |said: &Said| {
        let part = part(said.key, reading.container).filter(|part| part.starts_with("gpu"));
        part.is_some_and(|part| !PARTS.iter().any(|names| names.contains(&part)))
    };
    let Some(said) = reading.annotations().find(is_unknown) else { return Ok(()) };
    let known: Vec<&str> = PARTS.iter().map(|names| names[0]).collect();
    Err(said.wrong(format!("unknown; known are {}: correct or remove it", known.join(", "))))
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    refuse_unknown(reading)?;
    let list = claimed(reading, cards, IndexMeaning::Pci)?;
    let devices = devices(reading, cards)?;
    let gpus = list.iter().chain(&devices).map(|(_, gpus)| gpus.clone()).next();
    let stated = [
        hard(reading, annotations(reading, &LIMIT_PARTS), annotations(reading, &REQUEST_PARTS), quantity)?,
        hard(reading, of(reading, &LIMITS), of(reading, &REQUESTS), limit::mebibytes)?,
    ];
    let memory = |(said, memory)| Claim::by(said).each(Amount { memory: Some(memory), cores: None });
    let caps = [portion(reading)?, reading.least(mps::PERCENTAGE, mps::percentage)?];
    let cores = |(said, cap)| Claim::by(said).each(Amount { memory: None, cores: Some(cap) });
    let pinned = pinned(reading, cards, &gpus.unwrap_or_default())?;
    let named = list.into_iter().chain(devices).map(|(claim, _)| claim);
    let memory = stated.into_iter().flatten().map(memory);
    Ok(memory.chain(named).chain(caps.into_iter().flatten().map(cores)).chain(pinned).collect())
}

fn of<'a>(reading: &Reading<'a>, keys: &[&str]) -> impl Iterator<Item = Said<'a>> {
    reading.variables().filter(|said| keys.contains(&said.key))
}

/// The hard limit of one channel; one of limit and request stands for the other.
fn hard<'a>(
    reading: &Reading<'a>,
    limits: impl Iterator<Item = Said<'a>>,
    requests: impl Iterator<Item = Said<'a>>,
    parse: impl Fn(Said<'a>) -> Result<DeviceMemory, RequestError>,
) -> Result<Option<(Said<'a>, DeviceMemory)>, RequestError> {
    let limit = reading.least_of(limits, &parse)?;
    let request = reading.least_of(requests, &parse)?;
    if let (Some((limit, hard)), Some((request, soft))) = (&limit, &request) {
        if soft > hard {
            return Err(
                request.wrong(format!("more than the limit of {hard}: lower it, or raise {}", limit.key))
            );
        }
        if soft < hard {
            reading.note(format!(
                "{request} is less than {limit}: there are no soft limits here, the whole limit is granted"
            ));
        }
    }
    Ok(limit.or(request))
}

/// An annotation's memory, rounded up to whole MiB as the plugin does.
fn quantity(said: Said) -> Result<DeviceMemory, RequestError> {
    const MIB: u64 = 1 << 20;
    let spelt_out =
        said.value.strip_suffix('B').filter(|text| text.ends_with('i') && said.key.starts_with(PROPOSED));
    let bytes = quantity::kubernetes(spelt_out.unwrap_or(said.value));
    let bytes = bytes.ok_or_else(|| said.wrong("memory is a Kubernetes quantity, as 8Gi or 7680Mi"))?;
    let whole = bytes.div_ceil(MIB).checked_mul(MIB).filter(|_| bytes >= MIB);
    whole.map(DeviceMemory::from_bytes).ok_or_else(|| {
        said.wrong("memory is at least 1 MiB and fits into 64 bits: write it as 8Gi or 7680Mi")
    })
}

/// The cap, which there is in one mode only: time slices, the default, leave idle time to whoever wants it.
fn portion<'a>(reading: &Reading<'a>) -> Result<Option<(Said<'a>, Cap)>, RequestError> {
    let mut shares = false;
    for said in annotations(reading, &MODE) {
        match said.value.trim() {
            "sm-sharing" => shares = true,
            "time-slicing" => {}
            _ => return Err(said.wrong("unknown mode: known are time-slicing and sm-sharing")),
        }
    }
    let portion = reading.least_of(annotations(reading, &PORTION), percent)?;
    Ok(portion.filter(|_| shares))
}

/// Rounded down to whole percents, but never to 0, which is unlimited to MPS.
fn percent(said: Said) -> Result<Cap, RequestError> {
    let decimal = quantity::decimal(said.value);
    let percent = decimal
        .filter(|part| part.numerator > 0 && part.numerator <= part.denominator)
        .map(|part| part.of(100).max(1));
    percent
        .and_then(Cap::of)
        .ok_or_else(|| said.wrong("a portion of compute is above 0 and at most 1, as 0.5"))
}

/// The GPUs that the scheduler's binder wrote down.
fn devices<'a>(
    reading: &Reading<'a>,
    cards: Cards<'a>,
) -> Result<Option<(Claim, Vec<&'a Gpu>)>, RequestError> {
    let mut all = annotations(reading, &DEVICES);
    let Some(said) = all.next() else { return Ok(None) };
    if let Some(other) = all.find(|other| other.value != said.value) {
        return Err(conflict(said, other));
    }
    let gpu = |item| cards.find(said.key, &selector(said, item, IndexMeaning::Pci)?);
    let gpus = items(said.value).map(gpu).collect::<Result<Vec<_>, _>>()?;
    Ok((!gpus.is_empty()).then(|| (Claim::by(said).naming(&gpus), gpus)))
}

/// MPS's limit, which the plugin makes of the hard one.
fn pinned(reading: &Reading, cards: Cards, gpus: &[&Gpu]) -> Result<Option<Claim>, RequestError> {
    let Some(first) = reading.named(mps::PINNED).next() else { return Ok(None) };
    // Without a GPU of the list's there is no position that it could limit.
    let limits = if gpus.is_empty() { None } else { mps::pinned(reading, cards, gpus)? };
    let claim = Claim::by(first).stating(gpus, |position, _| {
        Ok(Amount { memory: limits.as_ref().map(|limits| limits[position]), cores: None })
    })?;
    Ok(Some(claim))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Policy;
    use crate::cards::four;

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
        let request = crate::read(&container, &Policy::default(), &four()).unwrap().unwrap();
        assert_eq!((request.dialects.len(), request.cores), (0, None));
    }
}
