//! The words of Alibaba's cGPU, which several systems write: how much of a card, and that cGPU be off (lvmxh/cgpu README;
//! gpushare-device-plugin pkg/gpu/nvidia/const.go).

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::cards::{Cards, IndexMeaning};
use crate::claim::Cap;
use crate::device_list;
use crate::error::RequestError;
use crate::quantity::{self, Decimal};
use crate::reading::{Reading, Said};

pub(crate) const OFF: &str = "CGPU_DISABLE";
pub(crate) const INDEX: &str = "ALIYUN_COM_GPU_MEM_IDX";
/// The cards that are sliced.
pub(crate) const SLICED: &str = "ALIYUN_COM_GPU_VISIBLE_DEVICES";
pub(crate) const PART: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
pub(crate) const OF: &str = "ALIYUN_COM_GPU_MEM_DEV";
const UNIT: &str = "ALIYUN_COM_GPU_MEM_UNIT";
const PERCENT: &str = "GPU_UTIL_PER_DEVICE";

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// What the two units of the device plugin are in bytes.
pub(crate) const UNITS: [u64; 2] = [GIB, MIB];

/// Whether `key` is one of cGPU's own.
pub(crate) fn owns(key: &str) -> bool {
    key.starts_with("ALIYUN_COM_GPU_") || key == PERCENT
}

/// How a number names a GPU: the device plugin, which alone writes the index, writes minors; whoever calls docker means what
/// docker means.
pub(crate) fn meaning(reading: &Reading) -> IndexMeaning {
    if reading.has(INDEX) { reading.policy.dialects.aliyun_index } else { IndexMeaning::Pci }
}

/// The GPUs of a list, each once.
pub(crate) fn listed<'a>(
    cards: Cards<'a>,
    meaning: IndexMeaning,
    said: Said,
) -> Result<Vec<&'a Gpu>, RequestError> {
    if device_list::word(said.value) == Some("all") {
        return Ok(cards.all());
    }
    let mut gpus: Vec<&Gpu> = Vec::new();
    for item in device_list::items(said.value) {
        let gpu = cards.find(said.key, &device_list::selector(said, item, meaning)?)?;
        if !gpus.iter().any(|other| other.uuid == gpu.uuid) {
            gpus.push(gpu);
        }
    }
    if gpus.is_empty() {
        Err(said.wrong("names no GPU: write indexes or UUIDs, or remove it"))
    } else {
        Ok(gpus)
    }
}

/// So many parts of a card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ratio<'a> {
    /// The parts that the container gets, for messages.
    pub by: Said<'a>,
    pub part: u64,
    /// Those that the card has, for messages.
    pub dev: Said<'a>,
    pub of: u64,
    /// What a part is said to be, in bytes.
    pub unit: Option<u64>,
}

impl<'a> Ratio<'a> {
    /// What the variables say; `None` where they say nothing.
    pub fn read(reading: &Reading<'a>) -> Result<Option<Self>, RequestError> {
        let part = reading.least(PART, parts)?;
        let dev = reading.one(OF)?;
        let of = dev.map(parts).transpose()?;
        let unit = reading.one(UNIT)?.map(unit).transpose()?;
        match (part, dev.zip(of)) {
            (None, None) => Ok(None),
            (Some((by, part)), Some((dev, of))) if part <= of => Ok(Some(Self { by, part, dev, of, unit })),
            (Some((by, _)), Some((dev, _))) => {
                Err(by.wrong(format!("more than the whole card has, {dev}: ask for less")))
            }
            (Some((by, _)), None) => {
                Err(by.wrong(format!("set {OF} to the card's size in the same unit, too")))
            }
            (None, Some((dev, _))) => Err(
                dev.wrong(format!("without {PART} cGPU would be off: set that to the container's part, too"))
            ),
        }
    }

    /// The part of a card with this much memory.
    pub fn of(&self, total: DeviceMemory) -> DeviceMemory {
        let part = Decimal { numerator: self.part, denominator: self.of };
        DeviceMemory::from_bytes(part.of(total.bytes()))
    }
}

fn parts(said: Said) -> Result<u64, RequestError> {
    let parts = quantity::whole(said.value).filter(|parts| *parts > 0);
    parts.ok_or_else(|| said.wrong("a count of GiB or MiB is digits without a unit, and not 0"))
}

/// GB is not taken for GiB: of the two the smaller one never gives too much.
fn unit(said: Said) -> Result<u64, RequestError> {
    match said.value {
        "GiB" => Ok(GIB),
        "MiB" => Ok(MIB),
        "GB" => Ok(1_000_000_000),
        "MB" => Ok(1_000_000),
        _ => Err(said.wrong("known units are GiB, MiB, GB and MB")),
    }
}

/// The share of compute.
pub(crate) fn cap(reading: &Reading) -> Result<Option<Cap>, RequestError> {
    let percent = |said: Said| {
        let cap = quantity::whole(said.value).and_then(Cap::of);
        cap.ok_or_else(|| {
            said.wrong("a percentage is a whole number from 1 to 100; to state none, remove it")
        })
    };
    Ok(reading.least(PERCENT, percent)?.map(|(_, cap)| cap))
}
