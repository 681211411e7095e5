//! Gives a lease back: takes the container out of the quota store, then removes what the state folder keeps
//! for it.

use gpushare_quota::{Lease, LeaseKey, Release, ReleaseReason, StateFolder, Store, StoreError, Swept};

use crate::region::Region;
use crate::supervision::Record;
use crate::used::open_measured;

/// Which containers may lose their share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Only a container whose holder is proved gone. Else the memory of a living container could be granted
    /// twice.
    GoneOnes,
    /// Any container: the caller knows that it has ended.
    Anyones,
}

/// Takes the container `key` out of the lease with this id. Succeeds also when the container holds no lease.
///
/// # Errors
/// When the store fails. The sweep then finds the lease.
pub fn give_back(
    state: &StateFolder,
    store: &Store,
    lease: i64,
    key: &LeaseKey,
    reason: ReleaseReason,
    whose: Whose,
) -> Result<Release, StoreError> {
    let left = match whose {
        Whose::GoneOnes => store.release_if_gone(lease, key, reason)?,
        Whose::Anyones => store.release(lease, key, reason)?,
    };
    forget(state, lease, key, left);
    Ok(left)
}

/// Gives back the share of a container that has ended. If the store cannot be asked, the region is removed
/// all the same, unless other containers of the pod hold the lease.
///
/// # Errors
/// As [`give_back`].
pub fn give_back_ended(state: &StateFolder, lease: i64, key: &LeaseKey) -> Result<(), StoreError> {
    let released = release_ended(state, lease, key);
    let left = match released {
        Ok(left) => left,
        // No new store is made while a region is left, since its container might run. This one has ended.
        Err(_) => without_store(&Region::of(state.path(), lease), &key.container),
    };
    forget(state, lease, key, left);
    released.map(drop)
}

/// What became of the lease. One that is not in the store has ended: the runtime's `delete` may have been
/// first.
fn release_ended(state: &StateFolder, lease: i64, key: &LeaseKey) -> Result<Release, StoreError> {
    let store = open_measured(state)?;
    match store.release(lease, key, ReleaseReason::Ended)? {
        Release::Nothing if store.stands(lease)? => Ok(Release::Left),
        Release::Nothing => Ok(Release::Ended),
        left => Ok(left),
    }
}

fn without_store(region: &Region, container: &str) -> Release {
    region.leave(container);
    if region.is_shared() { Release::Left } else { Release::Ended }
}

/// Removes the regions of leases that do not stand: whoever ended such a lease was killed before its region
/// went.
///
/// # Errors
/// When the store fails.
pub fn forget_ended(state: &StateFolder, store: &Store) -> Result<(), StoreError> {
    // Listed before the leases: a region that is made meanwhile belongs to a lease that stands by then.
    let regions = Region::existing(state.path());
    let living = store.leases()?;
    for id in regions.into_iter().filter(|id| !living.iter().any(|lease| lease.id == *id)) {
        Record::remove_all(state.path(), id);
        Region::of(state.path(), id).remove();
    }
    Ok(())
}

/// Takes away what is kept for a container that the store's sweep took out of its lease.
pub fn forget_swept(state: &StateFolder, swept: &Swept) {
    forget(state, swept.lease, &swept.key, swept.left);
}

/// Removes what the state folder keeps for a container, and with the lease's last container the region.
fn forget(state: &StateFolder, lease: i64, key: &LeaseKey, left: Release) {
    let region = Region::of(state.path(), lease);
    match left {
        Release::Nothing => {}
        Release::Left => {
            Record::remove(state.path(), key, lease);
            region.leave(&key.container);
        }
        Release::Ended => {
            // Those of others too, of which whoever removed them from the lease was killed.
            Record::remove_all(state.path(), lease);
            region.remove();
        }
    }
}

/// On drop, removes what is kept for a container that was not started. It is dropped after the reservation,
/// which takes the container out of the store. A successful execve never drops it.
pub(crate) struct Undo<'a> {
    store: &'a Store,
    state: &'a StateFolder,
    lease: i64,
    key: LeaseKey,
}

impl<'a> Undo<'a> {
    /// For the container that `lease` was just reserved for.
    pub fn of(store: &'a Store, state: &'a StateFolder, lease: &Lease) -> Self {
        Self { store, state, lease: lease.id, key: lease.member.key.clone() }
    }

    /// Keeps everything: the container has its plan.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        // If the store cannot be asked, lease and region are left to the sweep.
        match self.store.stands(self.lease) {
            Ok(true) => forget(self.state, self.lease, &self.key, Release::Left),
            Ok(false) => forget(self.state, self.lease, &self.key, Release::Ended),
            Err(error) => {
                tracing::warn!(container = %self.key.container, %error, "region left for the sweep")
            }
        }
    }
}
