//! How much memory and compute a merged request is for, on each GPU.

use std::cmp::Ordering;

use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};

use super::Merge;
use super::spread::Spread;
use crate::amount::Cap;
use crate::claim::Claim;
use crate::error::RequestError;
use crate::gpus::total;
use crate::grammar::{ComputePolicy, Cores, MemoryRequest, Mode};
use crate::policy::{Ceiling, NvidiaPolicy};
use crate::rank::Rank;
use crate::request::Share;
use crate::words::conflict;

/// The container's share of one GPU.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Granted {
    pub(super) gpu: Option<GpuUuid>,
    pub(super) share: Share,
    /// The most compute that may be used, if a claim states it. For a burst it is more than the share.
    pub(super) most: Option<Cap>,
}

impl<'a> Merge<'a> {
    /// Computes the container's share of one GPU.
    pub(super) fn share(
        &mut self,
        gpu: Option<&'a Gpu>,
        spread: &Spread<'a>,
        mode: Mode,
    ) -> Result<Granted, RequestError> {
        let uuid = gpu.map(|gpu| gpu.uuid);
        if matches!(mode, Mode::TimeSlice | Mode::Exclusive) {
            self.hold_whole(mode, gpu, spread)?;
            let memory = match mode {
                Mode::TimeSlice => self.memory_of_slice(gpu, spread)?,
                Mode::Share | Mode::Mps | Mode::Exclusive => MemoryRequest::Percent(100),
            };
            return Ok(Granted { gpu: uuid, share: Share { memory, cores: None }, most: None });
        }
        let memory = self.memory(gpu, spread)?;
        let cores = self.least(|claim| claim.amount_on(uuid).cores, |a, b| Ok(a.cmp(b)))?;
        let most = self.most_compute(uuid, spread)?;
        let cores = match cores.map(|stated| stated.value) {
            Some(Cap::Percent(cores)) => Some(cores),
            Some(Cap::Unlimited) => None,
            None => self.policy.default_cores,
        };
        Ok(Granted { gpu: uuid, share: Share { memory, cores }, most })
    }

    /// The memory that a time-sliced container says it needs; all that is left if it says nothing.
    fn memory_of_slice(
        &mut self,
        gpu: Option<&'a Gpu>,
        spread: &Spread<'a>,
    ) -> Result<MemoryRequest, RequestError> {
        let uuid = gpu.map(|gpu| gpu.uuid);
        match self.claims.iter().all(|claim| claim.amount_on(uuid).memory.is_none()) {
            true => Ok(MemoryRequest::Rest),
            false => self.memory(gpu, spread),
        }
    }

    fn memory(&mut self, gpu: Option<&'a Gpu>, spread: &Spread<'a>) -> Result<MemoryRequest, RequestError> {
        let uuid = gpu.map(|gpu| gpu.uuid);
        let stated = |claim: &Claim| claim.amount_on(uuid).memory;
        let Some(least) = self.least(stated, |a, b| compare(*a, *b, gpu))? else {
            self.refuse_beyond(uuid, spread)?;
            return self.default_memory(gpu, spread);
        };
        let Some(gpu) = gpu else { return Ok(least.value) };
        let value = match least.bounding.is_foreign() && least.value != MemoryRequest::Rest {
            true => MemoryRequest::Bytes(self.whole_mebibytes(on(least.value, gpu)?, least.bounding, gpu)?),
            false => least.value,
        };
        let bytes = on(value, gpu)?;
        let fits_gpu = bytes <= total(gpu)?;
        let grants = |claim: &Claim| stated(claim).is_some() || claim.is_exclusive() && fits_gpu;
        let is_default = || Ok(bytes <= on(self.default_memory_of(Some(gpu), spread)?.0, gpu)?);
        let hold = |by: &str, ceiling: Ceiling| ceiling.hold_memory(by, bytes, gpu);
        self.hold(spread, grants, hold, &least.bounding.by, is_default)?;
        Ok(value)
    }

    /// Refuses a GPU without a limit if claims state limits for single GPUs only. Such limits imply that the
    /// container has no other GPU, so the node's default must not add one.
    fn refuse_beyond(&self, gpu: Option<GpuUuid>, spread: &Spread) -> Result<(), RequestError> {
        let speaks = |claim: &Claim| claim.particular.iter().any(|(other, _)| Some(*other) == gpu);
        let mut limiting = self.claims.iter().filter(|claim| !claim.particular.is_empty()).peekable();
        let Some(first) = limiting.peek().copied().copied() else { return Ok(()) };
        if limiting.any(|claim| speaks(claim)) {
            return Ok(());
        }
        let gpu = spread.gpus.iter().find(|other| Some(other.uuid) == gpu);
        let gpu = gpu.map_or_else(String::new, |gpu| format!("GPU {} ({})", gpu.index, gpu.uuid));
        Err(conflict(&first.by, format!("{gpu}, of which it says nothing")))
    }

