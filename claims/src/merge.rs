//! Several sources' claims made one request: of each bound the meet of all that speak of it.
//!
//! Claims are taken by rank. A less trusted one may say less, and counts then; what it says more is refused on a strict
//! node, and cut and noted elsewhere. Who grants is held to the ceilings of its channel, and a strict node wants
//! somebody who may grant for whatever is more than the node's default. What nobody states is that default, never
//! "no limit". Nothing here knows a vendor.

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

/// The request that `claims` make together on a node with these GPUs.
///
/// # Errors
/// When they contradict each other, name nothing that the node has, or none of them may grant.
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

/// A bundle may hold a hundred thousand entries that differ.
const MOST_NOTES: usize = 32;

struct Merge<'a> {
    /// The most trusted first.
    claims: Vec<&'a Claim>,
    policy: &'a Policy,
    node: NodeGpus<'a>,
    notes: Vec<String>,
}

/// Which GPUs the request is about.
struct Spread<'a> {
    gpus: Vec<&'a Gpu>,
    /// How many of them it gets.
    wanted: usize,
    /// Whether it gets all of them; else placement chooses.
    named: bool,
    /// Who makes them more than the more trusted count: it is held to what it may grant, too.
    multiplying: Option<&'a Claim>,
}

impl<'a> Spread<'a> {
    /// Each GPU that it may get; where none of the node's is known, one that nobody knows.
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

/// The least of what several claims state.
struct Least<'a, T> {
    value: T,
    /// The most trusted claim that states it.
    first: &'a Claim,
    /// The one that made it the least.
    bounding: &'a Claim,
}

/// What is granted of one GPU.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Granted {
    gpu: Option<GpuUuid>,
    share: Share,
    /// The most compute that may be used, where it is stated: more than the share for a burst.
    most: Option<Cap>,
}

impl<'a> Merge<'a> {
    fn may_grant(&self, claim: &Claim) -> bool {
        self.policy.authority(claim.rank).is_some()
    }

    fn asking(&self) -> impl Iterator<Item = &'a Claim> {
        self.claims.iter().copied().filter(|claim| claim.asks)
    }

    /// Somebody who may grant has to ask; words of images that nobody checked are no request where lists are none.
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

    /// How many of the GPUs that are named it gets.
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

    /// More than one GPU is more than the default: somebody who may grant has to say so many.
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

    /// Whether somebody who names GPUs may make several of what others ask for on one.
    fn may_multiply(&self) -> bool {
        let naming = self.claims.iter().filter(|claim| claim.gpus.is_some());
        naming.into_iter().any(|claim| self.may_grant(claim) && !self.policy.is_unchecked(claim.rank))
    }

    /// How many GPUs those that are believed more than `by` count.
    fn counted_above(&self, by: &Claim) -> usize {
        let above = self.claims.iter().filter(|claim| claim.rank > by.rank && self.may_grant(claim));
        above.filter_map(|claim| claim.count).max().unwrap_or(1)
    }

    /// The GPUs that all name who name any, in the order of the most trusted.
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

    /// The least of what the claims state.
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

    /// Two claims of which the second says more, or another thing at the same rank. Two words of gpushare's own are a
    /// person's: these are told on every node.
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

    /// Says it once: sources are compared for each GPU.
    fn note(&mut self, note: String) {
        if self.notes.len() < MOST_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Whether the GPUs are given whole: where the most trusted source that speaks of amounts says so, and no other
    /// states a share.
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

    /// Whether the node gives whole cards to whoever names GPUs and no amount, as far as ceilings leave them whole.
    fn is_whole_by_policy(&self, spread: &Spread) -> bool {
        let knows_shares = self.asking().any(|claim| claim.takes_defaults);
        let wanted = self.policy.nvidia == NvidiaPolicy::Whole && !knows_shares;
        wanted && spread.gpus.iter().all(|gpu| matches!(self.ceiling_of_default(Some(gpu), spread), Ok(None)))
    }

    /// What is granted of one GPU.
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

    /// Limits of single GPUs say that the container has no other: one that nobody speaks of is no default's.
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

    /// Another system's limit as it can be granted: whole MiB, at least one, and where the node is lenient at most the card's.
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

    /// Whole cards are more than any ceiling below them, and than any default.
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

    /// The node's default for a container that names no size.
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

    /// The same, and the setting that bounds it.
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

    /// The most that those may grant on a GPU who ask for it. A ceiling of the whole card is none: all that is left may
    /// be less, and is what there is to give.
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

    /// How much of idle time may be used, where that is more than the share on every GPU.
    fn burst(shares: &[Granted]) -> Option<Cores> {
        let least = shares.iter().map(|granted| granted.most).min()??;
        let held = shares.iter().map(|granted| granted.share.cores).max()??;
        let burst = match least {
            Cap::Unlimited => Cores::ALL,
            Cap::Percent(cores) => cores,
        };
        (burst > held).then_some(burst)
    }

    /// The compute policy; a word for it counts as far as nobody's cap is lifted by it.
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

/// Whether one of those that state a value may grant it. Without any, no more than the node's default is granted.
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

/// Which of two amounts is less, on a GPU where they are not of one kind. All that is left is the most.
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

/// An amount in bytes on this GPU.
fn on(memory: MemoryRequest, gpu: &Gpu) -> Result<DeviceMemory, RequestError> {
    Ok(match memory {
        MemoryRequest::Bytes(memory) => memory,
        MemoryRequest::Percent(percent) => total(gpu)?.percent(percent),
        MemoryRequest::Rest => total(gpu)?,
    })
}
