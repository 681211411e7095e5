//! Alibaba's cGPU turned off: `CGPU_DISABLE` (lvmxh/cgpu README; gpushare-device-plugin writes it on nodes labelled
//! `cgpu.disable.isolation`). Where the node honours the switch, the container asks for whole cards; elsewhere it switches
//! nothing off and whatever else the bundle says counts.

use super::Dialect;
use crate::cards::Cards;
use crate::cgpu::{self, OFF};
use crate::claim::Claim;
use crate::device_list::{items, word};
use crate::error::RequestError;
use crate::nvidia::DEVICES;
use crate::reading::{Reading, Said};

pub(super) static DIALECT: Dialect = Dialect { name: "aliyun-off", detects, read, owns, by_position: false };

/// A switch that nobody can read is spoken to be refused.
fn detects(reading: &Reading) -> bool {
    let speaks = |said: Said| is_on(said.value).is_none_or(|on| on && honoured(reading));
    reading.named(OFF).any(speaks) && reading.variables().any(names_gpus)
}

/// Of a container without a GPU the switch says nothing: it may be the image's.
fn names_gpus(said: Said) -> bool {
    let list = said.key == DEVICES && items(said.value).next().is_some();
    cgpu::owns(said.key) || list && !matches!(word(said.value), Some("void" | "none"))
}

fn honoured(reading: &Reading) -> bool {
    reading.policy.switches.iter().any(|switch| switch == OFF)
}

/// The limits, too, which count no more.
fn owns(key: &str) -> bool {
    key == OFF || cgpu::owns(key)
}

fn is_on(value: &str) -> Option<bool> {
    match value {
        "true" | "1" => Some(true),
        "false" | "0" | "" => Some(false),
        _ => None,
    }
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(off) = reading.one(OFF)? else { return Ok(Vec::new()) };
    if is_on(off.value).is_none() {
        return Err(
            off.wrong("true or 1 turns cGPU off; false, 0 or nothing leaves it on: write one of these")
        );
    }
    let (_, gpus) = cgpu::limited(reading, cards, off)?;
    Ok(vec![Claim { exclusive: true, ..Claim::by(off).naming(&gpus) }])
}
