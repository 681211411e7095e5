//! A region that several containers of a pod share: one of them makes it, the others find it.

use std::fs;
use std::io::{self, ErrorKind};

use gpushare_quota::{Lease, LeaseState};
use gpushare_region::LIMITS_LEN;

use super::{Region, RegionError};

impl Region {
    /// Makes the region of a lease that is its pod's or that others hold already, or finds it complete. A
    /// region that a killed process left half made is made anew: nobody has mounted it.
    ///
    /// # Errors
    /// When it cannot be made, is hidden from this process, or is of another version.
    pub fn join(&self, lease: &Lease) -> Result<(), RegionError> {
        let io = |source| self.io(source);
        let parent = self.folder.parent().unwrap_or(&self.folder);
        super::make_private(parent).map_err(io)?;
        let busy = || RegionError::Busy { path: self.folder.clone() };
        let _turn = super::locked(parent).map_err(io)?.ok_or_else(busy)?;
        if self.is_foreign() {
            return Err(RegionError::Foreign { path: self.folder.clone() });
        }
        let has_files = lease.enforcement.terms().has_region;
        let hidden = || RegionError::Hidden { path: self.folder.clone() };
        let is_whole = self.is_whole(has_files).map_err(io)?;
        if is_whole && !self.is_of_an_earlier_holder(lease) {
            let show = || self.show(&lease.member.key.container);
            let shown = if has_files { show() } else { Ok(()) };
            shown.map_err(|error| if error.kind() == ErrorKind::NotFound { hidden() } else { io(error) })?;
        } else if !is_whole && self.was_whole(lease).map_err(io)? {
            return Err(hidden());
        } else {
            self.remove();
            self.make(lease)?;
        }
        lease.members().try_for_each(|member| self.make_entry(&member.key.container).map(drop)).map_err(io)
    }

    /// Whether a container of the pod has an entry.
    pub fn is_shared(&self) -> bool {
        fs::read_dir(self.members()).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// Whether the region is complete: `limits` is the last part to be written, and no container can change
    /// it.
    fn is_whole(&self, has_limits: bool) -> io::Result<bool> {
        let path = if has_limits { self.limits() } else { self.folder.clone() };
        let found = super::if_there(fs::symlink_metadata(path))?;
        Ok(found.is_some_and(|found| !has_limits || usize::try_from(found.len()) == Ok(LIMITS_LEN)))
    }

    /// Whether it was made for containers that have left a claim's lease, and were held in another way: by
    /// libraries, and now by a supervisor, or the other way round.
    fn is_of_an_earlier_holder(&self, lease: &Lease) -> bool {
        let is_first = lease.others.iter().all(|member| member.holder.is_agent()) && !lease.others.is_empty();
        is_first && self.budgets.path(lease.id).exists() != super::is_supervised(lease)
    }

    /// Whether somebody has the region already, in a mount namespace that this process does not see. A second
    /// region would grant the same share once more.
    fn was_whole(&self, lease: &Lease) -> io::Result<bool> {
        let active = lease.others.iter().any(|member| member.state == LeaseState::Active);
        let mut entries = super::if_there(fs::read_dir(self.members()))?.into_iter().flatten();
        Ok(active || entries.next().is_some())
    }
}

#[cfg(test)]
mod tests;
