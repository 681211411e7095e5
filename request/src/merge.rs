//! Several sources' claims made one request.
//!
//! The most trusted source that speaks of a thing sets it, and a less trusted one may lower it, as may one that this node lets
//! grant nothing. A strict node refuses what differs or is raised; a lenient one takes the smallest limit and the GPUs that all name, and says so. What nobody states is
//! the node's default, never "no limit".

use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};

use crate::cards::{Cards, total};
use crate::claim::{Amount, Cap, Claim};
use crate::error::RequestError;
use crate::grammar::{Cores, DeviceSelector, Devices, MemoryAsk};
use crate::reading::conflict;
use crate::{ComputePolicy, NvidiaPolicy, Policy, Request, Share};

/// The request that `claims` make together, and what the node decided for itself on the way.
pub(crate) fn merge(
    mut claims: Vec<Claim>,
    policy: &Policy,
    cards: Cards,
) -> Result<(Request, Vec<String>), RequestError> {
    claims.sort_by_key(|claim| std::cmp::Reverse(claim.rank(policy)));
    let mut merge = Merge { policy, cards, most: Vec::new(), notes: Vec::new() };
    let Some(Stated { value: gpus, by: naming }) = merge.gpus(&claims)? else {
        let by = claims.first().map(|claim| claim.by.clone()).unwrap_or_default();
        return Err(RequestError::LimitWithoutGpu { by });
    };
    let exclusive = merge.exclusive(&claims)?;
    // A share of more GPUs than the more trusted count is granted by who names them, too.
    let above =
        claims.iter().filter(|claim| claim.trust.grants(policy) && claim.rank(policy) > naming.rank(policy));
    let counted = above.filter_map(|claim| claim.count).max().unwrap_or(1);
    let naming = Some(naming).filter(|_| gpus.len() > counted);
    let mut shares = Vec::new();
    for gpu in gpus {
        shares.push((gpu.uuid, merge.share(&claims, naming, gpu, exclusive)?));
    }
    let request = merge.request(&claims, shares, exclusive);
    Ok((request, merge.notes))
}

/// Whether a source speaks of amounts at all.
fn states(claim: &Claim) -> bool {
    let share = |amount: &Amount| amount.memory.is_some() || amount.cores.is_some();
    claim.exclusive || share(&claim.each) || claim.particular.iter().any(|(_, amount)| share(amount))
}

struct Merge<'a> {
    policy: &'a Policy,
    cards: Cards<'a>,
    /// The most compute that may be used on each GPU, where it is stated: more than the share for a burst.
    most: Vec<Cap>,
    notes: Vec<String>,
}

/// A value and who stated it.
#[derive(Clone, Copy)]
struct Stated<'a, T> {
    value: T,
    by: &'a Claim,
}

