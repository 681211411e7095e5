//! The lease store: grants, changes and releases leases in the ledger.

mod claims;
mod pods;
mod update;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::SystemTime;

use gpushare_claims::{Request, Scope};
use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};

use crate::boot::Boot;
use crate::database::database;
use crate::ended;
use crate::error::{ReserveError, StoreError};
use crate::holder::Holder;
use crate::lease::{
    Grant, Lease, LeaseKey, LeaseState, Member, PastLease, Release, ReleaseReason, Used, last, now, summary,
};
use crate::ledger::{Entry, Held, Ledger, Page, Writing};
use crate::place::{Admission, GpuLoad, admit_host_memory, check_begun, place};
use crate::pod::{Pod, words};

pub use update::UpdateError;

/// An open lease store.
#[derive(Debug)]
pub struct Store {
    ledger: Ledger,
    measure: Option<Measure>,
}

/// Sums over all living leases, by GPU.
pub type Loads = BTreeMap<GpuUuid, GpuLoad>;

/// Computes the usage of a lease's containers from their files below the state folder.
pub type Measure = fn(&Path, &Lease) -> Used;

/// A container that the sweep removed from its lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Swept {
    /// The lease's id.
    pub lease: i64,
    /// The removed container.
    pub key: LeaseKey,
    /// The effect on the lease: [`Release::Left`] or [`Release::Ended`].
    pub left: Release,
}

impl Store {
    /// Opens the store below the state folder; creates it if this boot has none.
    ///
    /// # Errors
    /// When it cannot be created, is of an earlier version, or is missing although regions of containers are
    /// left.
    pub fn open(state: &Path) -> Result<Self, StoreError> {
        Ok(Self { ledger: Ledger::open(state)?, measure: None })
    }

    /// Returns a store that records in the history the result of `measure` for each lease that ends.
    #[must_use]
    pub fn measured_by(self, measure: Measure) -> Self {
        Self { measure: Some(measure), ..self }
    }

