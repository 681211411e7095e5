//! KAI-Scheduler and Run:ai 2: the pod's annotations `gpu-fraction` or `gpu-memory`, and `GPU_PORTION` with
//! `RUNAI_NUM_OF_GPUS`, which a ConfigMap holds that the binder fills (KAI-Scheduler pkg/binder/common/gpu_access.go,
//! pkg/common/constants/constants.go). With HAMi-core, `CUDA_DEVICE_MEMORY_LIMIT` (pkg/binder/plugins/hamicore/hami_core.go).
//!
//! Run:ai counts the whole GPUs of a container in `RUNAI_NUM_OF_GPUS`, too: a whole number states no portion.

use gpushare_inventory::DeviceMemory;

use super::Dialect;
use crate::cards::{Cards, IndexMeaning, total};
use crate::claim::{Amount, Claim};
use crate::device_list::{Named, named, names_gpus};
use crate::error::RequestError;
use crate::limit;
use crate::quantity::{self, Decimal};
use crate::reading::{Reading, Said, conflict};

pub(super) static DIALECT: Dialect = Dialect { name: "kai", detects, read, owns, by_position: false };

const PORTION: &str = "GPU_PORTION";
const GPUS: &str = "RUNAI_NUM_OF_GPUS";
const LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT";
const FRACTION: &str = "gpu-fraction";
const MEMORY: &str = "gpu-memory";
const CONTAINER: &str = "gpu-fraction-container-name";
const COUNT: &str = "gpu-fraction-num-devices";

/// A container without a GPU has a count of 0.
fn detects(reading: &Reading) -> bool {
    reading.has(PORTION) || reading.named(GPUS).any(|said| said.value != "0") || is_annotated(reading)
}

fn owns(key: &str) -> bool {
    matches!(key, PORTION | GPUS | LIMIT)
}

/// Whether the pod's annotations are about this container. One of a pod's has the share: the named one, else the first,
/// which is known by its GPUs, since the others' list is `void`.
fn is_annotated(reading: &Reading) -> bool {
    let annotations = reading.container.annotations();
    let asks = annotations.contains_key(FRACTION) || annotations.contains_key(MEMORY);
    asks && match (annotations.get(CONTAINER), reading.container.name_in_pod()) {
        (Some(named), Some(name)) => named == name,
        _ => names_gpus(reading),
    }
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let asked = asked(reading)?;
    let limit = reading.least(LIMIT, limit::memory)?;
    let portion = counted(reading)?;
    let speaks = portion.map(|(said, _)| said).or(asked.map(|(said, _)| said));
    let Named::Gpus(list, gpus) = named(reading, cards, IndexMeaning::Pci)? else {
        return Err(RequestError::LimitWithoutGpu {
            by: speaks.map(|said| said.to_string()).unwrap_or_default(),
        });
    };
    let count = if asked.is_some() { counted_gpus(reading, list, gpus.len())? } else { None };
    let limit = limit.map(|(said, memory)| (said, Ask::Memory(memory)));
    let portion =
        portion.filter(|(_, portion)| *portion < WHOLE).map(|(said, portion)| (said, Ask::Portion(portion)));
    // The portion is rounded, so what was asked for counts before it, but not what may only lower it.
    let may_only_lower = asked.is_some_and(|(said, _)| !said.trust.grants(reading.policy));
    let exact = [limit, asked, portion.filter(|_| may_only_lower)];
    // With the word that makes it KAI's, since Koordinator may read the same list otherwise.
    let by = speaks.map_or_else(|| list.to_string(), |speaks| format!("{list} beside {speaks}"));
    let mut claims = vec![Claim { by, ..Claim::by(list).naming(&gpus) }];
    for (said, ask) in [limit, asked, portion].into_iter().flatten() {
        let is_pods = asked.is_some_and(|(asked, _)| asked.key == said.key);
        let claim = Claim { count: count.filter(|_| is_pods), ..Claim::by(said) };
        claims.push(claim.stating(&gpus, |_, gpu| {
            let total = total(gpu)?;
            let memory = ask.of(total);
            // Of those that are nearly the same the least counts: the binder's limit, unless the pod lowers it.
            let exact = exact.iter().flatten().map(|(_, ask)| ask.of(total));
            let is_near =
                |other: &DeviceMemory| other.bytes().abs_diff(memory.bytes()) <= total.bytes() / 100;
            let nearly = exact.filter(is_near).min();
            Ok(Amount { memory: Some(nearly.unwrap_or(memory)), cores: None })
        })?);
    }
    Ok(claims)
}

