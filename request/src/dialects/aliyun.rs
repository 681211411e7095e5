//! Alibaba's gpushare and ACK device plugins and cGPU under docker: `ALIYUN_COM_GPU_MEM_CONTAINER` of
//! `ALIYUN_COM_GPU_MEM_DEV` parts of a card (gpushare-device-plugin pkg/gpu/nvidia/allocate.go; lvmxh/cgpu README).
//!
//! The plugin counts every card of a node by the size of the first: where that is not this card's, a part is a GiB or a MiB.
//! Its pod annotation with an index is not read: it can be wrong (gpushare-scheduler-extender issue 220).

use gpushare_inventory::{DeviceMemory, Gpu};

use super::Dialect;
use crate::cards::{Cards, IndexMeaning, total};
use crate::cgpu::{self, INDEX, OF, PART, Ratio, SLICED, UNITS};
use crate::claim::{Amount, Claim};
use crate::device_list::{Named, named};
use crate::error::RequestError;
use crate::grammar::{DeviceSelector, Priority};
use crate::quantity;
use crate::reading::{Reading, Said, conflict};

pub(super) static DIALECT: Dialect = Dialect { name: "aliyun", detects, read, owns: cgpu::owns };

const WEIGHT: &str = "ALIYUN_COM_GPU_SCHD_WEIGHT";
const HIGH: &str = "ALIYUN_COM_GPU_HIGH_PRIO";

fn detects(reading: &Reading) -> bool {
    let failed = |said: &Said| said.key == INDEX && said.value == "-1";
    reading.variables().any(|said| matches!(said.key, PART | OF | SLICED) || failed(&said))
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let meaning = cgpu::meaning(reading);
    let list = named(reading, cards, meaning)?;
    let index = index(reading, cards, meaning)?;
    let sliced = reading.one(SLICED)?;
    let Some(ratio) = Ratio::read(reading)? else {
        let off = format!("without {PART} and {OF} cGPU would be off: set them, too");
        return sliced.map_or(Ok(Vec::new()), |said| Err(said.wrong(off)));
    };
    let cut = sliced.map(|said| cgpu::listed(cards, meaning, said)).transpose()?;
    let (gpus, limited) = gpus(reading, ratio.by, list, sliced.zip(cut), index)?;
    let cores = cgpu::cap(reading)?;
    let claim = Claim::by(ratio.by).on(&gpus, |_, gpu| {
        if !limited.iter().any(|other| other.uuid == gpu.uuid) {
            return Ok(Amount::default());
        }
        Ok(Amount { memory: Some(memory(reading, cards, ratio, gpu)?), cores })
    })?;
    Ok(vec![Claim { priority: priority(reading)?, ..claim }])
}

/// The GPU that the plugin chose; none where the container is not the plugin's.
fn index<'a>(
    reading: &Reading<'a>,
    cards: Cards<'a>,
    meaning: IndexMeaning,
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
    let selector = match meaning {
        IndexMeaning::Pci => DeviceSelector::Index(number),
        IndexMeaning::Minor => DeviceSelector::Minor(number),
    };
    // The index of a plugin on a node with one GPU may be none of its own (issue 220): then the list counts.
    Ok(cards.find(INDEX, &selector).ok().map(|gpu| (said, gpu)))
}

type Gpus<'a> = Vec<&'a Gpu>;

/// The container's GPUs, and those of them that are sliced; the others are whole.
fn gpus<'a>(
    reading: &Reading<'a>,
    limit: Said<'a>,
    list: Named<'a>,
    sliced: Option<(Said<'a>, Gpus<'a>)>,
    index: Option<(Said<'a>, &'a Gpu)>,
) -> Result<(Gpus<'a>, Gpus<'a>), RequestError> {
    let has = |gpus: &[&Gpu], gpu: &Gpu| gpus.iter().any(|other| other.uuid == gpu.uuid);
    match (list, sliced, index) {
        (Named::Gpus(list, gpus), Some((said, sliced)), _) => {
            match sliced.iter().all(|gpu| has(&gpus, gpu)) {
                true => Ok((gpus, sliced)),
                false => Err(conflict(list, said)),
            }
        }
        (Named::Nothing, Some((_, sliced)), _) => Ok((sliced.clone(), sliced)),
        // The plugin gives one GPU: a longer list is the image's or the pod's.
        (Named::Gpus(list, gpus), None, Some((said, gpu))) if gpus.len() > 1 => {
            if reading.policy.strict || !has(&gpus, gpu) {
                return Err(conflict(list, said));
            }
            reading.note(format!("{list} and {said} differ: the plugin's one GPU counts"));
            Ok((vec![gpu], vec![gpu]))
        }
        (Named::Gpus(_, gpus), None, _) => Ok((gpus.clone(), gpus)),
        (Named::Nothing, None, Some((_, gpu))) => Ok((vec![gpu], vec![gpu])),
        (Named::Nothing | Named::NoGpu(_), ..) => {
            Err(RequestError::LimitWithoutGpu { by: limit.to_string() })
        }
    }
}

/// The part of the card, as cGPU has it; of a card that the plugin counted by another's size, so many GiB or MiB.
fn memory(reading: &Reading, cards: Cards, ratio: Ratio, gpu: &Gpu) -> Result<DeviceMemory, RequestError> {
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

/// cGPU's weight is 1 to 25; a scheduler that makes it of a percentage writes 0 for the smallest.
fn priority(reading: &Reading) -> Result<Option<Priority>, RequestError> {
    let weight = |said: Said| match quantity::whole(said.value) {
        Some(weight @ 0..=25) => Ok(Priority::at_most(u8::try_from(weight).unwrap_or(u8::MAX))),
        _ => Err(said.wrong("a weight is a whole number from 1 to 25")),
    };
    let high = |said: Said| match said.value {
        "0" => Ok(None),
        "1" => Ok(Some(Priority::HIGHEST)),
        _ => Err(said.wrong("high priority is 1, else 0")),
    };
    let weight = reading.least(WEIGHT, weight)?.map(|(_, weight)| weight);
    let high = reading.least(HIGH, high)?.and_then(|(_, high)| high);
    Ok(high.or(weight))
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

    #[test]
    fn weight_and_high_priority_become_a_priority() {
        for (env, want) in [
            (&[][..], None),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=0"], Some(0)),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=3"], Some(3)),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=25"], Some(9)),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=3", "ALIYUN_COM_GPU_HIGH_PRIO=1"], Some(9)),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=3", "ALIYUN_COM_GPU_HIGH_PRIO=0"], Some(3)),
        ] {
            let container =
                Container::new(BTreeMap::new(), env.iter().map(|&entry| entry.to_owned()).collect());
            let policy = Policy::default();
            let found = priority(&Reading::new(&container, &policy)).unwrap();
            assert_eq!(found.map(Priority::level), want, "{env:?}");
        }
    }
}
