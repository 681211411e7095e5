//! How a lease is given back: the container goes out of the quota store, then what is kept for it below the state folder.

use gpushare_quota::{Lease, LeaseKey, Release, ReleaseReason, StateFolder, Store, StoreError, Swept};

use crate::region::Region;

/// Which containers' shares are given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Only one whose holder is proved gone: a living container's memory would be granted twice.
    GoneOnes,
    /// Any: the caller knows that the container has ended.
    Anyones,
}

/// Takes the container `key` out of the lease with this id. A container that holds none is success.
///
/// # Errors
/// When the store fails; the sweep then finds the lease.
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

/// Gives back the share of a container that has ended, whether or not the store can be asked: then its region goes,
/// unless other containers of its pod hold the lease.
///
/// # Errors
/// As [`give_back`].
pub fn give_back_ended(state: &StateFolder, lease: i64, key: &LeaseKey) -> Result<(), StoreError> {
    let released = release_ended(state, lease, key);
    let left = match released {
        Ok(left) => left,
        // A new store is not made beside the region of a container that might run.
        Err(_) => without_store(&Region::of(state.path(), lease), &key.container),
    };
    forget(state, lease, key, left);
    released.map(drop)
}

/// What became of the lease; one that is gone has ended, since `delete` may have been first.
fn release_ended(state: &StateFolder, lease: i64, key: &LeaseKey) -> Result<Release, StoreError> {
    let store = Store::open(state.path())?;
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

/// Takes away what is kept for a container that the store's sweep took out of its lease.
pub fn forget_swept(state: &StateFolder, swept: &Swept) {
    forget(state, swept.lease, &swept.key, swept.left);
}

/// Takes away what is kept in the state folder for a container, and the region with the lease's last one.
fn forget(state: &StateFolder, lease: i64, key: &LeaseKey, left: Release) {
    let region = Region::of(state.path(), lease);
    match left {
        Release::Nothing => {}
        Release::Left => region.leave(&key.container),
        Release::Ended => region.remove(),
    }
}

/// Takes away on drop what is kept for a container that is not there yet. A successful execve never drops it. The
/// reservation is dropped before, and takes the container out of the store.
pub(crate) struct Undo<'a> {
    store: &'a Store,
    state: &'a StateFolder,
    lease: i64,
    key: LeaseKey,
}

impl<'a> Undo<'a> {
    /// Of the container that `lease` was just reserved for.
    pub fn of(store: &'a Store, state: &'a StateFolder, lease: &Lease) -> Self {
        Self { store, state, lease: lease.id, key: lease.member.key.clone() }
    }

    /// The container is there: nothing is undone.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        // A lease that cannot be asked for is left to the sweep, and so is its region.
        match self.store.stands(self.lease) {
            Ok(true) => forget(self.state, self.lease, &self.key, Release::Left),
            Ok(false) => forget(self.state, self.lease, &self.key, Release::Ended),
            Err(error) => {
                tracing::warn!(container = %self.key.container, %error, "region left for the sweep")
            }
        }
    }
}
