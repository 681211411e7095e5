//! Koordinator: the pod's annotation `scheduling.koordinator.sh/device-allocated` (koordinator
//! apis/extension/device_share.go), and the settings of its hook: minors in `NVIDIA_VISIBLE_DEVICES`,
//! HAMi-core's limits without `_<i>`, and HAMi-core's `LD_PRELOAD`
//! (pkg/koordlet/runtimehooks/hooks/gpu/gpu.go). Without NRI the hook does not run, and the bundle has only
//! the annotation.
//!
//! Annotation and variables describe the whole pod and appear in each of its containers, so the pod holds the
//! share.

use gpushare_inventory::{DeviceMemory, Gpu};
use serde_json::Value;

use crate::dialect::{Dialect, Speech};
use crate::dialects::hami;
use crate::sources::list::{limited, names_gpus};
use crate::sources::names::DEVICES;
use crate::{limit, quantity};
use gpushare_claims::{
    Amount, Cap, Claim, DeviceSelector, Engine, IndexMeaning, Library, MemoryRequest, NodeGpus, RequestError,
    Scope, Word, Words, has_double, total,
};

pub(super) static DIALECT: Dialect = Dialect {
    name: "koordinator",
    speech,
    read,
    owns,
    over: &["kai", "hami"],
    numbers: |_| IndexMeaning::Minor,
    library: Some(Library { folders: &[], files: &["libvgpu.so"], owner: Some(hami::OWNER) }),
    ..Dialect::PLAIN
};

const ALLOCATED: &str = "scheduling.koordinator.sh/device-allocated";
const MEMORY: &str = "CUDA_DEVICE_MEMORY_LIMIT";
const CORES: &str = "CUDA_DEVICE_SM_LIMIT";

/// Koordinator's hook gives the annotation's GPUs to every container of the pod. Here a container whose list
/// names no GPU, as a webhook writes it for sidecars, gets none from the annotation. The pod's share limits
/// what it gets by other words.
fn speech(words: &Words) -> Speech {
    let wants = || names_gpus(words) || !words.has(DEVICES);
    match is_annotated(words) {
        _ if is_hooks(words) => Speech::Asks,
        true if wants() => Speech::Asks,
        true => Speech::Bounds,
        false => Speech::Silent,
    }
}

/// Whether Koordinator's hook wrote the limits. The hook writes bytes and `LD_PRELOAD`, while HAMi writes a
/// unit and preloads through a file.
fn is_hooks(words: &Words) -> bool {
    words.container.engine() == Engine::Cri
        && words.named(MEMORY).any(|word| quantity::whole::<u64>(word.value).is_some())
        && words.named("LD_PRELOAD").any(|word| word.value.ends_with("/libvgpu.so"))
}

/// Whether the annotation names GPUs. Malformed JSON counts too, so that [`read`] refuses it.
fn is_annotated(words: &Words) -> bool {
    let text = words.container.annotations().get(ALLOCATED);
    text.is_some_and(|text| !matches!(devices(text), Some(devices) if devices.is_empty()))
}

fn owns(key: &str) -> bool {
    matches!(key, MEMORY | CORES)
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let mut claims = Claim::each_of(words.named(MEMORY), |word| Ok(Amount::memory(limit::memory(word)?)))?;
    claims.extend(Claim::each_of(words.named(CORES), |word| Ok(Amount::cores(limit::cores(word)?.into())))?);
    match words.annotation(ALLOCATED).filter(|_| is_annotated(words)) {
        Some(word) => claims.push(allocated(word, node)?),
        // The hook's limits need a GPU.
        None => {
            let limit = words.named(MEMORY).next();
            limit.map(|limit| limited(words, node, IndexMeaning::Minor, limit)).transpose()?;
        }
    }
    let scope = words.container.sandbox().map(|_| Scope::Pod);
    Ok(claims.into_iter().map(|claim| Claim { scope, ..claim }).collect())
}