    /// Opens the store below the state folder if there is one. Does not create one.
    ///
    /// # Errors
    /// When the lookup fails, the store is of an earlier version, or is missing although regions of
    /// containers are left.
    pub fn find(state: &Path) -> Result<Option<Self>, StoreError> {
        let ledger = Ledger::at(state, Boot::here()?);
        match fs::symlink_metadata(ledger.path()) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(StoreError::io(ledger.path(), error)),
            _ if ledger.is_behind() => Err(StoreError::Earlier { path: database(state) }),
            Err(_) => ledger.forbid_regions().map(|()| None),
            Ok(_) => Ok(Some(Self { ledger, measure: None })),
        }
    }

    /// Grants `request` to the container `member`, or returns the reason for a refusal. The holder of
    /// `member` keeps the share until the container is activated. A container of a pod that joins another
    /// container's pid namespace, or that requests the pod's share, becomes a member of the existing lease.
    /// If the node looks full, members whose holders are gone are swept first. `swept` is called for each of
    /// them, since the caller has to remove their files.
    ///
    /// # Errors
    /// When the node has no room for the share, the container already has a share, the pod has a different
    /// one, or the store fails.
    pub fn reserve(
        &self,
        member: &Member,
        pod: Option<&Pod>,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
        swept: impl FnMut(&Swept),
    ) -> Result<Reservation<'_>, ReserveError> {
        let lease = match self.try_reserve(member, pod, request, gpus, rules) {
            Err(ReserveError::Refused(_) | ReserveError::Held(_) | ReserveError::Differs { .. }) => {
                self.sweep()?.iter().for_each(swept);
                // Retry even if the sweep found nothing: another process may have swept meanwhile.
                self.try_reserve(member, pod, request, gpus, rules)?
            }
            other => other?,
        };
        let (container, grants, with) = (&member.key.container, summary(&lease), lease.others.len());
        let pod = member.name.as_ref().map(tracing::field::display);
        tracing::info!(%container, pod, %grants, with, "lease granted");
        Ok(Reservation { store: self, lease })
    }

    fn try_reserve(
        &self,
        member: &Member,
        pod: Option<&Pod>,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
    ) -> Result<Lease, ReserveError> {
        let mut writing = self.ledger.write()?;
        let page = &mut writing.page;
        if page.of(&member.key)?.is_some() {
            return Err(ReserveError::Held(member.key.clone()));
        }
        let of_pod = match (request.scope, pod) {
            (Scope::Container, _) => None,
            (Scope::Pod, Some(_)) => Some(words(request, gpus)?),
            (Scope::Pod, None) => return Err(ReserveError::NoPod(member.key.clone())),
        };
        let root = &member.key.root;
        let loads = page.loads()?;
        let load = |gpu| loads.get(&gpu).copied().unwrap_or_default();
        let joined = match request.reserved {
            Some(id) => Some(page.claimed(id)?.ok_or_else(|| ReserveError::Lost(member.key.clone()))?),
            None => pod.map(|pod| page.joined(root, pod, of_pod.as_deref())).transpose()?.flatten(),
        };
        if let Some(entry) = joined {
            if entry.waits_for_its_first_container() {
                let enforcement = entry.lease.enforcement.begun_by(request);
                // Admission of the other leases assumed the earlier enforcement.
                if enforcement != entry.lease.enforcement {
                    check_begun(&entry.lease, enforcement, gpus, load, rules)?;
                    entry.lease.enforcement = enforcement;
                }
            }
            entry.lease.others.push(member.clone());
            let lease = entry.lease.clone().asked_by(|key| *key == member.key);
            writing.commit()?;
            return lease.ok_or_else(|| ReserveError::Lost(member.key.clone()));
        }
        let near = pod.map(|pod| page.gpus_of(Some(root), pod)).transpose()?.unwrap_or_default();
        let grants = place(request, gpus, load, &near, rules)?;
        admit_host_memory(request, page.host_memory()?, rules)?;
        let id = page.head.next;
        page.head.next += 1;
        let lease =
            Lease { id, granted_at: now(), ..Lease::new(member.clone(), request, grants) }.with_held_policy();
        page.push(Entry {
            lease: lease.clone(),
            root: root.clone(),
            sandbox: pod.map(|pod| pod.sandbox.clone()),
            pod_request: of_pod,
            claim: None,
            former: Vec::new(),
        });
        writing.commit()?;
        Ok(lease)
    }

    /// Returns the grants that [`Store::reserve`] would make now, without making them; for `gpushare plan`.
    /// The runtime root of `pod` is unknown at that point, so its containers are looked up below every root.
    ///
    /// # Errors
    /// The same as for [`Store::reserve`].
    pub fn preview(
        &self,
        pod: Option<&Pod>,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
    ) -> Result<Vec<Grant>, ReserveError> {
        let near = match pod {
            Some(pod) => self.ledger.read()?.gpus_of(None, pod)?,
            None => Vec::new(),
        };
        let placed = |loads: Loads| {
            let load = |gpu| loads.get(&gpu).copied().unwrap_or_default();
            place(request, gpus, load, &near, rules)
        };
        let grants = match placed(self.loads()?) {
            Ok(grants) => grants,
            Err(_) => placed(self.living_loads()?)?, // a creation would sweep leases that are gone
        };
        let living = self.leases()?.into_iter().filter(|lease| !lease.is_gone());
        let host = living.fold(DeviceMemory::ZERO, |sum, lease| sum.saturating_add(lease.host_memory));
        admit_host_memory(request, host, rules)?;
        Ok(grants)
    }

    /// Returns the leases of lower priority that must end to make room for `request`: lowest priority first,
    /// newest first among equals, and no more than needed. Empty if ending them would not make enough room.
    /// Leases of the same pod as `member` stay.
    ///
    /// # Errors
    /// When the store fails.
    pub fn outranked(
        &self,
        member: &Member,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
    ) -> Result<Vec<Lease>, StoreError> {
        let all: Vec<Lease> = self.leases()?.into_iter().filter(|lease| !lease.is_gone()).collect();
        let fits = |without: &[&Lease]| {
            let left = all.iter().filter(|lease| without.iter().all(|other| other.id != lease.id));
            let held: Vec<Held> = left.map(Held::of).collect();
            let host = held.iter().fold(DeviceMemory::ZERO, |sum, held| sum.saturating_add(held.host_memory));
            let loads = sum(held);
            let load = |gpu| loads.get(&gpu).copied().unwrap_or_default();
            place(request, gpus, load, &[], rules).is_ok() && admit_host_memory(request, host, rules).is_ok()
        };
        let pod = |member: &Member| member.name.as_ref().map(|name| name.uid.clone());
        let own = pod(member);
        let is_own = |lease: &Lease| own.is_some() && lease.members().any(|member| pod(member) == own);
        let is_lower = |lease: &&Lease| {
            // Ending the containers does not free a claim's share, or a share that another container is
            // joining.
            let ends = |member: &Member| member.state == LeaseState::Active && !member.holder.is_agent();
            lease.priority < request.priority && lease.members().all(ends) && !is_own(lease)
        };
        let mut lower: Vec<&Lease> = all.iter().filter(is_lower).collect();
        lower.sort_by_key(|lease| (lease.priority, Reverse(lease.granted_at), Reverse(lease.id)));
        let mut ended: Vec<&Lease> = Vec::new();
        for lease in lower {
            if fits(&ended) {
                break;
            }
            ended.push(lease);
        }
        if ended.is_empty() || !fits(&ended) {
            return Ok(Vec::new());
        }
        // Drop victims that are not needed, highest priority first.
        for lease in ended.clone().into_iter().rev() {
            let without: Vec<&Lease> = ended.iter().copied().filter(|other| other.id != lease.id).collect();
            if fits(&without) {
                ended = without;
            }
        }
        Ok(ended.into_iter().cloned().collect())
    }

    /// Makes `holder`, the container's init process, the holder of container `key`'s reservation of the lease
    /// `id`.
    ///
    /// Returns whether `holder` holds it now. A reservation that another process has already activated is
    /// left unchanged.
    ///
    /// # Errors
    /// When the store fails.
    pub fn activate(&self, id: i64, key: &LeaseKey, holder: &Holder) -> Result<bool, StoreError> {
        let mut writing = self.ledger.write()?;
        let entry = writing.page.lease(id)?;
        let Some(member) = entry.and_then(|entry| entry.lease.member_mut(key)) else { return Ok(false) };
        if member.state == LeaseState::Active {
            // runc 1.1.5 calls the hooks of a container without a mount namespace twice.
            return Ok((member.holder.pid, member.holder.start_time) == (holder.pid, holder.start_time));
        }
        (member.state, member.holder) = (LeaseState::Active, holder.clone());
        writing.commit().map(|_| true)
    }

    /// Records that the driver limits the container `key` of the lease `id`, too, and returns the lease at
    /// that moment; `None` if the container does not hold it.
    ///
    /// # Errors
    /// When the store fails.
    pub fn note_driver_limit(&self, id: i64, key: &LeaseKey) -> Result<Option<Lease>, StoreError> {
        let known = self.lease(key)?.filter(|lease| lease.id == id);
        if known.as_ref().is_none_or(|lease| lease.member.has_driver_limit) {
            return Ok(known);
        }
        let mut writing = self.ledger.write()?;
        let entry = writing.page.lease(id)?;
        let Some(member) = entry.and_then(|entry| entry.lease.member_mut(key)) else { return Ok(None) };
        member.has_driver_limit = true;
        let lease = writing.page.asked_by(key)?;
        writing.commit().map(|_| lease)
    }

    /// Removes container `key` from the lease `id`. The lease ends with its last container. Does nothing if
    /// the container does not hold it: a container that was restarted with the same key has a lease with
    /// another id.
    ///
    /// # Errors
    /// When the store fails.
    pub fn release(&self, id: i64, key: &LeaseKey, reason: ReleaseReason) -> Result<Release, StoreError> {
        self.release_if(key, reason, |lease| lease.id == id)
    }

    /// Like [`Store::release`], but only if the container's holder is proved gone.
    ///
    /// # Errors
    /// When the store fails.
    pub fn release_if_gone(
        &self,
        id: i64,
        key: &LeaseKey,
        reason: ReleaseReason,
    ) -> Result<Release, StoreError> {
        self.release_if(key, reason, |lease| lease.id == id && lease.member.holder.is_gone())
    }

    /// Removes all containers whose holders are proved gone from their leases, and returns them.
    ///
    /// # Errors
    /// When the store fails.
    pub fn sweep(&self) -> Result<Vec<Swept>, StoreError> {
        let gone = |lease: &Lease| -> Vec<LeaseKey> {
            let gone = lease.members().filter(|member| member.holder.is_gone());
            gone.map(|member| member.key.clone()).collect()
        };
        // Usually there is nothing to do, so check without the turn first.
        if self.leases()?.iter().all(|lease| gone(lease).is_empty()) {
            return Ok(Vec::new());
        }
        // Check again with the turn: the hook may have activated a lease meanwhile.
        let mut writing = self.ledger.write()?;
        let mut left = Vec::new();
        for key in writing.page.entries()?.iter().flat_map(|entry| gone(&entry.lease)) {
            left.extend(writing.page.take_out(&key, ReleaseReason::Swept)?);
        }
        self.settle_releases(writing, left, ReleaseReason::Swept)
    }

    /// A counter that grows by one with each granted lease.
    ///
    /// # Errors
    /// When the store fails.
    pub fn grants(&self) -> Result<u64, StoreError> {
        Ok(u64::try_from(self.ledger.read()?.head.next - 1).unwrap_or(0))
    }

    /// Checks whether a lease could be written now; for `gpushare doctor`.
    ///
    /// # Errors
    /// When the store is busy, read-only or full.
    pub fn check_writable(&self) -> Result<(), StoreError> {
        self.ledger.write()?.commit().map(drop)
    }

    /// Modification time of the ledger, which changes with every commit, so callers can skip reading
    /// unchanged leases. `None` if it is unknown.
    pub fn last_change(&self) -> Option<SystemTime> {
        fs::metadata(self.ledger.path()).and_then(|metadata| metadata.modified()).ok()
    }

    /// All living leases, oldest first.
    ///
    /// # Errors
    /// When the store fails.
    pub fn leases(&self) -> Result<Vec<Lease>, StoreError> {
        Ok(self.ledger.read()?.entries()?.into_iter().map(|entry| entry.lease).collect())
    }

    /// Returns the lease of one container.
    ///
    /// # Errors
    /// When the store fails.
    pub fn lease(&self, key: &LeaseKey) -> Result<Option<Lease>, StoreError> {
        self.ledger.read()?.asked_by(key)
    }

    /// Whether the lease `id` exists.
    ///
    /// # Errors
    /// When the store fails.
    pub fn stands(&self, id: i64) -> Result<bool, StoreError> {
        Ok(self.ledger.read()?.lease(id)?.is_some())
    }

    /// Returns the leases of all containers with this id, below any runtime root.
    ///
    /// # Errors
    /// When the store fails.
    pub fn leases_by_id(&self, container: &str) -> Result<Vec<Lease>, StoreError> {
        let asked = |lease: Lease| lease.asked_by(|key| key.container == container);
        Ok(self.leases()?.into_iter().filter_map(asked).collect())
    }

    /// Returns the recently ended leases, newest first.
    pub fn history(&self) -> Vec<PastLease> {
        ended::list(self.ledger.state())
    }

    /// Sums per GPU over all living leases.
    ///
    /// # Errors
    /// When the store fails.
    pub fn loads(&self) -> Result<Loads, StoreError> {
        self.ledger.read()?.loads()
    }

    /// Like [`Store::loads`], without the leases whose containers are all gone: the next creation that needs
    /// their room sweeps them.
    ///
    /// # Errors
    /// When the store fails.
    pub fn living_loads(&self) -> Result<Loads, StoreError> {
        let living = self.leases()?.into_iter().filter(|lease| !lease.is_gone());
        Ok(sum(living.map(|lease| Held::of(&lease))))
    }

    fn release_if(
        &self,
        key: &LeaseKey,
        reason: ReleaseReason,
        wanted: impl Fn(&Lease) -> bool,
    ) -> Result<Release, StoreError> {
        // Usually another release was faster. Checking that needs no turn.
        if self.lease(key)?.filter(&wanted).is_none() {
            return Ok(Release::Nothing);
        }
        let mut writing = self.ledger.write()?;
        if writing.page.asked_by(key)?.filter(&wanted).is_none() {
            return Ok(Release::Nothing);
        }
        let left = writing.page.take_out(key, reason)?.into_iter().collect();
        let swept = self.settle_releases(writing, left, reason)?;
        Ok(swept.first().map_or(Release::Nothing, |swept| swept.left))
    }

    /// Commits a ledger from which containers were removed, and records the leases that ended.
    fn settle_releases(
        &self,
        writing: Writing,
        left: Vec<(Lease, Option<PastLease>)>,
        reason: ReleaseReason,
    ) -> Result<Vec<Swept>, StoreError> {
        if left.is_empty() {
            return Ok(Vec::new());
        }
        let _turn = writing.commit()?;
        let settle = |(lease, past): (Lease, Option<PastLease>)| {
            let state = self.ledger.state();
            if let Some(past) = &past {
                let used = self.measure.map(|measure| measure(state, &lease));
                ended::note(state, &PastLease { used, ..past.clone() });
            }
            let left = if past.is_some() { Release::Ended } else { Release::Left };
            lease.log_release(left, reason);
            Swept { lease: lease.id, key: lease.member.key, left }
        };
        Ok(left.into_iter().map(settle).collect())
    }
}

