//! Changes a living lease. At no instant do the containers' files together grant more than the store, or the
//! store more than the node has.

use std::io;

use gpushare_inventory::Gpu;

use super::{Store, StoreError};
use crate::enforcement::Enforcement;
use crate::lease::{Lease, LeaseKey, LeaseState, summary};
use crate::place::{Admission, Refusal};
use crate::update::{Change, changed, narrower};

/// Why a lease was not changed. The lease keeps its old state.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    /// The node has no room for the growth.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The container does not hold such a lease, or the lease ended meanwhile.
    #[error("container {0} holds no share (any more) (`gpushare ps`)")]
    NoLease(LeaseKey),
    /// The container is still being created.
    #[error("container {0} is still being created; try again when it runs")]
    Reserved(LeaseKey),
    /// The lease is of whole GPUs or time slices, which have no limits to change.
    #[error("container {0} holds whole GPUs or time slices, which have no limits to change")]
    Unlimited(LeaseKey),
    /// Memory that grows and shrinks by itself.
    #[error(
        "the memory of container {0} grows and shrinks by itself, within its memory-limit; start it anew with another one to \
         change that"
    )]
    Elastic(LeaseKey),
    /// A compute policy for a container under MPS.
    #[error(
        "container {0} shares its GPU by MPS, which holds compute by its active thread percentage alone; leave the compute \
         policy out"
    )]
    UnderMps(LeaseKey),
    /// The container's `limits` file could not be written.
    #[error(
        "cannot write the limits of container {key}; its share is as it was (an engine in a mount namespace of its own hides \
         them: `gpushare doctor`)"
    )]
    Limits {
        /// The container whose limits file could not be written.
        key: LeaseKey,
        /// The error from the system.
        source: io::Error,
    },
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Store {
    /// Changes the living lease `id` of container `key`, by all of `changes` or none, and returns the lease
    /// before and after. `write` puts a lease's figures into the container's `limits` file. A resource claim
    /// without a container may have no file yet. `write` is called twice while this process has its turn:
    /// first with the lesser of old and new figures, then, once the store has the new ones, with the new
    /// ones. If this process is killed in between, the container has less than the store says, never more,
    /// and [`Store::settle`] repairs that.
    ///
    /// # Errors
    /// When the node has no room, the lease cannot be changed, or the store or the file fails.
    pub fn update(
        &self,
        id: i64,
        key: &LeaseKey,
        changes: &[Change],
        gpus: &[Gpu],
        rules: &Admission,
        mut write: impl FnMut(&Lease) -> io::Result<()>,
    ) -> Result<(Lease, Lease), UpdateError> {
        let mut writing = self.ledger.write()?;
        let loads = writing.page.loads()?;
        let entry = writing.page.lease(id)?.ok_or_else(|| UpdateError::NoLease(key.clone()))?;
        let old = entry.lease.clone().asked_by(|other| other == key);
        let old = old.ok_or_else(|| UpdateError::NoLease(key.clone()))?;
        if !old.enforcement.terms().has_region {
            return Err(UpdateError::Unlimited(key.clone()));
        }
        if old.enforcement == Enforcement::Mps && changes.iter().any(|change| change.compute_policy.is_some())
        {
            return Err(UpdateError::UnderMps(key.clone()));
        }
        if old.state() == LeaseState::Reserved && old.has_containers() {
            return Err(UpdateError::Reserved(key.clone()));
        }
        let load = |gpu| loads.get(&gpu).copied().unwrap_or_default();
        let new = changed(&old, changes, gpus, load, rules)?;
        let limits = |source| UpdateError::Limits { key: key.clone(), source };
        write(&narrower(&old, &new)).map_err(limits)?;
        entry.lease =
            Lease { member: entry.lease.member.clone(), others: entry.lease.others.clone(), ..new.clone() };
        let words = changes.iter().rev().find_map(|one| one.pod_request.clone());
        entry.pod_request = entry.pod_request.take().map(|held| words.unwrap_or(held));
        // The turn lasts until the file has the new figures too.
        let _turn = match writing.commit() {
            Ok(turn) => turn,
            Err(error) => {
                let _ = write(&old);
                return Err(error.into());
            }
        };
        let (container, with) = (&key.container, new.others.len());
        match new.elastic {
            // Log at debug level: the container decides how often this happens.
            Some(_) => tracing::debug!(%container, with, grants = %summary(&new), "lease changed"),
            None => tracing::info!(%container, with, grants = %summary(&new), "lease changed"),
        }
        if let Err(error) = write(&new) {
            tracing::warn!(container = %key.container, %error, "limits left to the meter or the sweep");
        }
        Ok((old, new))
    }

    /// Calls `act` with the lease `id` of container `key` while no other process can change the lease, so
    /// `act` never writes older figures into the container's file than the store has. `None` if there is no
    /// such active lease.
    ///
    /// # Errors
    /// When the store fails, or other processes kept it busy.
    pub fn settle<T>(
        &self,
        id: i64,
        key: &LeaseKey,
        act: impl FnOnce(&Lease) -> T,
    ) -> Result<Option<T>, StoreError> {
        let mut writing = self.ledger.write()?;
        let entry = writing.page.lease(id)?;
        let lease = entry.and_then(|entry| entry.lease.clone().asked_by(|other| other == key));
        let lease = lease.filter(|lease| lease.state() == LeaseState::Active);
        Ok(lease.as_ref().map(act))
    }
}