    /// Rounds another system's limit to a grantable size: down to whole MiB, at least one. A lenient node
    /// also cuts it to the GPU's memory.
    fn whole_mebibytes(
        &mut self,
        memory: DeviceMemory,
        by: &Claim,
        gpu: &Gpu,
    ) -> Result<DeviceMemory, RequestError> {
        const MIB: u64 = 1 << 20;
        let bytes = memory.bytes() / MIB * MIB;
        let all = total(gpu)?;
        if bytes == 0 {
            return Err(RequestError::TooSmall { by: by.by.clone() });
        }
        if bytes > all.bytes() && !self.policy.strict {
            self.note(format!("{} is more than GPU {} has: all of it counts", by.by, gpu.index));
            return Ok(all);
        }
        Ok(DeviceMemory::from_bytes(bytes))
    }

    fn most_compute(
        &mut self,
        gpu: Option<GpuUuid>,
        spread: &Spread<'a>,
    ) -> Result<Option<Cap>, RequestError> {
        let stated = |claim: &Claim| claim.most_compute_on(gpu);
        let Some(least) = self.least(stated, |a, b| Ok(a.cmp(b)))? else { return Ok(None) };
        let is_default = || Ok(self.policy.default_cores.is_none_or(|cores| least.value <= cores.into()));
        let hold = |by: &str, ceiling: Ceiling| ceiling.hold_compute(by, least.value);
        self.hold(spread, |claim| stated(claim).is_some(), hold, &least.bounding.by, is_default)?;
        Ok(Some(least.value))
    }

    /// Checks a request for whole GPUs, or for unlimited turns on them, against the ceilings. It exceeds
    /// every ceiling below a whole GPU, and every default.
    fn hold_whole(&self, mode: Mode, gpu: Option<&Gpu>, spread: &Spread) -> Result<(), RequestError> {
        let is_stated = |claim: &Claim| claim.mode == Some(mode);
        let hold = |by: &str, ceiling: Ceiling| {
            ceiling.hold_compute(by, Cap::Unlimited)?;
            gpu.map_or(Ok(()), |gpu| ceiling.hold_memory(by, total(gpu)?, gpu))
        };
        let stating = self.asking().find(|claim| is_stated(claim));
        let by = stating.map_or("", |claim| &claim.by);
        // If no claim asks for whole GPUs, the policy gave them.
        self.hold(spread, is_stated, hold, by, || Ok(stating.is_none()))
    }

    /// Checks an amount against the ceilings of the claims that ask for it: at least one of those that
    /// `grants` selects must be allowed it. If none of them may grant at all, only the node's default or less
    /// is granted; `by` is the word for the error. The claim that multiplies the amount is checked, too.
    fn hold(
        &self,
        spread: &Spread,
        grants: impl Fn(&Claim) -> bool,
        hold: impl Fn(&str, Ceiling) -> Result<(), RequestError>,
        by: &str,
        is_default: impl FnOnce() -> Result<bool, RequestError>,
    ) -> Result<(), RequestError> {
        let held = |claim: &Claim| {
            let ceilings = self.policy.authority(claim.rank)?;
            Some(ceilings.into_iter().try_for_each(|ceiling| hold(&claim.by, ceiling)))
        };
        let mut granting = self.asking().filter(|claim| grants(claim)).filter_map(held);
        match granting.next() {
            Some(first) => first.or_else(|error| granting.find(Result::is_ok).unwrap_or(Err(error)))?,
            None if is_default()? => {}
            None => return Err(RequestError::AboveDefault { key: by.to_owned() }),
        }
        spread.multiplying.and_then(held).unwrap_or(Ok(()))
    }

    /// The node's default memory for a container that names no size, if the node's policy gives one.
    fn default_memory(
        &mut self,
        gpu: Option<&'a Gpu>,
        spread: &Spread<'a>,
    ) -> Result<MemoryRequest, RequestError> {
        let is_handed = self.asking().any(|claim| claim.rank >= Rank::Granted);
        let refuses = match self.policy.nvidia {
            NvidiaPolicy::Refuse => true,
            NvidiaPolicy::Ignore => !is_handed,
            NvidiaPolicy::DefaultShare | NvidiaPolicy::Whole => false,
        };
        let may_take = |claim: &Claim| claim.takes_defaults && self.policy.authority(claim.rank).is_some();
        if refuses && !self.asking().any(may_take) {
            return Err(RequestError::NoShare);
        }
        if self.policy.needs_memory {
            return Err(RequestError::NoMemory);
        }
        let (memory, setting) = self.default_memory_of(gpu, spread)?;
        if let Some(setting) = setting {
            self.note(format!("no memory was asked for: {memory} counts ({setting})"));
        }
        Ok(memory)
    }

