//! Merges the claims of all sources into one request. The smallest statement of each limit counts.
//!
//! Claims are compared by rank. A less trusted claim may ask for less, and then counts. One that asks for
//! more is refused on a strict node; elsewhere it is cut, with a note. Claims that grant are held to the
//! ceilings of their channel. On a strict node whatever exceeds the node's default needs a claim that may
//! grant. What no claim states is the node's default, never "no limit". Nothing here knows another system's
//! keys.

use std::cmp::Ordering;

use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};

use crate::amount::Cap;
use crate::claim::{Claim, Span};
use crate::error::RequestError;
use crate::gpus::{NodeGpus, total};
use crate::grammar::{ComputePolicy, Cores, DeviceSelector, Devices, MemoryRequest, Priority, Scope};
use crate::policy::{NvidiaPolicy, Policy};
use crate::rank::Rank;
use crate::request::{Request, Share};
use crate::words::conflict;

/// Merges `claims` into the request that they make together on a node with these GPUs.
///
/// # Errors
/// When claims contradict each other, name no GPU of the node, or when none of them may grant.
pub fn merge(claims: &[Claim], policy: &Policy, node: NodeGpus) -> Result<Request, RequestError> {
    let mut by_rank: Vec<&Claim> = claims.iter().collect();
    by_rank.sort_by_key(|claim| std::cmp::Reverse(claim.rank));
    let notes = claims.iter().flat_map(|claim| &claim.notes).take(MOST_NOTES).cloned().collect();
    let mut merge = Merge { claims: by_rank, policy, node, notes };
    merge.refuse_without_grantor()?;
    let spread = merge.spread()?;
    let exclusive = merge.exclusive(&spread)?;
    let mut shares = Vec::new();
    for gpu in spread.candidates() {
        shares.push(merge.share(gpu, &spread, exclusive)?);
    }
    merge.request(&spread, shares, exclusive)
}

/// Bounds the notes, since a bundle may hold a hundred thousand entries that differ.
const MOST_NOTES: usize = 32;

struct Merge<'a> {
    /// Sorted by rank, the most trusted first.
    claims: Vec<&'a Claim>,
    policy: &'a Policy,
    node: NodeGpus<'a>,
    notes: Vec<String>,
}

/// The GPUs that the container gets or may get.
struct Spread<'a> {
    gpus: Vec<&'a Gpu>,
    /// How many of `gpus` the container gets.
    wanted: usize,
    /// Whether the container gets exactly `gpus`. If not, placement chooses `wanted` of them.
    named: bool,
    /// The claim that raises the number of GPUs above what more trusted claims state. Every amount is also
    /// held to the ceilings of this claim.
    multiplying: Option<&'a Claim>,
}

impl<'a> Spread<'a> {
    /// Each GPU that the container may get. A node without known GPUs has one candidate, `None`.
    fn candidates(&self) -> Vec<Option<&'a Gpu>> {
        match self.gpus.is_empty() {
            true => vec![None],
            false => self.gpus.iter().copied().map(Some).collect(),
        }
    }

    fn devices(&self) -> Devices {
        let wanted = u8::try_from(self.wanted).unwrap_or(u8::MAX);
        match self.named {
            true => Devices::These(self.gpus.iter().map(|gpu| DeviceSelector::Uuid(gpu.uuid)).collect()),
            false => Devices::Among(wanted, self.gpus.iter().map(|gpu| gpu.uuid).collect()),
        }
    }
}

/// The smallest value that several claims state.
struct Least<'a, T> {
    value: T,
    /// The most trusted claim that states any value.
    first: &'a Claim,
    /// The claim that states the smallest value.
    bounding: &'a Claim,
}

/// What the container gets on one GPU.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Granted {
    gpu: Option<GpuUuid>,
    share: Share,
    /// The most compute that may be used, where a claim states it. It is more than the share for a burst.
    most: Option<Cap>,
}

impl<'a> Merge<'a> {
    fn may_grant(&self, claim: &Claim) -> bool {
        self.policy.authority(claim.rank).is_some()
    }