impl Page {
    /// Removes the container `key` from its lease. Returns the lease from the container's view, and the
    /// history record if the lease ended.
    fn take_out(
        &mut self,
        key: &LeaseKey,
        reason: ReleaseReason,
    ) -> Result<Option<(Lease, Option<PastLease>)>, StoreError> {
        let Some(entry) = self.of(key)? else { return Ok(None) };
        let Some(lease) = entry.lease.clone().asked_by(|other| other == key) else { return Ok(None) };
        if let Some(others) = entry.lease.without(key) {
            entry.former = last(entry.former.iter().chain([&key.container]));
            entry.lease = others;
            return Ok(Some((lease, None)));
        }
        let past = PastLease::of(&lease, &entry.former, reason);
        self.remove(lease.id)?;
        Ok(Some((lease, Some(past))))
    }

    /// Returns the lease of a container, with that container as its member.
    fn asked_by(&mut self, key: &LeaseKey) -> Result<Option<Lease>, StoreError> {
        Ok(self.of(key)?.and_then(|entry| entry.lease.clone().asked_by(|other| other == key)))
    }

    /// Sums the host memory of all leases.
    fn host_memory(&self) -> Result<DeviceMemory, StoreError> {
        self.held().try_fold(DeviceMemory::ZERO, |sum, held| Ok(sum.saturating_add(held?.host_memory)))
    }