    /// The node's default memory on this GPU, and the setting whose ceiling lowered it, if any.
    fn default_memory_of(
        &self,
        gpu: Option<&Gpu>,
        spread: &Spread,
    ) -> Result<(MemoryRequest, Option<&'static str>), RequestError> {
        let default = self.policy.default_memory.unwrap_or(MemoryRequest::Rest);
        let Some((ceiling, setting)) = self.ceiling_of_default(gpu, spread)? else {
            return Ok((default, None));
        };
        Ok(match compare(default, MemoryRequest::Bytes(ceiling), gpu)? {
            Ordering::Greater => (MemoryRequest::Bytes(ceiling), Some(setting)),
            Ordering::Less | Ordering::Equal => (default, None),
        })
    }

    /// The lowest ceiling of the claims that grant the default on this GPU, with its setting. A ceiling of at
    /// least the whole GPU counts as none: it cannot lower "all that is left".
    pub(super) fn ceiling_of_default(
        &self,
        gpu: Option<&Gpu>,
        spread: &Spread,
    ) -> Result<Option<(DeviceMemory, &'static str)>, RequestError> {
        let Some(gpu) = gpu else { return Ok(None) };
        let first = self.asking().find(|claim| self.may_grant(claim));
        let granting = first.into_iter().chain(spread.multiplying);
        let mut least = None;
        for ceiling in granting.filter_map(|claim| self.policy.ceiling(claim.rank)) {
            let most = ceiling.on(gpu)?.filter(|most| gpu.memory.is_none_or(|memory| *most < memory));
            least = [least, most.map(|most| (most, ceiling.setting))].into_iter().flatten().min();
        }
        Ok(least)
    }

    /// The most compute that a burst may use; `None` unless it is more than the share on every GPU.
    pub(super) fn burst(shares: &[Granted]) -> Option<Cores> {
        let least = shares.iter().map(|granted| granted.most).min()??;
        let held = shares.iter().map(|granted| granted.share.cores).max()??;
        let burst = match least {
            Cap::Unlimited => Cores::ALL,
            Cap::Percent(cores) => cores,
        };
        (burst > held).then_some(burst)
    }

    /// The compute policy. A stated policy counts only if it lifts no claim's compute limit.
    pub(super) fn compute_policy(&self, burst: Option<Cores>, shares: &[Granted]) -> ComputePolicy {
        let stated = self.claims.iter().find_map(|claim| claim.compute_policy).unwrap_or_default();
        let is_free = shares.iter().all(|granted| granted.share.cores.is_none());
        match burst {
            Some(burst) if burst == Cores::ALL && stated == ComputePolicy::None => ComputePolicy::None,
            Some(burst) if burst == Cores::ALL && stated == ComputePolicy::Latency => ComputePolicy::Latency,
            Some(_) => ComputePolicy::Burst,
            None if is_free => stated,
            None => ComputePolicy::Fixed,
        }
    }
}

/// Compares two amounts; amounts in different units are compared in bytes on `gpu`. All that is left counts
/// as the most.
fn compare(a: MemoryRequest, b: MemoryRequest, gpu: Option<&Gpu>) -> Result<Ordering, RequestError> {
    Ok(match (a, b, gpu) {
        (MemoryRequest::Bytes(a), MemoryRequest::Bytes(b), _) => a.cmp(&b),
        (MemoryRequest::Percent(a), MemoryRequest::Percent(b), _) => a.cmp(&b),
        (MemoryRequest::Rest, MemoryRequest::Rest, _) => Ordering::Equal,
        (MemoryRequest::Rest, _, _) => Ordering::Greater,
        (_, MemoryRequest::Rest, _) => Ordering::Less,
        (a, b, Some(gpu)) => on(a, gpu)?.cmp(&on(b, gpu)?),
        (_, _, None) => Ordering::Equal,
    })
}

/// The amount in bytes on this GPU; all that is left counts as the whole GPU.
fn on(memory: MemoryRequest, gpu: &Gpu) -> Result<DeviceMemory, RequestError> {
    Ok(match memory {
        MemoryRequest::Bytes(memory) => memory,
        MemoryRequest::Percent(percent) => total(gpu)?.percent(percent),
        MemoryRequest::Rest => total(gpu)?,
    })
}
