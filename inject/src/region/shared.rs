//! A region that several containers of a pod share: one of them makes it, the others find it.
//!
//! Beside the region's folder, a second folder has an entry for each of these containers, made once the
//! region is complete. It tells a process that finds no region whether there is none yet, or whether it is
//! hidden. It also outlasts a quota store that somebody deletes: without it, the end of one container would
//! take away the last trace of the others.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gpushare_quota::{Lease, LeaseState, Member};
use gpushare_region::LIMITS_LEN;

use super::{Region, RegionError};

/// What follows a lease's id in the name of the folder of entries.
pub(super) const MEMBERS: &str = ".members";

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
        if !self.is_whole(lease.enforcement.terms().has_region).map_err(io)? {
            if self.was_whole(lease).map_err(io)? {
                return Err(RegionError::Hidden { path: self.folder.clone() });
            }
            self.remove();
            self.make(lease)?;
        }
        lease.members().try_for_each(|member| self.enter(member)).map_err(io)
    }

    /// Removes the entry of `container`, if it has one.
    pub fn leave(&self, container: &str) {
        if let Some(entry) = self.entry(container) {
            let _ = fs::remove_dir(entry);
        }
    }

    /// Whether a container of the pod has an entry.
    pub fn is_shared(&self) -> bool {
        fs::read_dir(self.members()).is_ok_and(|mut entries| entries.next().is_some())
    }

    pub(super) fn members(&self) -> PathBuf {
        let mut name = self.folder.clone().into_os_string();
        name.push(MEMBERS);
        name.into()
    }

    /// Whether the region is complete: `limits` is the last part to be written, and no container can change
    /// it.
    fn is_whole(&self, has_limits: bool) -> io::Result<bool> {
        let path = if has_limits { self.limits() } else { self.folder.clone() };
        let found = super::if_there(fs::symlink_metadata(path))?;
        Ok(found.is_some_and(|found| !has_limits || usize::try_from(found.len()) == Ok(LIMITS_LEN)))
    }

    /// Whether somebody has the region already, in a mount namespace that this process does not see. A second
    /// region would grant the same share once more.
    fn was_whole(&self, lease: &Lease) -> io::Result<bool> {
        let active = lease.others.iter().any(|member| member.state == LeaseState::Active);
        let mut entries = super::if_there(fs::read_dir(self.members()))?.into_iter().flatten();
        Ok(active || entries.next().is_some())
    }

    fn enter(&self, member: &Member) -> io::Result<()> {
        let container = &member.key.container;
        let entry = self.entry(container).ok_or_else(|| io::Error::other("an id that is no name"))?;
        super::make_private(&self.members())?;
        super::make_private(&entry)
    }

    /// Path of the entry; `None` for an id that would lead out of the folder.
    fn entry(&self, container: &str) -> Option<PathBuf> {
        let plain = Path::new(container).file_name().is_some_and(|name| name == container);
        plain.then(|| self.members().join(container))
    }
}

#[cfg(test)]
mod tests;
