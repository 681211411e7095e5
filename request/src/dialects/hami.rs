//! HAMi and Volcano's vGPU: `CUDA_DEVICE_MEMORY_LIMIT[_<i>]` and `CUDA_DEVICE_SM_LIMIT[_<i>]`, by position in the device
//! list (HAMi pkg/device-plugin/nvidiadevice; HAMi-core src/multiprocess/multiprocess_memory_limit.c).
//!
//! HAMi-core takes a value that it cannot read, or 0, for "no limit"; here that is an error. Its `/overrideEnv` of the image
//! is not read.

mod allocated;

use gpushare_inventory::{DeviceMemory, Gpu};

use super::Dialect;
use crate::cards::{Cards, IndexMeaning};
use crate::claim::{Amount, Cap, Claim};
use crate::device_list::limited;
use crate::error::RequestError;
use crate::nvidia::DEVICES;
use crate::quantity;
use crate::reading::{Reading, Said, conflict};

pub(super) static DIALECT: Dialect = Dialect { name: "hami", detects, read, owns, by_position: true };

const MEMORY: &str = "CUDA_DEVICE_MEMORY_LIMIT";
const CORES: &str = "CUDA_DEVICE_SM_LIMIT";

fn detects(reading: &Reading) -> bool {
    reading.variables().any(|said| is_limit(said.key, MEMORY) || is_limit(said.key, CORES))
}

/// The limits, and what their own library reads beside them.
fn owns(key: &str) -> bool {
    is_limit(key, MEMORY) || is_limit(key, CORES) || key == "CUDA_DEVICE_MEMORY_SHARED_CACHE"
}

/// `name`, or `name` and a position.
fn is_limit(key: &str, name: &str) -> bool {
    key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || position(rest).is_some())
}

fn position(rest: &str) -> Option<usize> {
    let number = quantity::whole(rest.strip_prefix('_')?)?;
    usize::try_from(number).ok()
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let limit = reading.variables().find(|said| is_limit(said.key, MEMORY) || is_limit(said.key, CORES));
    let Some(limit) = limit else { return Ok(Vec::new()) };
    let (list, gpus) = limited(reading, cards, IndexMeaning::Pci, limit)?;
    for said in reading.variables() {
        let beyond = |name| said.key.strip_prefix(name).and_then(position).is_some_and(|i| i >= gpus.len());
        if beyond(MEMORY) || beyond(CORES) {
            return Err(said.wrong(format!("{} names only {} GPU(s): remove it", list.key, gpus.len())));
        }
    }
    let claim = Claim::by(limit).on(&gpus, |position, _| {
        let memory = |key: &str| match reading.least(key, |said| memory(reading, said))? {
            Some((_, Limit::Of(memory))) => Ok(Some(memory)),
            Some((_, Limit::Unstated)) | None => Ok(None),
        };
        Ok(Amount { memory: at(MEMORY, position, memory)?, cores: least_cap(reading, position)? })
    })?;
    refuse_half(&claim, limit, &gpus)?;
    if list.key != DEVICES {
        refuse_order(&claim, limit)?;
    }
    let allocated = allocated::claims(reading, &gpus)?;
    Ok([claim].into_iter().chain(allocated).collect())
}

/// The limit at a position; the plain key is for those that have none of their own.
fn at<T>(
    name: &str,
    position: usize,
    limit: impl Fn(&str) -> Result<Option<T>, RequestError>,
) -> Result<Option<T>, RequestError> {
    let own = limit(&format!("{name}_{position}"))?;
    if own.is_some() { Ok(own) } else { limit(name) }
}

/// The smaller of both caps: the plugin writes the plain key alone, and a pod must not lift it by the other.
fn least_cap(reading: &Reading, position: usize) -> Result<Option<Cap>, RequestError> {
    let own = reading.least(&format!("{CORES}_{position}"), cores)?;
    let plain = reading.least(CORES, cores)?;
    if let (Some((own, cap)), Some((plain, least))) = (own, plain)
        && least < cap
    {
        if reading.policy.strict {
            return Err(conflict(own, plain));
        }
        reading.stands(own, plain.value);
    }
    Ok(own.into_iter().chain(plain).map(|(_, cap)| cap).min())
}

/// Nodes that CDI put in are in no order that tells whose a limit is.
fn refuse_order(claim: &Claim, limit: Said) -> Result<(), RequestError> {
    let mut amounts = claim.particular.iter().map(|(_, amount)| amount);
    let first = amounts.next();
    match amounts.all(|amount| Some(amount) == first) {
        true => Ok(()),
        false => Err(limit.wrong(
            "only device nodes name the GPUs, and their order does not tell whose limit this is: give all the same limits, \
             or name the GPUs in NVIDIA_VISIBLE_DEVICES",
        )),
    }
}

/// A memory limit. What says nothing limits the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    Of(DeviceMemory),
    Unstated,
}

/// Memory on some GPUs and none on others is a slip, never "no limit" there.
fn refuse_half(claim: &Claim, limit: Said, gpus: &[&Gpu]) -> Result<(), RequestError> {
    let has = |(_, amount): &&(_, Amount)| amount.memory.is_some();
    let limited = claim.particular.iter().filter(has).count();
    if limited == 0 || limited == gpus.len() {
        return Ok(());
    }
    Err(limit.wrong(format!(
        "{} of {} GPUs have no memory limit: give each its own, or set {MEMORY}",
        gpus.len() - limited,
        gpus.len()
    )))
}

fn memory(reading: &Reading, said: Said) -> Result<Limit, RequestError> {
    let remedy = "memory is digits and perhaps one of k, m, g (binary), as 3000m";
    let bytes = quantity::binary(said.value).ok_or_else(|| said.wrong(remedy))?;
    match bytes {
        0 if reading.policy.dialects.hami_zero_unstated => Ok(Limit::Unstated),
        0 => Err(said.wrong("0 states no limit: write the limit, as 3000m (or see dialects.hami.zero)")),
        1..=0xf_ffff => {
            Err(said.wrong(format!("below 1 MiB; without a letter it is bytes: did you mean {bytes}m?")))
        }
        bytes => Ok(Limit::Of(DeviceMemory::from_bytes(bytes))),
    }
}

/// 0 is what the plugin writes where no cores were asked for (HAMi issue 636).
fn cores(said: Said) -> Result<Cap, RequestError> {
    match quantity::whole(said.value) {
        Some(0) => Ok(Cap::Unlimited),
        Some(percent) => Cap::of(percent).ok_or_else(|| said.wrong("a percentage is from 0 (no cap) to 100")),
        None => Err(said.wrong("a percentage is a whole number from 0 (no cap) to 100")),
    }
}
