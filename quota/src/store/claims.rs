//! Leases of resource claims: reserved by the node's agent before their containers exist.

use gpushare_claims::Request;
use gpushare_inventory::Gpu;

use super::{Store, Swept};
use crate::claim::{ClaimName, ClaimToken, ResourceClaim};
use crate::error::{ReserveError, StoreError};
use crate::holder::Holder;
use crate::lease::{Lease, LeaseKey, Member, Release, ReleaseReason, now};
use crate::ledger::{Entry, Page};
use crate::place::{Admission, place};
use crate::pod::words;

impl Store {
    /// Grants `request` to a claim, for the pods with these UIDs. A claim that already has a lease for an
    /// equal request keeps it, with its token. A claim with a different request gets a new lease, if no
    /// container uses the old one; `swept` is called for the old one.
    ///
    /// # Errors
    /// The same as for [`Store::reserve`]; also when containers use the claim's lease for another request, or
    /// its UID is not valid in a lease key.
    pub fn reserve_claim(
        &self,
        name: &ClaimName,
        pods: Option<&[String]>,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
        mut swept: impl FnMut(&Swept),
    ) -> Result<(ResourceClaim, Lease), ReserveError> {
        let (claim, lease, replaced) = match self.try_reserve_claim(name, pods, request, gpus, rules) {
            Err(ReserveError::Refused(_) | ReserveError::ClaimInUse { .. }) => {
                self.sweep()?.iter().for_each(&mut swept);
                self.try_reserve_claim(name, pods, request, gpus, rules)?
            }
            other => other?,
        };
        replaced.iter().for_each(swept);
        Ok((claim, lease))
    }

    fn try_reserve_claim(
        &self,
        name: &ClaimName,
        pods: Option<&[String]>,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
    ) -> Result<(ResourceClaim, Lease, Vec<Swept>), ReserveError> {
        let key = LeaseKey::of_claim(&name.uid)?;
        let request_words = words(request, gpus)?;
        let mut writing = self.ledger.write()?;
        let page = &mut writing.page;
        let mut released = Vec::new();
        if let Some(Entry { claim: Some(claim), lease, .. }) = page.of(&key)? {
            if claim.request == request_words && claim.name == *name {
                let same = claim.pods.as_deref() == pods;
                claim.pods = pods.map(<[String]>::to_vec);
                let (claim, lease) = (claim.clone(), lease.clone());
                if !same {
                    writing.commit()?;
                }
                return Ok((claim, lease, Vec::new()));
            }
            if !lease.others.is_empty() {
                return Err(ReserveError::ClaimInUse { name: name.clone(), held: claim.request.clone() });
            }
            released.extend(page.take_out(&key, ReleaseReason::Ended)?);
        }
        let loads = page.loads()?;
        let grants = place(request, gpus, |gpu| loads.get(&gpu).copied().unwrap_or_default(), &[], rules)?;
        let id = page.head.next;
        page.head.next += 1;
        let member = Member::reserved(key, Holder::agent());
        let lease = Lease { id, granted_at: now(), ..Lease::new(member, request, grants) };
        let token = ClaimToken::random().map_err(|error| StoreError::io(self.ledger.path(), error))?;
        let pods = pods.map(<[String]>::to_vec);
        let claim = ResourceClaim { name: name.clone(), token, pods, request: request_words };
        page.push(Entry {
            lease: lease.clone(),
            root: LeaseKey::CLAIM.to_owned(),
            sandbox: None,
            pod_request: None,
            claim: Some(claim.clone()),
            former: Vec::new(),
        });
        let replaced = match released.is_empty() {
            true => writing.commit().map(|_| Vec::new())?,
            false => self.settle_releases(writing, released, ReleaseReason::Ended)?,
        };
        tracing::info!(claim = %name, uid = name.uid, lease = id, "lease granted to a claim");
        Ok((claim, lease, replaced))
    }

