//! Merges the claims of all sources into one request. The smallest statement of each limit counts.
//!
//! Claims are compared by rank. A less trusted claim may ask for less, and then it counts. If it asks for
//! more, a strict node refuses it; other nodes cut it and add a note. Claims that grant are held to the
//! ceilings of their channel. On a strict node anything above the node's default needs a claim that may
//! grant. An amount that no claim states gets the node's default, never "no limit". This module knows no
//! other system's keys.

mod amounts;
mod spread;

use std::cmp::Ordering;

use gpushare_inventory::DeviceMemory;

use crate::claim::Claim;
use crate::devices::Devices;
use crate::error::RequestError;
use crate::gpus::NodeGpus;
use crate::grammar::{ComputePolicy, MemoryRequest, Mode, Priority, Scope};
use crate::policy::{NvidiaPolicy, Policy};
use crate::rank::Rank;
use crate::request::Request;
use crate::words::conflict;
use amounts::Granted;
use spread::Spread;

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
    let mode = merge.mode(&spread)?;
    let mut shares = Vec::new();
    for gpu in spread.candidates() {
        shares.push(merge.share(gpu, &spread, mode)?);
    }
    merge.request(&spread, shares, mode)
}

/// The note for a container that takes turns on a GPU.
const TIME_SLICE: &str =
    "time-slice: nothing limits the container's memory and compute, nor those of the containers beside it";

/// Limits the number of notes, since a bundle may hold a hundred thousand conflicting entries.
const MOST_NOTES: usize = 32;

struct Merge<'a> {
    /// Sorted by rank, the most trusted first.
    claims: Vec<&'a Claim>,
    policy: &'a Policy,
    node: NodeGpus<'a>,
    notes: Vec<String>,
}

/// The smallest value that several claims state.
struct Least<'a, T> {
    value: T,
    /// The most trusted claim that states any value.
    first: &'a Claim,
    /// The claim that states the smallest value.
    bounding: &'a Claim,
}

impl<'a> Merge<'a> {
    fn may_grant(&self, claim: &Claim) -> bool {
        self.policy.authority(claim.rank).is_some()
    }

