//! KAI-Scheduler and Run:ai 2: the pod's annotation `gpu-fraction` or `gpu-memory`, and `GPU_PORTION` with
//! `RUNAI_NUM_OF_GPUS`, which the binder writes into a ConfigMap (KAI-Scheduler
//! pkg/binder/common/gpu_access.go, pkg/common/constants/constants.go). With HAMi-core also
//! `CUDA_DEVICE_MEMORY_LIMIT` (pkg/binder/plugins/hamicore/hami_core.go).
//!
//! The binder rounds the portion to two digits. If the annotation agrees with it, the annotation's exact
//! amount counts. Run:ai also counts a container's whole GPUs in `RUNAI_NUM_OF_GPUS`, so a whole number there
//! states no portion.

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::dialect::{Dialect, Speech};
use crate::limit;
use crate::quantity::{self, Decimal};
use crate::sources::list::{limited, names_gpus, names_particular_gpus};
use gpushare_claims::{
    Amount, Claim, IndexMeaning, Library, NodeGpus, Rank, RequestError, Word, Words, conflict, total,
};

pub(super) static DIALECT: Dialect = Dialect {
    name: "kai",
    speech,
    read,
    owns,
    over: &["hami"],
    library: Some(Library { folders: &["/opt/gpu-fractioning/lib"], files: &[], owner: None }),
    near_misses: &[(
        // KAI-Scheduler issue 257.
        "nvidia.com/gpu.memory",
        "is a label of nodes and no request: annotate gpu-memory in MiB, or gpushare.io/memory",
    )],
    ..Dialect::PLAIN
};

const PORTION: &str = "GPU_PORTION";
const GPUS: &str = "RUNAI_NUM_OF_GPUS";
const LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT";
const FRACTION: &str = "gpu-fraction";
const MEMORY: &str = "gpu-memory";
const CONTAINER: &str = "gpu-fraction-container-name";
const COUNT: &str = "gpu-fraction-num-devices";
/// The namespaces of the schedulers' reservation pods. Such a pod holds a GPU for the scheduler without using
/// it.
const RESERVATIONS: [&str; 2] = ["kai-resource-reservation", "runai-reservation"];
/// The number of bytes that a reservation pod gets. It only queries the driver for the GPU's UUID.
const RESERVED: u64 = 1 << 20;

fn speech(words: &Words) -> Speech {
    // `RUNAI_NUM_OF_GPUS` is 0 in a container without a GPU.
    let is_filled = words.has(PORTION) || words.named(GPUS).any(|word| word.value != "0");
    let is_annotated = words.annotation(FRACTION).is_some() || words.annotation(MEMORY).is_some();
    match is_annotated.then(|| whose(words)) {
        _ if is_reservation(words) => Speech::asking(names_gpus(words)),
        Some(Whose::This) => Speech::Asks,
        _ if is_filled => Speech::Asks,
        Some(Whose::Another | Whose::Unknown) => Speech::Spares,
        None => Speech::Silent,
    }
}

/// The container of the pod that has the share which the annotations ask for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    This,
    Another,
    Unknown,
}

fn owns(key: &str) -> bool {
    matches!(key, PORTION | GPUS | LIMIT)
}

/// Only one container of a pod has the share: the one that an annotation names, else the first. The bundle
/// does not show which is first. The list of GPUs identifies it, because the other containers' list is `void`
/// or comes from the image.
fn whose(words: &Words) -> Whose {
    // An annotation that is less trusted than the amount's cannot give the share to another container.
    let asked =
        [FRACTION, MEMORY].into_iter().filter_map(|key| words.annotation(key)).map(|word| word.rank).max();
    let named = words.annotation(CONTAINER).filter(|named| Some(named.rank) >= asked);
    match (named, words.container.name_in_pod()) {
        (Some(named), Some(name)) if named.value == name => Whose::This,
        (Some(_), Some(_)) => Whose::Another,
        _ if names_particular_gpus(words) => Whose::This,
        _ => Whose::Unknown,
    }
}

