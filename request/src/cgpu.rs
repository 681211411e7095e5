//! The words of Alibaba's cGPU, which several systems write: which card, how much of it, and that cGPU be off (lvmxh/cgpu
//! README; gpushare-device-plugin pkg/gpu/nvidia/const.go).

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::cards::{Cards, IndexMeaning, total};
use crate::claim::Cap;
use crate::device_list;
use crate::error::RequestError;
use crate::grammar::DeviceSelector;
use crate::quantity::{self, Decimal};
use crate::reading::{Reading, Said, conflict};

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
const UNITS: [u64; 2] = [GIB, MIB];

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

/// The GPU that the plugin chose; none where the container is not the plugin's.
pub(crate) fn index<'a>(
    reading: &Reading<'a>,
    cards: Cards<'a>,
) -> Result<Option<(Said<'a>, &'a Gpu)>, RequestError> {
    let Some(said) = reading.one(INDEX)? else { return Ok(None) };
    if said.value == "-1" {
        return Err(said.wrong(
            "the device plugin found no pod for this allocation: delete the pod and start it anew, and see the scheduler \
             extender's log",
        ));
    }
    let number = quantity::whole(said.value).and_then(|number| u32::try_from(number).ok());
    let number =
        number.ok_or_else(|| said.wrong("the index is digits, or -1 where the plugin found no pod"))?;
    let selector = match meaning(reading) {
        IndexMeaning::Pci => DeviceSelector::Index(number),
        IndexMeaning::Minor => DeviceSelector::Minor(number),
    };
    // The index of a plugin on a node with one GPU may be none of its own (issue 220): then the list counts.
    Ok(cards.find(INDEX, &selector).ok().map(|gpu| (said, gpu)))
}

/// The GPUs of a list, or of them the one that the plugin chose: it gives one GPU, so a longer list is the image's or the
/// pod's.
pub(crate) fn narrowed<'a>(
    reading: &Reading,
    list: Said,
    gpus: Vec<&'a Gpu>,
    index: Option<(Said, &'a Gpu)>,
) -> Result<Vec<&'a Gpu>, RequestError> {
    let Some((said, gpu)) = index.filter(|_| gpus.len() > 1) else { return Ok(gpus) };
    if reading.policy.strict || !gpus.iter().any(|other| other.uuid == gpu.uuid) {
        return Err(conflict(list, said));
    }
    reading.note(format!("{list} and {said} differ: the plugin's one GPU counts"));
    Ok(vec![gpu])
}

/// The GPUs of a `limit`, which is nothing without a list of them, and the word that names them. Whatever else the bundle
/// says, where the plugin wrote its index the numbers are the plugin's, and so is the choice.
pub(crate) fn limited<'a>(
    reading: &Reading<'a>,
    cards: Cards<'a>,
    limit: Said,
) -> Result<(Said<'a>, Vec<&'a Gpu>), RequestError> {
    let (list, gpus) = device_list::limited(reading, cards, meaning(reading), limit)?;
    let index = index(reading, cards)?;
    Ok((list, narrowed(reading, list, gpus, index)?))
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
    fn of(&self, total: DeviceMemory) -> DeviceMemory {
        let part = Decimal { numerator: self.part, denominator: self.of };
        DeviceMemory::from_bytes(part.of(total.bytes()))
    }
}

/// The part of the card, as cGPU has it; of a card that the plugin counted by another's size, so many GiB or MiB.
pub(crate) fn memory(
    reading: &Reading,
    cards: Cards,
    ratio: Ratio,
    gpu: &Gpu,
) -> Result<DeviceMemory, RequestError> {
    let all = total(gpu)?;
    let set = reading.policy.dialects.aliyun_unit;
    let is_size =
        |unit: &u64| (all.bytes() / unit).abs_diff(ratio.of) <= 1 && set.is_none_or(|set| set == *unit);
    if !reading.has(INDEX) || UNITS.iter().any(is_size) {
        return Ok(ratio.of(all));
    }
    // A pod can write the unit, too: it counts where the first card may have so many.
    let first = total(cards.0.first().unwrap_or(gpu))?.bytes();
    let is_near = |unit: &u64| {
        let size = ratio.of.checked_mul(*unit);
        size.is_some_and(|size| (first / 2..=first.saturating_mul(2)).contains(&size))
    };
    let unit = match set.or(ratio.unit.filter(is_near)) {
        Some(unit) => unit,
        None => unit_by(ratio.of, total(cards.0.first().unwrap_or(gpu))?).ok_or_else(|| {
            ratio.dev.wrong(
                "no GPU of this node has so many GiB or MiB: have the administrator set dialects.aliyun.unit",
            )
        })?,
    };
    let memory = ratio.part.checked_mul(unit).map(DeviceMemory::from_bytes);
    let memory = memory.ok_or_else(|| ratio.by.wrong("more than any GPU has"))?;
    reading.note(format!(
        "{} is not the size of GPU {} ({all}): {} counts as {memory}",
        ratio.dev, gpu.index, ratio.by
    ));
    Ok(memory)
}

/// The unit by which `count` is the size of the first card, of which the others are given the same. GiB and MiB lie a
/// thousand apart, so between half and double there is no doubt.
fn unit_by(count: u64, first: DeviceMemory) -> Option<u64> {
    let near = |size: u64| (first.bytes() / 2..=first.bytes().saturating_mul(2)).contains(&size);
    UNITS.into_iter().find(|unit| count.checked_mul(*unit).is_some_and(near))
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cards::four;
    use crate::{Container, DialectSettings, Policy};

    #[test]
    fn a_part_of_a_card_that_the_plugin_counted_by_the_first_is_so_many_units() {
        const GB: u64 = 1_000_000_000;
        let unit = |unit| Policy {
            dialects: DialectSettings { aliyun_unit: unit, ..DialectSettings::default() },
            ..Policy::default()
        };
        for (first, set, stated, part, of, want) in [
            (15360, None, "", "3", "17", Some(3 << 30)),
            (15360, Some(1 << 20), "", "3", "15", Some(3 << 20)), // where the administrator says MiB, 15 is no card's size
            (15360, Some(1 << 20), "GiB", "4", "20", Some(4 << 20)), // whom a pod's unit does not outvote
            (81920, None, "GB", "4", "80", Some(4 * GB)),
            (15360, None, "GB", "4", "20", Some(4 * GB)),
            (15360, None, "MB", "4000", "20000", Some(4 * GB)),
            (15360, None, "GiB", "4000", "15109", Some(4000 << 20)), // a card of so many GiB there is not
            (15360, None, "GB", "4", "5", None),
            (15360, None, "GB", "4", "50", None),
        ] {
            let mut gpus = four();
            gpus[0].memory = Some(DeviceMemory::from_bytes(first << 20));
            let mut env = vec![format!("{INDEX}=0"), format!("{PART}={part}"), format!("{OF}={of}")];
            env.extend((!stated.is_empty()).then(|| format!("ALIYUN_COM_GPU_MEM_UNIT={stated}")));
            let (container, policy) = (Container::new(BTreeMap::new(), env), unit(set));
            let reading = Reading::new(&container, &policy);
            let ratio = Ratio::read(&reading).unwrap().unwrap();
            let found = memory(&reading, Cards(&gpus), ratio, &gpus[1]);
            assert_eq!(found.ok().map(DeviceMemory::bytes), want, "{part} of {of} {stated:?}, {set:?}");
        }
    }
}