    fn asking(&self) -> impl Iterator<Item = &'a Claim> {
        self.claims.iter().copied().filter(|claim| claim.asks)
    }

    /// Refuses the request if none of the claims that ask may grant. If lists of GPUs in variables are no
    /// request, also refuses it if only words of unchecked images ask.
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

    /// The smallest value that claims state, compared by `compare`; `None` if no claim states one.
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

    /// Handles a second claim that states more than the first, or something different at the same rank. A
    /// strict node refuses it. If both use gpushare's own keys, every node refuses them, because their author
    /// can fix them. Otherwise a note says which one counts.
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

    /// Adds a note unless it is already there: claims are compared once for each GPU.
    fn note(&mut self, note: String) {
        if self.notes.len() < MOST_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// How the container gets its GPUs: never more than any claim states. A limit is less than turns without
    /// a limit.
    fn mode(&mut self, spread: &Spread) -> Result<Mode, RequestError> {
        if self.exclusive(spread)? {
            return Ok(Mode::Exclusive);
        }
        let stated = |claim: &Claim| claim.mode.filter(|mode| *mode != Mode::Exclusive);
        let Some(least) = self.least(stated, |a, b| Ok(a.cmp(b)))? else { return Ok(Mode::Share) };
        if least.value == Mode::Share {
            return Ok(Mode::Share);
        }
        if least.value == Mode::Mps {
            return self.mps();
        }
        let turns = least.first;
        // A memory amount from the author of the time-slice request is the expected need, not a limit. This
        // needs at least a pod's rank: images write variables, too.
        let is_need =
            |claim: &Claim| !claim.is_foreign() && claim.rank == turns.rank && claim.rank >= Rank::Pod;
        let limiting = |claim: &&Claim| claim.mode.is_none() && claim.states_amounts() && !is_need(claim);
        let limits: Vec<&Claim> = self.claims.iter().copied().filter(limiting).collect();
        for limit in limits.iter().filter(|limit| limit.rank >= turns.rank) {
            self.differ(limit, turns, "the share counts")?;
        }
        Ok(if limits.is_empty() { least.value } else { Mode::Share })
    }

    /// Chooses MPS if a claim asks for it that is trusted as far as every claim that states a mode or
    /// amounts. Under MPS a neighbour's fault also hits this container, so an image must not choose it over a
    /// more trusted author.
    fn mps(&mut self) -> Result<Mode, RequestError> {
        let asking = self.claims.iter().copied().find(|claim| claim.mode == Some(Mode::Mps));
        let first = self.claims.iter().copied().find(|claim| claim.states_amounts());
        match (first, asking) {
            (Some(first), Some(asking)) if asking.rank < first.rank => {
                self.differ(first, asking, "the share counts")?;
                Ok(Mode::Share)
            }
            _ => Ok(Mode::Mps),
        }
    }

    /// Whether the container gets whole GPUs. It does if the most trusted claim with amounts says so and no
    /// other claim states a share.
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

    /// Refuses what MPS does not support: several GPUs, since a program reaches only one control daemon, and
    /// limiting compute other than by thread percentage.
    fn refuse_beside_mps(&self, devices: &Devices) -> Result<(), RequestError> {
        let mode = self.claims.iter().find(|claim| claim.mode == Some(Mode::Mps));
        let mode = mode.map_or("", |claim| &claim.by);
        if devices.count(self.node.0.len()) > 1 {
            return Err(RequestError::SeveralUnderMps { key: mode.to_owned() });
        }
        let held_otherwise = |claim: &&Claim| claim.compute_policy.is_some() && !claim.is_foreign();
        match self.claims.iter().copied().find(held_otherwise) {
            Some(claim) => Err(RequestError::PolicyUnderMps { key: claim.by.clone(), mode: mode.to_owned() }),
            None => Ok(()),
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

    /// Refuses the latency policy for a container without a compute limit, or from an author who may not
    /// choose it.
    fn check_latency(&mut self, request: &Request) -> Result<(), RequestError> {
        if request.compute_policy != ComputePolicy::Latency {
            let stated = self.claims.iter().find_map(|claim| claim.compute_policy);
            if stated == Some(ComputePolicy::Latency) && request.mode != Mode::Exclusive {
                let (share, most) = (request.cores.unwrap_or(crate::Cores::ALL), request.burst);
                self.note(format!(
                    "compute-policy=latency counts as {}: it has {} percent of compute and may use {}; latency \
                     needs less than all, and no ceiling",
                    request.compute_policy.name(),
                    share.percent(),
                    most.unwrap_or(share).percent(),
                ));
            }
            return Ok(());
        }
        let mut asking = self.claims.iter().filter(|one| one.compute_policy == Some(ComputePolicy::Latency));
        let key = asking.clone().next().map_or_else(String::new, |claim| claim.by.clone());
        if request.cores.is_none() {
            return Err(RequestError::LatencyWithoutCores { key });
        }
        let is_granted = asking.any(|claim| self.may_grant(claim));
        if is_granted { Ok(()) } else { Err(RequestError::AboveDefault { key }) }
    }

    /// The host memory that may stand in for GPU memory. It is a resource of the node for which the settings
    /// have no ceilings, so at least one of the claims that state it must be allowed to grant without
    /// ceilings.
    fn host_memory(&mut self, mode: Mode) -> Result<DeviceMemory, RequestError> {
        let Some(least) = self.least(|claim| claim.host_memory, |a, b| Ok(a.cmp(b)))? else {
            return Ok(DeviceMemory::ZERO);
        };
        let is_free = |claim: &Claim| self.policy.authority(claim.rank).is_some_and(|all| all.is_empty());
        let may = |claim: &&Claim| {
            claim.host_memory.is_some() && is_free(claim) && !self.policy.is_unchecked(claim.rank)
        };
        if !self.asking().any(|claim| may(&claim)) {
            return Err(RequestError::AboveDefault { key: least.bounding.by.clone() });
        }
        match mode {
            Mode::Share | Mode::Mps => Ok(least.value),
            Mode::TimeSlice | Mode::Exclusive => {
                Err(conflict(&least.bounding.by, format!("mode {}, which has no limit to pass", mode.name())))
            }
        }
    }

    /// The most memory to which the container may grow on each GPU. While no other container needs the
    /// memory, this is worth as much as a share of that size. It therefore needs a claim that is trusted as
    /// far as every claim that states amounts, and a claim that may grant without ceilings.
    fn memory_limit(&mut self, shares: &[Granted], mode: Mode) -> Result<Option<DeviceMemory>, RequestError> {
        let Some(least) = self.least(|claim| claim.memory_limit, |a, b| Ok(a.cmp(b)))? else {
            return Ok(None);
        };
        let key = || least.bounding.by.clone();
        if matches!(mode, Mode::TimeSlice | Mode::Exclusive) {
            return Err(conflict(key(), format!("mode {}, which has no limit to pass", mode.name())));
        }
        let is_free = |claim: &Claim| self.policy.authority(claim.rank).is_some_and(|all| all.is_empty());
        let may = |claim: &Claim| {
            claim.memory_limit.is_some() && is_free(claim) && !self.policy.is_unchecked(claim.rank)
        };
        if !self.asking().any(may) {
            return Err(RequestError::AboveDefault { key: key() });
        }
        let first = self.claims.iter().copied().find(|claim| claim.states_amounts());
        if let Some(first) = first.filter(|first| least.first.rank < first.rank) {
            self.differ(first, least.first, "the smaller counts")?;
            return Ok(None);
        }
        let mut memory = shares.iter().map(|granted| granted.share.memory);
        let same = memory.next().filter(|first| memory.all(|other| other == *first));
        match same.and_then(MemoryRequest::bytes) {
            Some(promised) if promised == least.value => Ok(None),
            Some(promised) if promised < least.value => Ok(Some(least.value)),
            _ => Err(RequestError::LimitWithoutMemory { key: key() }),
        }
    }

    fn request(
        mut self,
        spread: &Spread<'a>,
        shares: Vec<Granted>,
        mode: Mode,
    ) -> Result<Request, RequestError> {
        let priority = self.priority()?;
        let host_memory = self.host_memory(mode)?;
        let memory_limit = self.memory_limit(&shares, mode)?;
        let devices = match spread.devices() {
            Devices::Among(count, gpus) if gpus.len() == self.node.0.len() => Devices::Any(count),
            devices => devices,
        };
        let whole = || Request { priority, ..Request::whole(devices.clone()) };
        let first = shares.first().filter(|_| mode != Mode::Exclusive);
        let share = first.map_or_else(whole, |first| {
            let burst = Self::burst(&shares).filter(|_| mode != Mode::Mps);
            let particular = shares.iter().filter(|granted| granted.share != first.share);
            let compute_policy = self.compute_policy(burst, &shares);
            Request {
                cores: first.share.cores,
                particular: particular.filter_map(|other| Some((other.gpu?, other.share))).collect(),
                compute_policy,
                burst,
                priority,
                mode,
                memory_limit,
                host_memory,
                ..Request::new(devices.clone(), first.share.memory)
            }
        });
        self.check_latency(&share)?;
        let models = self.claims.iter().filter(|claim| claim.model.is_some());
        if let Some(pair) = models.collect::<Vec<_>>().windows(2).find(|pair| pair[0].model != pair[1].model)
        {
            return Err(conflict(&pair[0].by, &pair[1].by));
        }
        let model = self.claims.iter().find_map(|claim| claim.model.clone()).unwrap_or_default();
        let is_pods = self.claims.iter().any(|claim| claim.scope == Some(Scope::Pod));
        let scope = if is_pods { Scope::Pod } else { Scope::Container };
        match mode {
            Mode::TimeSlice => self.note(TIME_SLICE.to_owned()),
            Mode::Mps => self.refuse_beside_mps(&devices)?,
            Mode::Share | Mode::Exclusive => {}
        }
        let needs_supervisor = self.claims.iter().any(|claim| claim.supervisor.is_some());
        Ok(Request { model, scope, needs_supervisor, notes: self.notes, ..share })
    }
}