fn is_reservation(words: &Words) -> bool {
    words.container.pod_namespace().is_some_and(|namespace| RESERVATIONS.contains(&namespace))
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let asked = asked(words)?;
    if speech(words) == Speech::Spares {
        // The share may belong to this container, so it limits what the container gets by other words.
        return asked.map(|(word, ask)| asked_claim(word, ask, None, node)).into_iter().collect();
    }
    let portions = limit::each(words.named(PORTION).chain(words.named(GPUS)), portion)?;
    let Some(first) = portions.first().map(|(word, _)| *word).or(asked.map(|(word, _)| word)) else {
        return Ok(reservation(words));
    };
    let (list, gpus) = limited(words, node, IndexMeaning::Pci, first)?;
    let count = asked.map(|(word, _)| count(words, word, list, gpus.len())).transpose()?;
    let exact = |total: DeviceMemory| asked.map(|(_, ask)| ask.of(total));
    let mut claims = Vec::new();
    for word in words.named(LIMIT) {
        let limit = limit::memory(word)?;
        let memory =
            |_: usize, gpu: &Gpu| Ok(Amount::memory(near(limit, &portions, exact(total(gpu)?), gpu)?));
        claims.push(Claim::by(word).on(&node.all(), memory)?);
    }
    let limits = claims.clone();
    if let Some((word, ask)) = asked {
        claims.push(asked_claim(word, ask, count, node)?);
    }
    let may_grant = asked.is_some_and(|(word, _)| words.policy.authority(word.rank).is_some());
    for (word, parts) in portions.iter().filter(|(_, parts)| *parts < WHOLE) {
        let memory = |_: usize, gpu: &Gpu| {
            let limits = limits.iter().filter_map(|claim| claim.amount_on(Some(gpu.uuid)).memory?.bytes());
            let exact = Exact { asked: exact(total(gpu)?), may_grant, limit: limits.min() };
            exact.portion(*word, *parts, gpu)
        };
        claims.push(Claim::by(*word).on(&node.all(), memory)?);
    }
    Ok(claims)
}

fn asked_claim(word: Word, ask: Ask, count: Option<usize>, node: NodeGpus) -> Result<Claim, RequestError> {
    let claim = Claim::by(word).on(&node.all(), |_, gpu| Ok(Amount::memory(ask.of(total(gpu)?))))?;
    Ok(Claim { count, ..claim })
}

/// The exact amounts that a rounded portion may stand for.
struct Exact {
    asked: Option<DeviceMemory>,
    /// Whether the annotation with the amount may grant, not only lower.
    may_grant: bool,
    /// The smallest of HAMi-core's limits.
    limit: Option<DeviceMemory>,
}

impl Exact {
    /// The amount of a portion: a known exact amount that rounds to it, else the portion of the GPU.
    fn portion(&self, word: Word, parts: u64, gpu: &Gpu) -> Result<Amount, RequestError> {
        let total = total(gpu)?;
        let rounded = part(total, parts);
        let is_near = |exact: &DeviceMemory| is_near(*exact, rounded, total);
        let asked = self.asked.filter(is_near);
        let asked = asked.map(|asked| if self.may_grant { asked } else { asked.min(rounded) });
        match asked.into_iter().chain(self.limit.filter(is_near)).min() {
            Some(exact) => Ok(Amount::memory(exact)),
            None if parts == 0 => Err(word.wrong(
                "the binder has rounded the portion to nothing: pass the pod's annotation gpu-memory to the runtime, which \
                 says it exactly",
            )),
            None => Ok(Amount::memory(rounded)),
        }
    }
}

fn reservation(words: &Words) -> Vec<Claim> {
    let namespace = words.container.pod_namespace().unwrap_or_default();
    let word = Word { key: "namespace", value: namespace, rank: Rank::Granted, is_variable: false };
    let claim = Claim::by(word).each(Amount::memory(DeviceMemory::from_bytes(RESERVED)));
    vec![claim.noting([format!("{word} reserves a GPU towards the scheduler: it gets the least share")])]
}

/// HAMi-core's limit on one GPU. The binder computes it from the rounded portion. If it exceeds the portion
/// or the annotation's amount by no more than rounding explains, it is lowered to that.
fn near(
    limit: DeviceMemory,
    portions: &[(Word, u64)],
    asked: Option<DeviceMemory>,
    gpu: &Gpu,
) -> Result<DeviceMemory, RequestError> {
    let total = total(gpu)?;
    let parts = portions.iter().map(|(_, parts)| *parts).filter(|parts| (1..WHOLE).contains(parts)).min();
    // Rounded up, because the binder may have rounded to whole MiB.
    let rounded = parts.map(|parts| up(part(total, parts)));
    let bounds = rounded.into_iter().chain(asked).filter(|bound| is_near(limit, *bound, total));
    Ok(bounds.chain([limit]).min().unwrap_or(limit))
}