    fn asking(&self) -> impl Iterator<Item = &'a Claim> {
        self.claims.iter().copied().filter(|claim| claim.asks)
    }

    /// Refuses claims of which none that asks may grant. Where lists of GPUs in variables are no request,
    /// words of unchecked images alone are refused too.
    fn refuse_without_grantor(&self) -> Result<(), RequestError> {
        let first = self.asking().next().ok_or(RequestError::NoShare)?;
        let mut granting = self.asking().filter(|claim| self.may_grant(claim)).peekable();
        if granting.peek().is_none() {
            let of_pod = first.rank == Rank::Pod;
            let setting = if of_pod { "request.pod_ceiling" } else { "request.env_ceiling" };
            return Err(RequestError::Untrusted { key: first.by.clone(), setting });
        }
        let are_unread = matches!(self.policy.nvidia, NvidiaPolicy::Ignore | NvidiaPolicy::Refuse);
        match granting.all(|claim| self.policy.is_unchecked(claim.rank)) && are_unread {
            true => Err(RequestError::Unread { by: first.by.clone() }),
            false => Ok(()),
        }
    }

    fn spread(&mut self) -> Result<Spread<'a>, RequestError> {
        let named = self.named()?;
        let count = self.least(|claim| claim.count, |a, b| Ok(a.cmp(b)))?;
        let span = self.asking().map(|claim| claim.span).min().unwrap_or_default();
        let all = || self.node.all();
        let every = self.asking().find(|claim| claim.span == Span::All);
        let (gpus, wanted, by) = match (named, count, span) {
            (Some(named), count, span) => {
                let wanted = self.wanted_of(&named, count, span)?;
                (named.value, wanted, Some(named.first))
            }
            (None, Some(count), _) => (all(), count.value, Some(count.first)),
            (None, None, Span::One) => (all(), 1, None),
            (None, None, Span::All) => (all(), all().len(), every),
        };
        self.refuse_multiplied(wanted, by)?;
        let named = wanted == gpus.len() && by.is_some_and(|by| by.count.is_none());
        let multiplying = by.filter(|by| wanted > self.counted_above(by));
        Ok(Spread { gpus, wanted, named, multiplying })
    }

    /// How many of the named GPUs the container gets.
    fn wanted_of(
        &mut self,
        named: &Least<'a, Vec<&Gpu>>,
        count: Option<Least<'a, usize>>,
        span: Span,
    ) -> Result<usize, RequestError> {
        let listed = named.value.len();
        let Some(count) = count else {
            let single = span == Span::One && !self.may_multiply();
            return Ok(if single { 1 } else { listed });
        };
        if count.value > listed || count.value < listed && named.first.rank == count.first.rank {
            let list = format!("{} (a list of {listed} GPUs)", named.bounding.by);
            return Err(conflict(&count.first.by, list));
        }
        if count.value < listed && named.first.rank < count.first.rank {
            self.differ(count.first, named.first, "the smaller number of GPUs counts")?;
        }
        Ok(count.value)
    }

    /// More than one GPU exceeds the default: a claim that may grant has to ask for that many.
    fn refuse_multiplied(&self, wanted: usize, by: Option<&Claim>) -> Result<(), RequestError> {
        let says = |claim: &Claim| {
            let named = claim.gpus.as_ref().map(Vec::len);
            let spans = claim.asks && (named, claim.count) == (None, None) && claim.span == Span::All;
            spans || named.max(claim.count) >= Some(wanted)
        };
        let grants = self.claims.iter().filter(|claim| self.may_grant(claim)).any(|claim| says(claim));
        match by {
            Some(by) if wanted > 1 && !grants => Err(RequestError::AboveDefault { key: by.by.clone() }),
            _ => Ok(()),
        }
    }

    /// Whether a claim that names several GPUs may multiply an amount that others asked for on one GPU.
    fn may_multiply(&self) -> bool {
        let naming = self.claims.iter().filter(|claim| claim.gpus.is_some());
        naming.into_iter().any(|claim| self.may_grant(claim) && !self.policy.is_unchecked(claim.rank))
    }

    /// The largest number of GPUs that claims state which are more trusted than `by` and may grant; 1 where
    /// none does.
    fn counted_above(&self, by: &Claim) -> usize {
        let above = self.claims.iter().filter(|claim| claim.rank > by.rank && self.may_grant(claim));
        above.filter_map(|claim| claim.count).max().unwrap_or(1)
    }

    /// The GPUs that are in every claim's list, in the order of the most trusted list. `None` where no claim
    /// has a list.
    fn named(&mut self) -> Result<Option<Least<'a, Vec<&'a Gpu>>>, RequestError> {
        let mut found: Option<Least<Vec<GpuUuid>>> = None;
        for claim in self.claims.clone() {
            let Some(list) = &claim.gpus else { continue };
            let Some(before) = &mut found else {
                found = Some(Least { value: list.clone(), first: claim, bounding: claim });
                continue;
            };
            let common: Vec<GpuUuid> =
                before.value.iter().filter(|gpu| list.contains(gpu)).copied().collect();
            let (is_more, is_less) = (common.len() < list.len(), common.len() < before.value.len());
            if common.is_empty() {
                return Err(self.refused(before.bounding, claim));
            }
            if is_more || is_less && claim.rank == before.bounding.rank {
                self.differ(before.bounding, claim, "the GPUs of both count")?;
            }
            if is_less {
                (before.value, before.bounding) = (common, claim);
            }
        }
        let gpu = |uuid: &GpuUuid| self.node.0.iter().find(|gpu| gpu.uuid == *uuid);
        Ok(found.map(|found| Least {
            value: found.value.iter().filter_map(gpu).collect(),
            first: found.first,
            bounding: found.bounding,
        }))
    }

    /// The smallest value that claims state, compared by `compare`; `None` where none states one.
    fn least<T: Copy>(
        &mut self,
        value: impl Fn(&Claim) -> Option<T>,
        compare: impl Fn(&T, &T) -> Result<Ordering, RequestError>,
    ) -> Result<Option<Least<'a, T>>, RequestError> {
        let mut found: Option<Least<T>> = None;
        for claim in self.claims.clone() {
            let Some(value) = value(claim) else { continue };
            let Some(before) = &mut found else {
                found = Some(Least { value, first: claim, bounding: claim });
                continue;
            };
            let order = compare(&value, &before.value)?;
            if order == Ordering::Greater || order == Ordering::Less && claim.rank == before.bounding.rank {
                self.differ(before.bounding, claim, "the smaller counts")?;
            }
            if order == Ordering::Less {
                (before.value, before.bounding) = (value, claim);
            }
        }
        Ok(found)
    }

    /// Handles a second claim that states more than the first, or something else at the same rank. A strict
    /// node refuses it. Two words in gpushare's own keys come from a person who can mend them, so every node
    /// refuses those. Elsewhere a note says what counts.
    fn differ(&mut self, first: &Claim, second: &Claim, outcome: &str) -> Result<(), RequestError> {
        if self.policy.strict || !first.is_foreign() && !second.is_foreign() {
            return Err(self.refused(first, second));
        }
        self.note(format!("{} and {} differ: {outcome}", first.by, second.by));
        Ok(())
    }

    fn refused(&self, first: &Claim, second: &Claim) -> RequestError {
        match self.policy.strict && second.rank < first.rank {
            true => RequestError::Raised { key: second.by.clone(), trusted: first.by.clone() },
            false => conflict(&first.by, &second.by),
        }
    }

    /// Adds a note unless it is there already: claims are compared once for each GPU.
    fn note(&mut self, note: String) {
        if self.notes.len() < MOST_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Whether the container gets whole GPUs. It does where the most trusted claim with amounts says so and
    /// no other claim states a share.
    fn exclusive(&mut self, spread: &Spread) -> Result<bool, RequestError> {
        let stating: Vec<&Claim> =
            self.claims.iter().copied().filter(|claim| claim.states_amounts()).collect();
        let Some(first) = stating.first() else { return Ok(self.is_whole_by_policy(spread)) };
        for other in &stating[1..] {
            let is_more = other.is_exclusive() && !first.is_exclusive();
            let is_less = first.is_exclusive() && !other.is_exclusive();
            if is_more || is_less && other.rank == first.rank {
                self.differ(first, other, "the share counts")?;
            }
        }
        Ok(stating.iter().all(|claim| claim.is_exclusive()))
    }

    /// Whether the node gives whole GPUs to a container that names GPUs without an amount, and no ceiling is
    /// below a whole GPU.
    fn is_whole_by_policy(&self, spread: &Spread) -> bool {
        let knows_shares = self.asking().any(|claim| claim.takes_defaults);
        let wanted = self.policy.nvidia == NvidiaPolicy::Whole && !knows_shares;
        wanted && spread.gpus.iter().all(|gpu| matches!(self.ceiling_of_default(Some(gpu), spread), Ok(None)))
    }

    /// Computes what the container gets on one GPU.
    fn share(
        &mut self,
        gpu: Option<&'a Gpu>,
        spread: &Spread<'a>,
        exclusive: bool,
    ) -> Result<Granted, RequestError> {
        let uuid = gpu.map(|gpu| gpu.uuid);
        if exclusive {
            self.hold_exclusive(gpu, spread)?;
            let share = Share { memory: MemoryRequest::Percent(100), cores: None };
            return Ok(Granted { gpu: uuid, share, most: None });
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
        let held = |claim: &Claim| {
            let ceilings = self.policy.authority(claim.rank)?;
            Some(ceilings.iter().try_for_each(|ceiling| ceiling.hold_memory(&claim.by, bytes, gpu)))
        };
        let within_card = bytes <= total(gpu)?;
        let grants = |claim: &&&Claim| stated(claim).is_some() || claim.is_exclusive() && within_card;
        let stating = self.claims.iter().filter(|claim| claim.asks).filter(grants);
        let is_default = || Ok(bytes <= on(self.default_memory_of(Some(gpu), spread)?.0, gpu)?);
        granted_by(stating.filter_map(|claim| held(claim)), &least.bounding.by, is_default)?;
        spread.multiplying.and_then(held).unwrap_or(Ok(()))?;
        Ok(value)
    }

    /// Refuses a GPU without a limit where claims state limits for single GPUs only. Such limits say that the
    /// container has no other GPU, so the node's default does not apply to one.
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

    /// Rounds another system's limit to what can be granted: down to whole MiB, at least one. A lenient node
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
        let held = |claim: &Claim| {
            let ceilings = self.policy.authority(claim.rank)?;
            Some(ceilings.iter().try_for_each(|ceiling| ceiling.hold_compute(&claim.by, least.value)))
        };
        let stating = self.claims.iter().filter(|claim| claim.asks && stated(claim).is_some());
        let is_default = || Ok(self.policy.default_cores.is_none_or(|cores| least.value <= cores.into()));
        granted_by(stating.filter_map(|claim| held(claim)), &least.bounding.by, is_default)?;
        spread.multiplying.and_then(held).unwrap_or(Ok(()))?;
        Ok(Some(least.value))
    }

    /// Holds a request for whole GPUs to the ceilings. It exceeds every ceiling below a whole GPU, and every
    /// default.
    fn hold_exclusive(&self, gpu: Option<&Gpu>, spread: &Spread) -> Result<(), RequestError> {
        let held = |claim: &Claim| {
            let ceilings = self.policy.authority(claim.rank)?;
            Some(ceilings.iter().try_for_each(|ceiling| {
                ceiling.hold_compute(&claim.by, Cap::Unlimited)?;
                gpu.map_or(Ok(()), |gpu| ceiling.hold_memory(&claim.by, total(gpu)?, gpu))
            }))
        };
        let stating = self.claims.iter().filter(|claim| claim.is_exclusive() && claim.asks);
        if let Some(first) = stating.clone().next() {
            granted_by(stating.filter_map(|claim| held(claim)), &first.by, || Ok(false))?;
        }
        spread.multiplying.and_then(held).unwrap_or(Ok(()))
    }

    /// The node's default memory for a container that names no size, as far as the node's policy gives one.
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
        let (memory, setting) = self.default_memory_of(gpu, spread)?;
        if let Some(setting) = setting {
            self.note(format!("no memory was asked for: {memory} counts ({setting})"));
        }
        Ok(memory)
    }

    /// The node's default memory on this GPU, and the setting whose ceiling lowered it, if one did.
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
    fn ceiling_of_default(
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
            least = [least, most.map(|most| (most, ceiling.setting()))].into_iter().flatten().min();
        }
        Ok(least)
    }

    /// The most compute that a burst may use; `None` where it is not more than the share on every GPU.
    fn burst(shares: &[Granted]) -> Option<Cores> {
        let least = shares.iter().map(|granted| granted.most).min()??;
        let held = shares.iter().map(|granted| granted.share.cores).max()??;
        let burst = match least {
            Cap::Unlimited => Cores::ALL,
            Cap::Percent(cores) => cores,
        };
        (burst > held).then_some(burst)
    }

    /// The compute policy. A stated policy counts only where it lifts no claim's compute limit.
    fn compute_policy(&self, burst: Option<Cores>, shares: &[Granted]) -> ComputePolicy {
        let stated = self.claims.iter().find_map(|claim| claim.compute_policy).unwrap_or_default();
        let is_free = shares.iter().all(|granted| granted.share.cores.is_none());
        match burst {
            Some(burst) if burst == Cores::ALL && stated == ComputePolicy::None => ComputePolicy::None,
            Some(_) => ComputePolicy::Burst,
            None if is_free => stated,
            None => ComputePolicy::Fixed,
        }
    }

    fn priority(&mut self) -> Result<Priority, RequestError> {
        let Some(least) = self.least(|claim| claim.priority, |a, b| Ok(a.cmp(b)))? else {
            return Ok(Priority::default());
        };
        let granting = self.claims.iter().any(|claim| claim.priority.is_some() && self.may_grant(claim));
        match granting || least.value <= Priority::default() {
            true => Ok(least.value),
            false => Err(RequestError::AboveDefault { key: least.bounding.by.clone() }),
        }
    }

    fn request(
        mut self,
        spread: &Spread<'a>,
        shares: Vec<Granted>,
        exclusive: bool,
    ) -> Result<Request, RequestError> {
        let priority = self.priority()?;
        let devices = match spread.devices() {
            Devices::Among(count, gpus) if gpus.len() == self.node.0.len() => Devices::Any(count),
            devices => devices,
        };
        let whole = || Request { priority, ..Request::whole(devices.clone()) };
        let first = shares.first().filter(|_| !exclusive);
        let share = first.map_or_else(whole, |first| {
            let burst = Self::burst(&shares);
            let particular = shares.iter().filter(|granted| granted.share != first.share);
            Request {
                cores: first.share.cores,
                particular: particular.filter_map(|other| Some((other.gpu?, other.share))).collect(),
                compute_policy: self.compute_policy(burst, &shares),
                burst,
                priority,
                ..Request::new(devices.clone(), first.share.memory)
            }
        });
        let models = self.claims.iter().filter(|claim| claim.model.is_some());
        if let Some(pair) = models.collect::<Vec<_>>().windows(2).find(|pair| pair[0].model != pair[1].model)
        {
            return Err(conflict(&pair[0].by, &pair[1].by));
        }
        let model = self.claims.iter().find_map(|claim| claim.model.clone()).unwrap_or_default();
        let is_pods = self.claims.iter().any(|claim| claim.scope == Some(Scope::Pod));
        let scope = if is_pods { Scope::Pod } else { Scope::Container };
        Ok(Request { model, scope, notes: self.notes, ..share })
    }
}

/// Whether one of the claims that state a value may grant it; `held` has the result for each. Where no claim
/// may grant at all, only the node's default or less is granted.
fn granted_by(
    held: impl Iterator<Item = Result<(), RequestError>>,
    by: &str,
    is_default: impl FnOnce() -> Result<bool, RequestError>,
) -> Result<(), RequestError> {
    let mut first = None;
    for held in held {
        match held {
            Ok(()) => return Ok(()),
            Err(error) => first = first.or(Some(error)),
        }
    }
    match first {
        Some(error) => Err(error),
        None if is_default()? => Ok(()),
        None => Err(RequestError::AboveDefault { key: by.to_owned() }),
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
