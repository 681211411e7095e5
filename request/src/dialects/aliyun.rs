//! Alibaba's gpushare and ACK device plugins and cGPU under docker: `ALIYUN_COM_GPU_MEM_CONTAINER` of
//! `ALIYUN_COM_GPU_MEM_DEV` parts of a card (gpushare-device-plugin pkg/gpu/nvidia/allocate.go; lvmxh/cgpu README).
//!
//! The plugin counts every card of a node by the size of the first: where that is not this card's, a part is a GiB or a MiB.
//! Its pod annotation with an index is not read: it can be wrong (gpushare-scheduler-extender issue 220).

use gpushare_inventory::Gpu;

use super::Dialect;
use crate::cards::Cards;
use crate::cgpu::{self, INDEX, OF, PART, Ratio, SLICED};
use crate::claim::{Amount, Claim};
use crate::device_list::{Named, named};
use crate::error::RequestError;
use crate::grammar::Priority;
use crate::quantity;
use crate::reading::{Reading, Said, conflict};

pub(super) static DIALECT: Dialect =
    Dialect { name: "aliyun", detects, read, owns: cgpu::owns, by_position: false };

const WEIGHT: &str = "ALIYUN_COM_GPU_SCHD_WEIGHT";
const HIGH: &str = "ALIYUN_COM_GPU_HIGH_PRIO";

fn detects(reading: &Reading) -> bool {
    [PART, OF, SLICED].iter().any(|key| reading.has(key))
        || reading.named(INDEX).any(|said| said.value == "-1")
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let meaning = cgpu::meaning(reading);
    let list = named(reading, cards, meaning)?;
    let index = cgpu::index(reading, cards)?;
    let narrowed = |said, gpus| cgpu::narrowed(reading, said, gpus, index);
    let list = match list {
        Named::Gpus(said, gpus) => Named::Gpus(said, narrowed(said, gpus)?),
        other => other,
    };
    let sliced = reading.one(SLICED)?;
    let Some(ratio) = Ratio::read(reading)? else {
        let off = format!("without {PART} and {OF} cGPU would be off: set them, too");
        return sliced.map_or(Ok(Vec::new()), |said| Err(said.wrong(off)));
    };
    let cut = sliced.map(|said| narrowed(said, cgpu::listed(cards, meaning, said)?)).transpose()?;
    let (gpus, limited) = gpus(ratio.by, list, sliced.zip(cut), index)?;
    let cores = cgpu::cap(reading)?;
    let claim = Claim::by(ratio.by).on(&gpus, |_, gpu| {
        if !limited.iter().any(|other| other.uuid == gpu.uuid) {
            return Ok(Amount::default());
        }
        Ok(Amount { memory: Some(cgpu::memory(reading, cards, ratio, gpu)?), cores })
    })?;
    Ok(vec![Claim { priority: priority(reading)?, ..claim }])
}

type Gpus<'a> = Vec<&'a Gpu>;

/// The container's GPUs, and those of them that are sliced; the others are whole.
fn gpus<'a>(
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
        (Named::Gpus(_, gpus), None, _) => Ok((gpus.clone(), gpus)),
        (Named::Nothing, None, Some((_, gpu))) => Ok((vec![gpu], vec![gpu])),
        (Named::Nothing | Named::NoGpu(_), ..) => {
            Err(RequestError::LimitWithoutGpu { by: limit.to_string() })
        }
    }
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
    use crate::{Container, Policy};

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