/// Whether the two differ by at most a hundredth of the GPU's memory. This covers rounding to hundredths and
/// the binder's own notion of the GPU's size.
fn is_near(exact: DeviceMemory, rounded: DeviceMemory, total: DeviceMemory) -> bool {
    exact.bytes().abs_diff(rounded.bytes()) <= total.bytes() / 100
}

fn part(total: DeviceMemory, parts: u64) -> DeviceMemory {
    Decimal { numerator: parts, denominator: WHOLE }.of_memory(total)
}

/// Rounds up to whole MiB.
fn up(memory: DeviceMemory) -> DeviceMemory {
    const MIB: u64 = 1 << 20;
    DeviceMemory::from_bytes(memory.bytes().div_ceil(MIB).saturating_mul(MIB))
}

/// The amount that an annotation asks for on each GPU.
#[derive(Clone, Copy)]
enum Ask {
    Memory(DeviceMemory),
    /// Billionths of the GPU ([`WHOLE`]).
    Portion(u64),
}

const WHOLE: u64 = 1_000_000_000;

impl Ask {
    fn of(self, total: DeviceMemory) -> DeviceMemory {
        match self {
            Self::Memory(memory) => memory,
            Self::Portion(parts) => part(total, parts),
        }
    }
}

/// The pod's annotation with the amount; `None` if another container of the pod has the share.
fn asked<'a>(words: &Words<'a>) -> Result<Option<(Word<'a>, Ask)>, RequestError> {
    match (words.annotation(FRACTION), words.annotation(MEMORY)) {
        _ if whose(words) == Whose::Another => Ok(None),
        (Some(fraction), Some(memory)) => Err(conflict(fraction, memory)),
        (Some(word), None) => Ok(Some((word, Ask::Portion(fraction(word)?)))),
        (None, Some(word)) => Ok(Some((word, Ask::Memory(limit::mebibytes(word)?)))),
        (None, None) => Ok(None),
    }
}

fn fraction(word: Word) -> Result<u64, RequestError> {
    let parts = quantity::decimal(word.value).map(|decimal| decimal.of(WHOLE));
    parts.filter(|parts| (1..WHOLE).contains(parts)).ok_or_else(|| word.wrong(NO_PORTION))
}

const NO_PORTION: &str = "a portion is above 0 and below 1, as 0.5; ask for a whole GPU by nvidia.com/gpu: 1";

/// Reads the binder's portion in units of 1/[`WHOLE`]. The binder rounds a very small portion to 0.00 and a
/// very large one to 1.00.
fn portion(word: Word) -> Result<u64, RequestError> {
    if word.value.is_empty() {
        return Err(word.wrong("the binder has not filled the ConfigMap: see its log, and delete the pod"));
    }
    let is_rounded = word.value.split_once('.').is_some_and(|(_, digits)| digits.len() == 2);
    match quantity::decimal(word.value).map(|decimal| decimal.of(WHOLE)) {
        Some(parts @ 1..WHOLE) => Ok(parts),
        Some(0) if is_rounded => Ok(0),
        Some(WHOLE) if is_rounded => Ok(WHOLE - 1),
        Some(parts) if word.key == GPUS && parts > 0 && parts % WHOLE == 0 => Ok(WHOLE),
        _ => Err(word.wrong(NO_PORTION)),
    }
}

/// The number of GPUs that the annotations ask for; 1 if they state none. Refuses a list with more GPUs.
fn count(words: &Words, asked: Word, list: Word, gpus: usize) -> Result<usize, RequestError> {
    let (word, count) = match words.annotation(COUNT) {
        Some(word) => (word, quantity::whole::<usize>(word.value).filter(|count| *count > 0)),
        None => (asked, Some(1)),
    };
    let count = count.ok_or_else(|| word.wrong("a number of GPUs is a whole number from 1"))?;
    // A list with fewer GPUs does not contradict the number: it lowers it.
    if gpus > count { Err(conflict(word, list)) } else { Ok(count.min(gpus)) }
}
