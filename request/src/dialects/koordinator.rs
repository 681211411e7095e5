//! Koordinator: the pod's annotation `scheduling.koordinator.sh/device-allocated` (koordinator apis/extension/device_share.go),
//! and what its hook sets: minors in `NVIDIA_VISIBLE_DEVICES`, HAMi-core's limits without `_<i>` and its `LD_PRELOAD`
//! (pkg/koordlet/runtimehooks/hooks/gpu/gpu.go). Without NRI the hook does not run, and the annotation alone tells.

use gpushare_inventory::{DeviceMemory, Gpu};
use serde_json::Value;

use super::Dialect;
use crate::cards::{Cards, IndexMeaning, has_double, total};
use crate::claim::{Amount, Cap, Claim};
use crate::container::Engine;
use crate::device_list::{claimed, names_gpus};
use crate::error::RequestError;
use crate::grammar::DeviceSelector;
use crate::nvidia::DEVICES;
use crate::reading::{Reading, Said};
use crate::{limit, quantity};

pub(super) static DIALECT: Dialect = Dialect { name: "koordinator", detects, read, owns, by_position: false };

const ALLOCATED: &str = "scheduling.koordinator.sh/device-allocated";
const MEMORY: &str = "CUDA_DEVICE_MEMORY_LIMIT";
const CORES: &str = "CUDA_DEVICE_SM_LIMIT";

fn detects(reading: &Reading) -> bool {
    is_annotated(reading) || is_hooks(reading)
}

/// HAMi writes a unit and preloads by a file: bytes beside `LD_PRELOAD` are the hook's.
fn is_hooks(reading: &Reading) -> bool {
    reading.container.engine() == Engine::Cri
        && reading.named(MEMORY).any(|said| quantity::whole(said.value).is_some())
        && reading.named("LD_PRELOAD").any(|said| said.value.ends_with("/libvgpu.so"))
}

/// The annotation is the pod's, and the hook gives its GPUs to every container. Here a container whose list names none,
/// as a webhook writes for sidecars, gets none.
fn is_annotated(reading: &Reading) -> bool {
    let text = reading.container.annotations().get(ALLOCATED);
    let speaks = |text: &String| !matches!(devices(text), Some(devices) if devices.is_empty());
    text.is_some_and(speaks) && (names_gpus(reading) || !reading.has(DEVICES))
}

fn owns(key: &str) -> bool {
    matches!(key, MEMORY | CORES)
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let memory = reading.least(MEMORY, limit::memory)?;
    let memory =
        memory.map(|(said, memory)| Claim::by(said).each(Amount { memory: Some(memory), cores: None }));
    let cores = reading.least(CORES, limit::cores)?;
    let cores =
        cores.map(|(said, cores)| Claim::by(said).each(Amount { memory: None, cores: Some(cores.into()) }));
    let list = claimed(reading, cards, IndexMeaning::Minor)?.map(|(claim, _)| claim);
    let said = reading.annotation(ALLOCATED).filter(|_| is_annotated(reading));
    let allocated = said.map(|said| allocated(said, cards)).transpose()?;
    Ok([memory, cores, list, allocated].into_iter().flatten().collect())
}

/// The GPUs in the annotation; nothing where it is not of its form.
fn devices(text: &str) -> Option<Vec<Value>> {
    let json: Value = serde_json::from_str(text).ok()?;
    match json.as_object()?.get("gpu") {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(devices)) => Some(devices.clone()),
        Some(_) => None,
    }
}

fn allocated(said: Said, cards: Cards) -> Result<Claim, RequestError> {
    let remedy =
        "delete the pod, so that it is scheduled anew: this is not the scheduler's JSON with a list `gpu`";
    let devices = devices(said.value).ok_or_else(|| said.wrong(remedy))?;
    let gpus = devices.iter().map(|device| gpu(said, device, cards)).collect::<Result<Vec<_>, _>>()?;
    if has_double(&gpus) {
        return Err(said.wrong("delete the pod, so that it is scheduled anew: it names one GPU twice"));
    }
    let parts = devices.iter().map(|device| Part::of(said, device)).collect::<Result<Vec<_>, _>>()?;
    let claim = Claim::by(said);
    if parts.iter().all(|part| part.is_whole()) {
        return Ok(Claim { exclusive: true, ..claim.naming(&gpus) });
    }
    claim.on(&gpus, |position, gpu| parts[position].amount(gpu))
}

/// The GPU's UUID counts before its minor.
fn gpu<'a>(said: Said, device: &Value, cards: Cards<'a>) -> Result<&'a Gpu, RequestError> {
    let id = device.get("id").and_then(Value::as_str).filter(|id| id.starts_with("GPU-"));
    let minor = || device.get("minor").and_then(Value::as_u64).and_then(|minor| u32::try_from(minor).ok());
    let selector = match id {
        Some(id) => id.parse().ok(),
        None => minor().map(DeviceSelector::Minor),
    };
    let selector = selector.ok_or_else(|| {
        said.wrong("delete the pod, so that it is scheduled anew: a GPU has neither a UUID in id nor a minor")
    })?;
    cards.find(said.key, &selector)
}

/// What the pod has of one GPU.
struct Part {
    cores: Option<Cap>,
    /// In percent of the GPU's.
    ratio: Option<u8>,
    memory: Option<DeviceMemory>,
}

impl Part {
    fn of(said: Said, device: &Value) -> Result<Self, RequestError> {
        let percent = |name| {
            let Some(text) = resource(device, name) else { return Ok(None) };
            let percent = quantity::whole(&text).and_then(|percent| u8::try_from(percent).ok());
            let percent = percent.filter(|percent| (1..=100).contains(percent));
            percent.map(Some).ok_or_else(|| {
                said.wrong(format!("{name} is a percentage from 1 to 100: correct the pod's requests"))
            })
        };
        let memory = resource(device, "gpu-memory").map(|text| {
            let bytes = quantity::kubernetes(&text).filter(|bytes| *bytes >= 1 << 20);
            bytes.ok_or_else(|| {
                said.wrong("gpu-memory is a quantity from 1 MiB, as 8Gi: correct the pod's requests")
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

    /// The ratio is one of what the scheduler knows of the card, the memory what it counts; all of it is all there is.
    fn amount(&self, gpu: &Gpu) -> Result<Amount, RequestError> {
        let memory = match (self.ratio, self.memory) {
            (Some(100), _) => Some(total(gpu)?),
            (_, Some(memory)) => Some(memory),
            (Some(ratio), None) => Some(total(gpu)?.percent(ratio)),
            (None, None) => None,
        };
        Ok(Amount { memory, cores: self.cores })
    }
}

/// A resource's number, which is quoted or bare.
fn resource(device: &Value, name: &str) -> Option<String> {
    let value = device.get("resources")?.get(format!("koordinator.sh/{name}"))?;
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}
