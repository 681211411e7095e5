//! KAI-Scheduler and Run:ai 2: the pod's annotations `gpu-fraction` or `gpu-memory`, and `GPU_PORTION` with
//! `RUNAI_NUM_OF_GPUS`, which a ConfigMap holds that the binder fills (KAI-Scheduler pkg/binder/common/gpu_access.go,
//! pkg/common/constants/constants.go). With HAMi-core, `CUDA_DEVICE_MEMORY_LIMIT` (pkg/binder/plugins/hamicore/hami_core.go).
//!
//! The binder rounds the portion to two digits: what it was made of, the annotation, is what counts where both agree.
//! Run:ai counts the whole GPUs of a container in `RUNAI_NUM_OF_GPUS`, too: a whole number states no portion.

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
/// The namespaces of the pods that hold a GPU towards the scheduler, and use none of it.
const RESERVATIONS: [&str; 2] = ["kai-resource-reservation", "runai-reservation"];
/// What such a pod gets: it asks the driver for the GPU's UUID.
const RESERVED: u64 = 1 << 20;

fn speech(words: &Words) -> Speech {
    // A container without a GPU has a count of 0.
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

/// Which container of the pod has the share that the annotations ask for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    This,
    Another,
    Unknown,
}

fn owns(key: &str) -> bool {
    matches!(key, PORTION | GPUS | LIMIT)
}

/// One container of a pod has the share: the named one, else the first, which is known by its GPUs, since the others' list is
/// `void`, or the image's.
fn whose(words: &Words) -> Whose {
    // Who is believed less than the amount cannot take it from this container.
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
        // The share that may be this container's bounds what it gets by other words.
        return asked.map(|(word, ask)| asked_claim(word, ask, None, node)).into_iter().collect();
    }
    let portions: Vec<(Word, u64)> = words
        .named(PORTION)
        .chain(words.named(GPUS))
        .map(|word| Ok((word, portion(word)?)))
        .collect::<Result<_, RequestError>>()?;
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

/// What a rounded portion was made of, as far as it is told.
struct Exact {
    asked: Option<DeviceMemory>,
    /// Whether who asked may grant, and not only lower.
    may_grant: bool,
    /// HAMi-core's limit.
    limit: Option<DeviceMemory>,
}

impl Exact {
    /// What a portion comes to: the exact amount that it is the rounding of, where one is told.
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
    vec![claim.noting(format!("{word} reserves a GPU towards the scheduler: it gets the least share"))]
}

/// HAMi-core's limit, which is made of the rounded portion: where it is more than that, or than what was asked for, by no
/// more than the rounding, it is no more.
fn near(
    limit: DeviceMemory,
    portions: &[(Word, u64)],
    asked: Option<DeviceMemory>,
    gpu: &Gpu,
) -> Result<DeviceMemory, RequestError> {
    let total = total(gpu)?;
    let parts = portions.iter().map(|(_, parts)| *parts).filter(|parts| (1..WHOLE).contains(parts)).min();
    // Of whole MiB the last one may be the binder's.
    let rounded = parts.map(|parts| up(part(total, parts)));
    let bounds = rounded.into_iter().chain(asked).filter(|bound| is_near(limit, *bound, total));
    Ok(bounds.chain([limit]).min().unwrap_or(limit))
}

/// Whether the two differ by no more than rounding to hundredths, and the binder's own size of the card, explain.
fn is_near(exact: DeviceMemory, rounded: DeviceMemory, total: DeviceMemory) -> bool {
    exact.bytes().abs_diff(rounded.bytes()) <= total.bytes() / 100
}

fn part(total: DeviceMemory, parts: u64) -> DeviceMemory {
    DeviceMemory::from_bytes(Decimal { numerator: parts, denominator: WHOLE }.of(total.bytes()))
}

/// Rounded up to whole MiB.
fn up(memory: DeviceMemory) -> DeviceMemory {
    const MIB: u64 = 1 << 20;
    DeviceMemory::from_bytes(memory.bytes().div_ceil(MIB).saturating_mul(MIB))
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
            Self::Portion(parts) => part(total, parts),
        }
    }
}

/// What the pod's annotations say.
fn asked<'a>(words: &Words<'a>) -> Result<Option<(Word<'a>, Ask)>, RequestError> {
    let annotations = (words.annotation(FRACTION), words.annotation(MEMORY));
    if whose(words) == Whose::Another {
        return Ok(None);
    }
    match annotations {
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

/// The binder's portion; 0.00 and 1.00 are what it rounds a very small and a very large one to.
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

/// The number of GPUs that the annotations ask for, which is 1 where they say none; more of them are refused.
fn count(words: &Words, asked: Word, list: Word, gpus: usize) -> Result<usize, RequestError> {
    let (word, count) = match words.annotation(COUNT) {
        Some(word) => (word, quantity::whole(word.value)),
        None => (asked, Some(1)),
    };
    let count = count.and_then(|count| usize::try_from(count).ok()).filter(|count| *count > 0);
    let count = count.ok_or_else(|| word.wrong("a number of GPUs is a whole number from 1"))?;
    // Fewer are no contradiction: the list lowers it.
    if gpus > count { Err(conflict(word, list)) } else { Ok(count.min(gpus)) }
}