    /// Allows the pods with these UIDs to use the claim, and no others. Returns whether anything changed.
    /// Does nothing if there is no such claim.
    ///
    /// # Errors
    /// When the store fails.
    pub fn set_claim_pods(&self, uid: &str, pods: Option<&[String]>) -> Result<bool, StoreError> {
        let Ok(key) = LeaseKey::of_claim(uid) else { return Ok(false) };
        let differs = |entry: &Entry| entry.claim.as_ref().is_some_and(|claim| claim.pods.as_deref() != pods);
        // Usually nothing changed; checking that needs no turn.
        if !self.ledger.read()?.of(&key)?.is_some_and(|entry| differs(entry)) {
            return Ok(false);
        }
        let mut writing = self.ledger.write()?;
        let Some(entry) = writing.page.of(&key)?.filter(|entry| differs(entry)) else { return Ok(false) };
        if let Some(claim) = &mut entry.claim {
            claim.pods = pods.map(<[String]>::to_vec);
        }
        writing.commit().map(|_| true)
    }

    /// The request of the claim's lease, in the form of [`words`]; `None` if there is no such claim.
    ///
    /// # Errors
    /// When the store fails.
    pub fn request_of_claim(&self, uid: &str) -> Result<Option<String>, StoreError> {
        let Ok(key) = LeaseKey::of_claim(uid) else { return Ok(None) };
        Ok(self.ledger.read()?.of(&key)?.and_then(|entry| Some(entry.claim.as_ref()?.request.clone())))
    }

    /// Removes a claim from its lease. Containers that still hold the lease keep it until they end. Does
    /// nothing if there is no such claim.
    ///
    /// # Errors
    /// When the store fails.
    pub fn release_claim(&self, uid: &str) -> Result<Option<Swept>, StoreError> {
        let Ok(key) = LeaseKey::of_claim(uid) else { return Ok(None) };
        let Some(lease) = self.lease(&key)?.map(|lease| lease.id) else { return Ok(None) };
        let left = self.release(lease, &key, ReleaseReason::Ended)?;
        Ok(Some(Swept { lease, key, left }).filter(|swept| swept.left != Release::Nothing))
    }

    /// Returns all claims with their leases, oldest first.
    ///
    /// # Errors
    /// When the store fails.
    pub fn claims(&self) -> Result<Vec<(ResourceClaim, Lease)>, StoreError> {
        let entries = self.ledger.read()?.entries()?.into_iter();
        Ok(entries.filter_map(|entry| Some((entry.claim?, entry.lease))).collect())
    }

    /// Returns the claim with this token, and its lease. A released claim has no token, even while its
    /// containers hold the lease.
    ///
    /// # Errors
    /// When the store fails.
    pub fn claim_of(&self, token: &ClaimToken) -> Result<Option<(ResourceClaim, Lease)>, StoreError> {
        let is_its = |entry: &Entry| entry.held_by_claim().is_some_and(|claim| claim.token == *token);
        let mut page = self.ledger.read()?;
        let found = page.find(token.as_str(), is_its)?;
        Ok(found.and_then(|entry| Some((entry.claim.clone()?, entry.lease.clone()))))
    }
}

impl Entry {
    /// Whether it was reserved for a claim, and no container uses it.
    pub(super) fn waits_for_its_first_container(&self) -> bool {
        self.lease.member.holder.is_agent() && self.lease.others.is_empty()
    }

    /// The claim that it was made for, unless the claim was released.
    fn held_by_claim(&self) -> Option<&ResourceClaim> {
        let holds =
            |claim: &&ResourceClaim| self.lease.members().any(|member| member.is_claim(&claim.name.uid));
        self.claim.as_ref().filter(holds)
    }
}

impl Page {
    /// Returns the lease `id` for a container of its claim to join; `None` once the claim was released.
    pub(super) fn claimed(&mut self, id: i64) -> Result<Option<&mut Entry>, StoreError> {
        Ok(self.lease(id)?.filter(|entry| entry.held_by_claim().is_some()))
    }
}