/// The portion that counts: of each of its names what stands afterwards, and of these the least.
fn counted<'a>(reading: &Reading<'a>) -> Result<Option<(Said<'a>, u64)>, RequestError> {
    let names = [reading.least(PORTION, portion)?, reading.least(GPUS, portion)?];
    reading.least_of(names.into_iter().flatten().map(|(said, _)| said), portion)
}

/// What one source wants of each GPU.
#[derive(Clone, Copy)]
enum Ask {
    Memory(DeviceMemory),
    /// In parts of [`WHOLE`].
    Portion(u64),
}

const WHOLE: u64 = 1_000_000_000;

impl Ask {
    fn of(self, total: DeviceMemory) -> DeviceMemory {
        match self {
            Self::Memory(memory) => memory,
            Self::Portion(parts) => {
                DeviceMemory::from_bytes(Decimal { numerator: parts, denominator: WHOLE }.of(total.bytes()))
            }
        }
    }
}

/// What the pod's annotations say.
fn asked<'a>(reading: &Reading<'a>) -> Result<Option<(Said<'a>, Ask)>, RequestError> {
    if !is_annotated(reading) {
        return Ok(None);
    }
    match (reading.annotation(FRACTION), reading.annotation(MEMORY)) {
        (Some(fraction), Some(memory)) => Err(conflict(fraction, memory)),
        (Some(said), None) => Ok(Some((said, Ask::Portion(portion(said)?)))),
        (None, Some(said)) => Ok(Some((said, Ask::Memory(limit::mebibytes(said)?)))),
        (None, None) => Ok(None),
    }
}

fn portion(said: Said) -> Result<u64, RequestError> {
    if said.value.is_empty() {
        return Err(said.wrong("the binder has not filled the ConfigMap: see its log, and delete the pod"));
    }
    match quantity::decimal(said.value).map(|decimal| decimal.of(WHOLE)) {
        Some(parts @ 1..WHOLE) => Ok(parts),
        Some(parts) if said.key == GPUS && parts > 0 && parts % WHOLE == 0 => Ok(WHOLE),
        _ => {
            Err(said
                .wrong("a portion is above 0 and below 1, as 0.5; ask for a whole GPU by nvidia.com/gpu: 1"))
        }
    }
}

/// The number of GPUs that the annotations ask for, where they say one; more of them are refused.
fn counted_gpus(reading: &Reading, list: Said, gpus: usize) -> Result<Option<usize>, RequestError> {
    let Some(said) = reading.annotation(COUNT) else { return Ok(None) };
    let count =
        quantity::whole(said.value).and_then(|count| usize::try_from(count).ok()).filter(|count| *count > 0);
    let count = count.ok_or_else(|| said.wrong("a number of GPUs is a whole number from 1"))?;
    if gpus > count { Err(conflict(said, list)) } else { Ok(Some(count)) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cards::four;
    use crate::{Ceilings, Container, MemoryAsk, Policy};

    #[test]
    fn a_container_whose_gpu_cdi_put_in_is_the_one_that_the_annotation_speaks_of() {
        let container = Container::from_json(&json!({
            "annotations": {"io.kubernetes.cri.container-type": "container", MEMORY: "2000"},
            "process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
            "linux": {"devices": [{"path": "/dev/nvidia0", "major": 195, "minor": 0}]},
        }));
        let request = crate::read(&container, &Policy::default(), &four()).unwrap().unwrap();
        assert_eq!(request.memory, MemoryAsk::Bytes(DeviceMemory::from_bytes(2000 << 20)));
        assert_eq!(request.dialects, ["kai"]);
    }

    #[test]
    fn an_annotation_that_may_grant_nothing_raises_what_the_binder_wrote_by_no_rounding() {
        let env = Ceilings { env: Some("100%".parse().unwrap()), ..Ceilings::default() };
        let policy = Policy { strict: true, ceilings: env, ..Policy::default() };
        for (mebibytes, variable, granted) in [
            ("3150", "CUDA_DEVICE_MEMORY_LIMIT=3072m", 3072),
            ("3000", "CUDA_DEVICE_MEMORY_LIMIT=3072m", 3000),
            ("3150", "GPU_PORTION=0.2", 3072),
            ("3000", "GPU_PORTION=0.2", 3000),
        ] {
            let container = Container::from_json(&json!({
                "annotations": {"io.kubernetes.cri.container-type": "container", MEMORY: mebibytes},
                "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0", variable]},
            }));
            let request = crate::read(&container, &policy, &four()).unwrap().unwrap();
            let granted = MemoryAsk::Bytes(DeviceMemory::from_bytes(granted << 20));
            assert_eq!(request.memory, granted, "{mebibytes} {variable}");
        }
    }
}