    /// Sums over all leases, by GPU.
    fn loads(&self) -> Result<Loads, StoreError> {
        Ok(sum(self.held().collect::<Result<Vec<_>, _>>()?))
    }
}

/// Sums by GPU.
fn sum(held: impl IntoIterator<Item = Held>) -> Loads {
    let mut loads = Loads::new();
    for Held { grants, enforcement, compute_policy, .. } in held {
        for grant in &grants {
            loads.entry(grant.gpu).or_default().add(grant, enforcement, compute_policy);
            if let Some(card) = grant.card {
                loads.entry(card).or_default().of_instances += 1;
            }
        }
    }
    loads
}

/// A reserved share. Dropping it releases the share; after a successful execve, drop does not run.
#[must_use = "dropping a reservation gives the share back"]
#[derive(Debug)]
pub struct Reservation<'store> {
    store: &'store Store,
    lease: Lease,
}

impl Reservation<'_> {
    /// The granted lease.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The store that holds it.
    pub fn store(&self) -> &Store {
        self.store
    }

    /// Makes `init`, the container's first process, the holder. The lease then lasts until it is released.
    ///
    /// # Errors
    /// When the store fails, or the reservation was released meanwhile. The share is then released.
    pub fn hand_over(self, init: &Holder) -> Result<(), ReserveError> {
        if !self.store.activate(self.lease.id, &self.lease.member.key, init)? {
            return Err(ReserveError::Lost(self.lease.member.key.clone()));
        }
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let key = &self.lease.member.key;
        if let Err(error) = self.store.release(self.lease.id, key, ReleaseReason::Failed) {
            tracing::warn!(container = %key.container, %error, "reservation left for the sweep");
        }
    }
}

#[cfg(test)]
mod tests;
