//! Which GPUs a merged request is for.

use gpushare_inventory::{Gpu, GpuUuid, Profile};

use super::{Least, Merge};
use crate::claim::{Claim, Span};
use crate::devices::{DeviceSelector, Devices};
use crate::error::RequestError;
use crate::words::conflict;

/// The GPUs that the container gets or may get.
pub(super) struct Spread<'a> {
    pub(super) gpus: Vec<&'a Gpu>,
    /// How many of `gpus` the container gets.
    pub(super) wanted: usize,
    /// Whether the container gets exactly `gpus`. Otherwise placement chooses `wanted` of them.
    pub(super) named: bool,
    /// The claim that raises the number of GPUs above what more trusted claims state. Every amount is also
    /// checked against this claim's ceilings.
    pub(super) multiplying: Option<&'a Claim>,
}

impl<'a> Spread<'a> {
    /// Each GPU that the container may get. A node without known GPUs has one candidate, `None`.
    pub(super) fn candidates(&self) -> Vec<Option<&'a Gpu>> {
        match self.gpus.is_empty() {
            true => vec![None],
            false => self.gpus.iter().copied().map(Some).collect(),
        }
    }

    pub(super) fn devices(&self) -> Devices {
        let wanted = u8::try_from(self.wanted).unwrap_or(u8::MAX);
        match self.named {
            true => Devices::These(self.gpus.iter().map(|gpu| DeviceSelector::Uuid(gpu.uuid)).collect()),
            false => Devices::Among(wanted, self.gpus.iter().map(|gpu| gpu.uuid).collect()),
        }
    }
}

/// Whether this is a MIG instance of this size.
fn is_of_size(gpu: &Gpu, profile: &Profile) -> bool {
    gpu.instance.as_ref().is_some_and(|instance| instance.profile == *profile)
}

impl<'a> Merge<'a> {
    pub(super) fn spread(&mut self) -> Result<Spread<'a>, RequestError> {
        let named = self.named()?;
        let count = self.least(|claim| claim.count, |a, b| Ok(a.cmp(b)))?;
        let span = self.asking().map(|claim| claim.span).min().unwrap_or_default();
        let pool = self.pool()?;
        let all = || pool.clone();
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

    /// The GPUs from which placement chooses if no claim names one: instances of the requested size, else the
    /// GPUs that count on this node if none is named.
    fn pool(&self) -> Result<Vec<&'a Gpu>, RequestError> {
        let Some((claim, profile)) = self.profile()? else { return Ok(self.node.unnamed()) };
        let found: Vec<&Gpu> = self.node.all().into_iter().filter(|gpu| is_of_size(gpu, profile)).collect();
        if found.is_empty() && !self.node.0.is_empty() {
            let here = self.node.all().into_iter().filter(|gpu| gpu.instance.is_some());
            let here: Vec<String> = here.map(Gpu::to_string).collect();
            let here = if here.is_empty() { "none".to_owned() } else { here.join(", ") };
            return Err(RequestError::NoSuchInstance { key: claim.by.clone(), here });
        }
        Ok(found)
    }

    /// The MIG instance size that claims ask for, with the first claim that states it.
    fn profile(&self) -> Result<Option<(&'a Claim, &'a Profile)>, RequestError> {
        let mut stated = self.claims.iter().filter_map(|claim| Some((*claim, claim.profile.as_ref()?)));
        let Some(first) = stated.next() else { return Ok(None) };
        match stated.find(|(_, profile)| *profile != first.1) {
            Some((other, _)) => Err(conflict(&first.0.by, &other.by)),
            None => Ok(Some(first)),
        }
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

    /// Refuses several GPUs unless a claim that may grant asks for that many: more than one GPU exceeds the
    /// default.
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

    /// Whether a claim that names several GPUs may multiply an amount that others requested on one GPU.
    fn may_multiply(&self) -> bool {
        let naming = self.claims.iter().filter(|claim| claim.gpus.is_some());
        naming.into_iter().any(|claim| self.may_grant(claim) && !self.policy.is_unchecked(claim.rank))
    }

    /// The largest number of GPUs stated by claims that are more trusted than `by` and may grant; 1 if there
    /// is none.
    fn counted_above(&self, by: &Claim) -> usize {
        let above = self.claims.iter().filter(|claim| claim.rank > by.rank && self.may_grant(claim));
        above.filter_map(|claim| claim.count).max().unwrap_or(1)
    }

    /// The GPUs that are in every claim's list, in the order of the most trusted list. `None` if no claim has
    /// a list.
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
        let Some(Least { value, first, bounding }) = found else { return Ok(None) };
        let value: Vec<&Gpu> = value.iter().filter_map(gpu).collect();
        match self.profile()? {
            Some((claim, profile)) if value.iter().any(|gpu| !is_of_size(gpu, profile)) => {
                Err(conflict(&bounding.by, &claim.by))
            }
            _ => Ok(Some(Least { value, first, bounding })),
        }
    }
}