/// The GPUs in the annotation; `None` if the JSON does not have the expected form.
fn devices(text: &str) -> Option<Vec<Value>> {
    let json: Value = serde_json::from_str(text).ok()?;
    match json.as_object()?.get("gpu") {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(devices)) => Some(devices.clone()),
        Some(_) => None,
    }
}

fn allocated(word: Word, node: NodeGpus) -> Result<Claim, RequestError> {
    let remedy =
        "delete the pod, so that it is scheduled anew: this is not the scheduler's JSON with a list `gpu`";
    let devices = devices(word.value).ok_or_else(|| word.wrong(remedy))?;
    let gpus = devices.iter().map(|device| gpu(word, device, node)).collect::<Result<Vec<_>, _>>()?;
    if has_double(&gpus) {
        return Err(word.wrong("delete the pod, so that it is scheduled anew: it names one GPU twice"));
    }
    let parts = devices.iter().map(|device| Part::of(word, device)).collect::<Result<Vec<_>, _>>()?;
    let claim = Claim::by(word).naming(&gpus);
    if parts.iter().all(Part::is_whole) {
        return Ok(claim.exclusive());
    }
    claim.on(&gpus, |position, gpu| parts[position].amount(gpu))
}

/// The GPU of an entry. Its UUID takes precedence over its minor.
fn gpu<'a>(word: Word, device: &Value, node: NodeGpus<'a>) -> Result<&'a Gpu, RequestError> {
    let minor = || device["minor"].as_u64().and_then(|minor| u32::try_from(minor).ok());
    let selector = match device["id"].as_str().filter(|id| id.starts_with("GPU-")) {
        Some(id) => id.parse().ok(),
        None => minor().map(DeviceSelector::Minor),
    };
    let selector = selector.ok_or_else(|| {
        word.wrong("delete the pod, so that it is scheduled anew: a GPU has neither a UUID in id nor a minor")
    })?;
    node.find(word.key, &selector)
}

/// The pod's share of one GPU.
struct Part {
    cores: Option<Cap>,
    /// Percent of the GPU's memory.
    ratio: Option<u8>,
    memory: Option<DeviceMemory>,
}

impl Part {
    fn of(word: Word, device: &Value) -> Result<Self, RequestError> {
        let percent = |name| {
            let Some(text) = resource(device, name) else { return Ok(None) };
            let percent = quantity::whole::<u8>(&text).filter(|percent| (1..=100).contains(percent));
            percent.map(Some).ok_or_else(|| {
                word.wrong(format!("{name} is a percentage from 1 to 100: correct the pod's requests"))
            })
        };
        let memory = resource(device, "gpu-memory").map(|text| {
            let bytes = quantity::kubernetes(&text).filter(|bytes| *bytes >= 1 << 20);
            bytes.ok_or_else(|| {
                word.wrong("gpu-memory is a quantity from 1 MiB, as 8Gi: correct the pod's requests")
            })
        });
        Ok(Self {
            cores: percent("gpu-core")?.and_then(|percent| Cap::of(percent.into())),
            ratio: percent("gpu-memory-ratio")?,
            memory: memory.transpose()?.map(DeviceMemory::from_bytes),
        })
    }

    fn is_whole(&self) -> bool {
        self.ratio == Some(100) && self.cores.is_none_or(|cores| cores == Cap::Unlimited)
    }

    /// The amount on this GPU. The scheduler counted `memory` itself, so it takes precedence over `ratio`;
    /// but a ratio of 100 is all of the GPU's memory.
    fn amount(&self, gpu: &Gpu) -> Result<Amount, RequestError> {
        let memory = match (self.ratio, self.memory) {
            (Some(100), _) => Some(total(gpu)?),
            (_, Some(memory)) => Some(memory),
            (Some(ratio), None) => Some(total(gpu)?.percent(ratio)),
            (None, None) => None,
        };
        Ok(Amount { memory: memory.map(MemoryRequest::Bytes), cores: self.cores })
    }
}

/// A resource's number as text; it may be quoted or bare in the JSON.
fn resource(device: &Value, name: &str) -> Option<String> {
    let value = device.get("resources")?.get(format!("koordinator.sh/{name}"))?;
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}
