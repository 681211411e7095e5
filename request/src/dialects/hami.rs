//! HAMi and Volcano's vGPU: `CUDA_DEVICE_MEMORY_LIMIT[_<i>]` and `CUDA_DEVICE_SM_LIMIT[_<i>]`, by position in
//! the device list (HAMi pkg/device-plugin/nvidiadevice; HAMi-core
//! src/multiprocess/multiprocess_memory_limit.c).
//!
//! HAMi-core treats 0, or a value that it cannot read, as "no limit"; here that is an error. HAMi-core also
//! reads the image's file `/overrideEnv`, which is not read here.

mod allocated;

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::dialect::{Dialect, Off, Speech, Switch, is_go_true};
use crate::sources::list::{limited, refuse_order};
use crate::{limit, quantity};
use gpushare_claims::{
    Amount, Cap, Claim, IndexMeaning, Library, MemoryRequest, NodeGpus, Owner, RequestError, Word, Words,
};

pub(super) static DIALECT: Dialect = Dialect {
    name: "hami",
    speech,
    read,
    owns,
    by_position: true,
    switches: &SWITCHES,
    library: Some(Library { folders: &[], files: &["libvgpu.so"], owner: Some(OWNER) }),
    ..Dialect::PLAIN
};

/// The place where HAMi's plugin mounts its library. Koordinator uses the same library.
pub(super) const OWNER: Owner = Owner {
    limit: "CUDA_DEVICE_MEMORY_LIMIT",
    library: "/usr/local/vgpu/libvgpu.so",
    folder: "/usr/local/vgpu",
};

/// The switches of HAMi and Volcano (HAMi pkg/device-plugin/nvidiadevice/nvinternal/plugin/server.go;
/// volcano-vgpu-device-plugin pkg/plugin/server.go).
const SWITCHES: [Switch; 3] = [
    Switch {
        key: "CUDA_DISABLE_CONTROL",
        is_on: |value, words| is_go_true(value) || is_volcanos(words),
        turns_off: Off::Limits,
    },
    Switch {
        key: "GPU_CORE_UTILIZATION_POLICY",
        is_on: |value, _| value.eq_ignore_ascii_case("disable"),
        turns_off: Off::Compute,
    },
    Switch { key: "CUDA_OVERSUBSCRIBE", is_on: |value, _| is_go_true(value), turns_off: Off::Hardness },
];

const MEMORY: &str = "CUDA_DEVICE_MEMORY_LIMIT";
/// The plugin writes 0 if no cores were requested (HAMi issue 636), so 0 means no limit.
const CORES: &str = "CUDA_DEVICE_SM_LIMIT";
const CACHE: &str = "CUDA_DEVICE_MEMORY_SHARED_CACHE";

/// Whether Volcano's fork of HAMi wrote the bundle, judged by the path of its cache. The fork treats any
/// value of the switch as on.
fn is_volcanos(words: &Words) -> bool {
    words.container.named(CACHE).any(|(_, value)| value.starts_with("/tmp/vgpu/"))
}

/// The scheduler's note alone is only a limit: it lists what the pod's containers have, but not which of them
/// this one is.
fn speech(words: &Words) -> Speech {
    match limits(words).next() {
        Some(_) => Speech::Asks,
        None if allocated::is_noted(words) => Speech::Bounds,
        None => Speech::Silent,
    }
}

/// The limits, and the path of the cache that HAMi's library reads.
pub(super) fn owns(key: &str) -> bool {
    is_limit(key, MEMORY) || is_limit(key, CORES) || key == CACHE
}

fn limits<'a>(words: &Words<'a>) -> impl Iterator<Item = Word<'a>> {
    words.variables().filter(|word| is_limit(word.key, MEMORY) || is_limit(word.key, CORES))
}

/// Whether `key` is `name`, alone or with a position.
fn is_limit(key: &str, name: &str) -> bool {
    key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || position(rest).is_some())
}

fn position(rest: &str) -> Option<usize> {
    quantity::whole(rest.strip_prefix('_')?)
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(first) = limits(words).next() else { return allocated::claims(words, &[], node) };
    let (list, gpus) = limited(words, node, IndexMeaning::Pci, first)?;
    let all: Vec<Word> = limits(words).collect();
    let beyond = all.iter().find(|word| {
        let position = [MEMORY, CORES].iter().find_map(|name| position(word.key.strip_prefix(name)?));
        position.is_some_and(|position| position >= gpus.len())
    });
    if let Some(word) = beyond {
        return Err(word.wrong(format!("{} names only {} GPU(s): remove it", list.key, gpus.len())));
    }
    let mut claims = memory_claims(words, &all, &gpus)?;
    limit::refuse_half(&claims, first, gpus.len(), MEMORY)?;
    claims.extend(compute_claims(&all, &gpus)?);
    refuse_order(&claims, (list, first), &gpus)?;
    claims.extend(allocated::claims(words, &gpus, node)?);
    Ok(claims)
}

/// One claim for each memory limit. The key without a position applies to the GPUs that have no limit of
/// their own.
fn memory_claims(words: &Words, all: &[Word], gpus: &[&Gpu]) -> Result<Vec<Claim>, RequestError> {
    let stated = all.iter().copied().filter(|word| is_limit(word.key, MEMORY));
    let stated = limit::each(stated, |word| memory(words, word))?;
    let of = |place: usize| format!("{MEMORY}_{place}");
    let has_own = |place: usize| stated.iter().any(|(word, limit)| word.key == of(place) && limit.is_some());
    let claim = |(word, memory): &(Word, Option<DeviceMemory>)| {
        let is_its = |place: usize| word.key == of(place) || word.key == MEMORY && !has_own(place);
        let amount = Amount { memory: memory.map(MemoryRequest::Bytes), cores: None };
        Claim::by(*word).on_each(at(gpus, is_its), amount)
    };
    Ok(stated.iter().map(claim).collect())
}

/// The GPUs at the places for which `is_its` is true.
fn at<'a>(gpus: &[&'a Gpu], is_its: impl Fn(usize) -> bool) -> impl Iterator<Item = &'a Gpu> {
    gpus.iter().enumerate().filter(move |(place, _)| is_its(*place)).map(|(_, gpu)| *gpu)
}

/// One claim for each compute limit. The plugin writes only the key without a position. A pod must not raise
/// that limit with a position, so the plain key also applies to a GPU whose own limits are all higher.
fn compute_claims(all: &[Word], gpus: &[&Gpu]) -> Result<Vec<Claim>, RequestError> {
    let caps = all.iter().copied().filter(|word| is_limit(word.key, CORES));
    let caps = limit::each(caps, limit::cores_or_all)?;
    let of = |place: usize| format!("{CORES}_{place}");
    let claim = |(word, cap): &(Word, Cap)| {
        let is_least = |place| caps.iter().all(|(other, own)| other.key != of(place) || cap < own);
        let is_its = |place| word.key == of(place) || word.key == CORES && is_least(place);
        Claim::by(*word).on_each(at(gpus, is_its), Amount::cores(*cap))
    };
    Ok(caps.iter().map(claim).collect())
}

/// Reads a memory limit; `None` if the node treats 0 as unstated.
fn memory(words: &Words, word: Word) -> Result<Option<DeviceMemory>, RequestError> {
    match quantity::binary(word.value) {
        Some(0) if words.policy.dialects.hami_zero_unstated => Ok(None),
        _ => limit::memory_or(word, ZERO).map(Some),
    }
}

const ZERO: &str = "0 states no limit: write the limit, as 3000m (or see dialects.hami.zero)";
