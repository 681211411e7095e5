//! Alibaba PAI's eGPU: `AMP_VGPU_ENABLE=1` with bytes per GPU or a part of it, and percent (help.aliyun.com,
//! pai/egpu-interface-usage-example).
//!
//! The switch is anybody's word: where Aliyun's device plugin wrote its index, the GPU and the part are as the plugin means them.

use gpushare_inventory::DeviceMemory;

use super::Dialect;
use crate::cards::Cards;
use crate::cgpu::{self, Ratio};
use crate::claim::{Amount, Claim};
use crate::error::RequestError;
use crate::quantity;
use crate::reading::{Reading, Said};

pub(super) static DIALECT: Dialect = Dialect { name: "pai-egpu", detects, read, owns, by_position: false };

const SWITCH: &str = "AMP_VGPU_ENABLE";
const BYTES: &str = "GPU_MEM_PER_DEVICE";
/// What eGPU keeps of the bytes for itself, in MiB, and how much that is where nobody says.
const RESERVED: &str = "ALIYUN_COM_GPU_MEM_RESERVED";
const USUALLY_RESERVED: u64 = 10;

fn detects(reading: &Reading) -> bool {
    reading.has(SWITCH)
}

fn owns(key: &str) -> bool {
    cgpu::owns(key) || matches!(key, SWITCH | BYTES | "AMP_USE_HOST_DAEMON" | "AMP_VGPU_DEV_COUNT")
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(switch) = reading.one(SWITCH)? else { return Ok(Vec::new()) };
    if switch.value != "1" {
        return Err(switch.wrong("eGPU is on with 1 and documents no other value: write 1, or remove it"));
    }
    let (list, gpus) = cgpu::limited(reading, cards, switch)?;
    let cores = cgpu::cap(reading)?;
    let bytes = bytes(reading)?;
    let ratio = Ratio::read(reading)?;
    let by = bytes.map(|(said, _)| said).or(ratio.map(|ratio| ratio.by)).unwrap_or(list);
    let claim = Claim::by(by).on(&gpus, |_, gpu| {
        let part = ratio.map(|ratio| cgpu::memory(reading, cards, ratio, gpu)).transpose()?;
        // The ratio may be the words of Aliyun's plugin, which a pod's bytes must not lift.
        let memory = bytes.map(|(_, memory)| memory).into_iter().chain(part).min();
        Ok(Amount { memory, cores })
    })?;
    Ok(vec![claim])
}

/// The memory in bytes, less what eGPU keeps.
fn bytes<'a>(reading: &Reading<'a>) -> Result<Option<(Said<'a>, DeviceMemory)>, RequestError> {
    let reserved = match reading.one(RESERVED)? {
        Some(said) => quantity::whole(said.value).ok_or_else(|| said.wrong("the reserve is digits: MiB"))?,
        None => USUALLY_RESERVED,
    };
    reading.least(BYTES, |said| {
        let bytes = quantity::whole(said.value);
        let bytes =
            bytes.ok_or_else(|| said.wrong("memory is digits: bytes without a unit, as 2147483648"))?;
        if bytes < 1 << 20 {
            let meant = if bytes == 0 { "2147483648".to_owned() } else { format!("{}", bytes << 20) };
            return Err(said.wrong(format!("below 1 MiB; it is bytes: did you mean {meant}?")));
        }
        let left = reserved.checked_mul(1 << 20).and_then(|reserved| bytes.checked_sub(reserved));
        let left = left.filter(|left| *left >= 1 << 20).map(DeviceMemory::from_bytes);
        left.ok_or_else(|| {
            said.wrong(format!("less {reserved} MiB of reserve ({RESERVED}) nothing is left: ask for more"))
        })
    })
}