impl<'a> Merge<'a> {
    /// The GPUs that all name who name any, in the order of the most trusted, which is told.
    fn gpus<'c>(&mut self, claims: &'c [Claim]) -> Result<Option<Stated<'c, Vec<&'a Gpu>>>, RequestError> {
        let mut found: Option<Stated<Vec<GpuUuid>>> = None;
        for claim in claims {
            let Some(list) = &claim.gpus else { continue };
            let Some(before) = found.take() else {
                self.may_state(claim)?;
                found = Some(Stated { value: list.clone(), by: claim });
                continue;
            };
            let common: Vec<GpuUuid> =
                before.value.iter().filter(|gpu| list.contains(gpu)).copied().collect();
            let lowers = self.is_below(claim, before.by) && common.len() == list.len();
            let same = common.len() == list.len() && common.len() == before.value.len();
            if common.is_empty() || (self.policy.strict && !same && !lowers) {
                return Err(self.refused(before.by, claim));
            }
            if !same && !lowers {
                self.note(format!(
                    "{} and {} name different GPUs: those of both count",
                    before.by.by, claim.by
                ));
            }
            found = Some(Stated { value: common, by: before.by });
        }
        let gpu = |uuid: &GpuUuid| self.cards.0.iter().find(|gpu| gpu.uuid == *uuid);
        Ok(found.map(|found| Stated { value: found.value.iter().filter_map(gpu).collect(), by: found.by }))
    }

    /// Whether the GPUs are given whole: where the most trusted source that speaks of amounts says so, and no other states a
    /// share.
    fn exclusive(&mut self, claims: &[Claim]) -> Result<bool, RequestError> {
        let mut stating = claims.iter().filter(|claim| states(claim));
        let Some(first) = stating.next() else { return Ok(false) };
        for other in stating {
            let lowers = first.exclusive && self.is_below(other, first);
            if other.exclusive == first.exclusive || lowers && !self.policy.strict {
                continue;
            }
            if self.policy.strict && !lowers {
                return Err(self.refused(first, other));
            }
            self.note(format!("{} and {} differ: the share counts", first.by, other.by));
        }
        let whole = claims.iter().filter(|claim| states(claim)).all(|claim| claim.exclusive);
        if whole {
            self.may_state(first)?;
        }
        Ok(whole)
    }

    /// What is granted of one GPU; `naming` is held to it, too.
    fn share(
        &mut self,
        claims: &[Claim],
        naming: Option<&Claim>,
        gpu: &Gpu,
        exclusive: bool,
    ) -> Result<Share, RequestError> {
        if exclusive {
            for claim in claims.iter().find(|claim| claim.exclusive).into_iter().chain(naming) {
                self.below_ceiling(claim, total(gpu)?, gpu)?;
                self.below_default_cores(claim, Cap::Unlimited)?;
            }
            return Ok(Share { memory: MemoryAsk::Percent(100), cores: None });
        }
        let memory = self.least(claims, |claim| claim.amount_on(gpu.uuid).memory)?;
        let cores = self.least(claims, |claim| claim.amount_on(gpu.uuid).cores)?;
        let most = self.least(claims, |claim| claim.most_compute_on(gpu.uuid))?;
        if let Some(Stated { value, by }) = &most {
            [*by].into_iter().chain(naming).try_for_each(|claim| self.below_default_cores(claim, *value))?;
        }
        let memory = match memory {
            Some(stated) => {
                let memory = self.whole_mebibytes(stated, gpu)?;
                [stated.by]
                    .into_iter()
                    .chain(naming)
                    .try_for_each(|by| self.below_ceiling(by, memory, gpu))?;
                MemoryAsk::Bytes(memory)
            }
            None => self.default_memory(claims, naming, gpu)?,
        };
        let cores = match cores.map(|stated| stated.value) {
            Some(Cap::Percent(cores)) => Some(cores),
            Some(Cap::Unlimited) => None,
            // A whole card has none, but a part of one that a ceiling made of it.
            None => self
                .policy
                .default_cores
                .filter(|_| memory != MemoryAsk::Rest || !self.is_whole_by_policy(claims)),
        };
        self.most.extend(most.map(|most| most.value));
        Ok(Share { memory, cores })
    }

    /// The value that counts of those that claims state.
    fn least<'c, T: Ord + Copy>(
        &mut self,
        claims: &'c [Claim],
        value: impl Fn(&Claim) -> Option<T>,
    ) -> Result<Option<Stated<'c, T>>, RequestError> {
        let mut found: Option<Stated<T>> = None;
        for claim in claims {
            let Some(value) = value(claim) else { continue };
            let Some(before) = found else {
                self.may_state(claim)?;
                found = Some(Stated { value, by: claim });
                continue;
            };
            if value == before.value {
                continue;
            }
            let lowers = self.is_below(claim, before.by) && value < before.value;
            if !lowers && self.policy.strict {
                return Err(self.refused(before.by, claim));
            }
            if !lowers {
                self.note(format!("{} and {} differ: the smaller counts", before.by.by, claim.by));
            }
            if value < before.value {
                // What lowers it is not what it is held against.
                found = Some(Stated { value, by: before.by });
            }
        }
        Ok(found)
    }

    /// A memory limit as it can be granted: whole MiB, at least one, and where the node is lenient at most the card's.
    fn whole_mebibytes(
        &mut self,
        stated: Stated<DeviceMemory>,
        gpu: &Gpu,
    ) -> Result<DeviceMemory, RequestError> {
        const MIB: u64 = 1 << 20;
        let bytes = stated.value.bytes() / MIB * MIB;
        let all = total(gpu)?;
        if bytes == 0 {
            return Err(RequestError::TooSmall { by: stated.by.by.clone() });
        }
        if bytes > all.bytes() && !self.policy.strict {
            self.note(format!("{} is more than GPU {} has: all of it counts", stated.by.by, gpu.index));
            return Ok(all);
        }
        Ok(DeviceMemory::from_bytes(bytes))
    }

    /// The node's default for a container that names a GPU and no size.
    fn default_memory(
        &self,
        claims: &[Claim],
        naming: Option<&Claim>,
        gpu: &Gpu,
    ) -> Result<MemoryAsk, RequestError> {
        if matches!(self.policy.nvidia, NvidiaPolicy::Refuse | NvidiaPolicy::Ignore) {
            return Err(RequestError::NoShare);
        }
        let whole = self.is_whole_by_policy(claims);
        let default = self.policy.default_memory.filter(|_| !whole);
        let bounded = claims.first().into_iter().chain(naming);
        let ceilings = bounded.filter_map(|claim| self.policy.ceilings.of(claim.trust));
        let ceilings: Vec<_> = ceilings.map(|ceiling| ceiling.on(gpu)).collect::<Result<_, _>>()?;
        // A ceiling of the whole card is none: all that is left may be less, and is what there is to give.
        let is_one = |ceiling: &DeviceMemory| gpu.memory.is_none_or(|memory| *ceiling < memory);
        let ceiling = ceilings.into_iter().flatten().filter(is_one).min();
        Ok(match (default, ceiling) {
            (Some(default), Some(ceiling)) => MemoryAsk::Bytes(default.min(ceiling)),
            (Some(memory), None) | (None, Some(memory)) => MemoryAsk::Bytes(memory),
            (None, None) => MemoryAsk::Rest,
        })
    }

    /// Whether the node gives whole cards to whoever names GPUs and no amount.
    fn is_whole_by_policy(&self, claims: &[Claim]) -> bool {
        self.policy.nvidia == NvidiaPolicy::Whole && !claims.iter().any(states)
    }

    /// Says it once: sources are compared for each GPU.
    fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Whether the first of two sources may only lower what the second stated.
    fn is_below(&self, claim: &Claim, other: &Claim) -> bool {
        claim.rank(self.policy) < other.rank(self.policy)
    }

    /// Whether a source of this trust may state what no more trusted one did.
    fn may_state(&self, claim: &Claim) -> Result<(), RequestError> {
        if self.policy.is_unchecked(claim.trust) {
            self.policy.refuse_unread(&claim.by)?;
        }
        if claim.trust.grants(self.policy) {
            Ok(())
        } else {
            Err(RequestError::Untrusted { key: claim.by.clone() })
        }
    }

    fn below_default_cores(&self, claim: &Claim, most: Cap) -> Result<(), RequestError> {
        match self.policy.is_unchecked(claim.trust) {
            true => self.policy.hold_compute(&claim.by, most),
            false => Ok(()),
        }
    }

    /// How much of idle time may be used, where that is more than the share on every GPU.
    fn burst(&self, shares: &[(GpuUuid, Share)]) -> Option<Cores> {
        let least = *self.most.iter().min()?;
        let held = shares.iter().map(|(_, share)| share.cores).max()??;
        let burst = match least {
            Cap::Unlimited => Cores::ALL,
            Cap::Percent(cores) => cores,
        };
        (self.most.len() == shares.len() && burst > held).then_some(burst)
    }

    fn below_ceiling(&self, claim: &Claim, memory: DeviceMemory, gpu: &Gpu) -> Result<(), RequestError> {
        let unchecked = self.policy.is_unchecked(claim.trust);
        for ceiling in self.policy.ceilings_of(claim.trust, unchecked) {
            if let Some(most) = ceiling.on(gpu)?.filter(|most| memory > *most) {
                return Err(ceiling.passed(&claim.by, most));
            }
        }
        Ok(())
    }

    /// What to say of two sources that differ.
    fn refused(&self, first: &Claim, second: &Claim) -> RequestError {
        if self.is_below(second, first) {
            return RequestError::Raised { key: second.by.clone(), trusted: first.by.clone() };
        }
        conflict(&first.by, &second.by)
    }

    fn request(&self, claims: &[Claim], shares: Vec<(GpuUuid, Share)>, exclusive: bool) -> Request {
        let unbounded = || shares.iter().all(|(_, share)| share.memory == MemoryAsk::Rest);
        let whole = exclusive || self.is_whole_by_policy(claims) && unbounded();
        let devices = Devices::These(shares.iter().map(|(gpu, _)| DeviceSelector::Uuid(*gpu)).collect());
        // What goes beyond a share is said by who stated it: a less trusted source may only lower it.
        let rank = |claim: &Claim| claim.rank(self.policy);
        let most = claims.iter().filter(|claim| states(claim)).map(rank).max();
        let mut believed = claims.iter().filter(|claim| Some(rank(claim)) >= most);
        let priority = believed.find_map(|claim| claim.priority).unwrap_or_default();
        let Some((_, first)) = shares.first().filter(|_| !whole) else {
            return Request { priority, ..Request::whole(devices) };
        };
        let burst = self.burst(&shares);
        Request {
            cores: first.cores,
            particular: shares.iter().filter(|(_, share)| share != first).copied().collect(),
            compute_policy: if burst.is_some() { ComputePolicy::Burst } else { ComputePolicy::Fixed },
            burst,
            priority,
            ..Request::new(devices, first.memory)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cards::four;
    use crate::{Ceilings, Container};

    /// gpushare's own annotation beside a variable of HAMi's, on a strict node with this ceiling of variables.
    fn strictly(
        annotations: &[(&str, &str)],
        limit: &str,
        env: Option<&str>,
    ) -> Result<Request, RequestError> {
        let annotations =
            annotations.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        let env = Ceilings { env: env.map(|most| most.parse().unwrap()), ..Ceilings::default() };
        let policy = Policy { strict: true, ceilings: env, ..Policy::default() };
        let env = ["NVIDIA_VISIBLE_DEVICES=0".to_owned(), format!("CUDA_DEVICE_MEMORY_LIMIT={limit}")];
        let container = Container::new(annotations, env.to_vec());
        crate::read(&container, &policy, &four()).map(Option::unwrap)
    }

    #[test]
    fn a_variable_states_no_amount_that_the_trusted_annotation_left_open() {
        let told =
            strictly(&[("alloc.gpushare.io/devices", "0"), ("alloc.gpushare.io/cores", "30")], "9g", None);
        assert!(matches!(told, Err(RequestError::Untrusted { .. })), "{told:?}");
    }

    #[test]
    fn what_a_variable_lowers_is_held_against_the_ceiling_of_who_granted_it() {
        let granted = [("alloc.gpushare.io/devices", "0"), ("alloc.gpushare.io/memory", "8GiB")];
        let request = strictly(&granted, "6g", Some("4GiB")).unwrap();
        assert_eq!(request.memory, MemoryAsk::Bytes(DeviceMemory::from_bytes(6 << 30)));
    }

    #[test]
    fn a_source_that_may_grant_nothing_lowers_what_another_granted() {
        // A pod's annotation, which this node lets grant nothing, counts behind the variables that it does.
        let pod = [("gpushare.io/memory", "2GiB")];
        let request = strictly(&pod, "3g", Some("4GiB")).unwrap();
        assert_eq!(request.memory, MemoryAsk::Bytes(DeviceMemory::from_bytes(2 << 30)));
        let told = strictly(&[("gpushare.io/memory", "4GiB")], "3g", Some("4GiB"));
        assert!(matches!(told, Err(RequestError::Raised { .. })), "{told:?}");
        let scheduler = [("hami.io/vgpu-devices-allocated", "0,NVIDIA,3072,0:;")];
        let request = strictly(&scheduler, "3g", Some("4GiB"));
        assert!(request.is_ok() || format!("{request:?}").contains("hami.io"), "{request:?}");
    }

    #[test]
    fn whoever_may_grant_nothing_adds_no_part_of_the_driver() {
        let plugin = [
            ("tencent.com/vcuda-core", "20"),
            ("tencent.com/vcuda-memory", "1073741824"),
            ("tencent.com/vcuda-device", "/dev/nvidia1"),
        ];
        let read = |env: &[&str], ceiling: Option<&str>| {
            let annotations = plugin.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
            let ceilings = Ceilings { env: ceiling.map(|most| most.parse().unwrap()), ..Ceilings::default() };
            let policy = Policy { strict: true, ceilings, ..Policy::default() };
            let container =
                Container::new(annotations, env.iter().map(|entry| (*entry).to_owned()).collect());
            crate::read(&container, &policy, &four()).map(|request| request.unwrap().capabilities.to_string())
        };
        for env in ["NVIDIA_DRIVER_CAPABILITIES=all", "GPUSHARE_CAPABILITIES=all"] {
            assert_eq!(read(&[env], None).as_deref(), Ok("compute,utility"), "{env}");
        }
        assert!(read(&["NVIDIA_DRIVER_CAPABILITIES=all"], Some("1%")).unwrap().contains("video"));
    }
}
