//! Where a low-level runtime finds `usage`, which it mounts into a container.
//!
//! Each container of a lease has an entry, a folder beside the region's. While the container is being made,
//! the region is mounted there too; once the container has the mount, the host's goes, so that other
//! containers do not copy it.
//!
//! The entries are made once the region is complete. To a process that finds no region they tell whether
//! there is none yet, or whether it is hidden. They also outlast a quota store that somebody deletes: without
//! them, the end of one container would take away the last trace of its pod's others.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::umount2;
use nix::sys::stat::{major, minor};

use super::{AWAY, Region, make_private, usage_name};
use crate::sys;

/// What follows a lease's id in the name of the folder of entries.
const MEMBERS: &str = ".members";
/// How much of a container's mount table is read. A line has some hundred bytes, and a container with more
/// than the kernel's 100,000 mounts there is none.
const LONGEST_TABLE: u64 = 32 << 20;

impl Region {
    /// Path of `usage` on the host, for the low-level runtime alone: it is gone once the container has it.
    pub fn staged(&self, container: &str) -> PathBuf {
        self.members().join(container).join(usage_name())
    }

    /// Shows the region to the low-level runtime that makes `container`.
    ///
    /// # Errors
    /// `NotFound` when the region is not to be seen from here; else what the system says.
    pub(super) fn show(&self, container: &str) -> io::Result<()> {
        let tree = self.namespace.enter(|| self.copy());
        // Earlier versions mounted regions on the host.
        let tree = tree.or_else(|error| match error.kind() {
            ErrorKind::NotFound if self.folder.join(usage_name()).exists() => copy_of(&self.folder),
            _ => Err(error),
        })?;
        self.attach(&tree, container)
    }

    /// A second mount of the region, attached nowhere yet. Call this in the namespace of all regions.
    pub(super) fn copy(&self) -> io::Result<OwnedFd> {
        copy_of(&self.place())
    }

    /// Attaches a copy for the low-level runtime.
    pub(super) fn attach(&self, tree: &OwnedFd, container: &str) -> io::Result<()> {
        let entry = File::open(self.make_entry(container)?)?;
        Ok(sys::move_mount(tree.as_raw_fd(), entry.as_raw_fd())?)
    }

    /// Takes the region out of the host's mounts again, if the container whose first process is `init` has
    /// it. Some low-level runtimes may run their hooks before they mount; then it stays for as long as the
    /// container.
    ///
    /// # Errors
    /// When the container's mounts cannot be read, or the mount not be taken away.
    pub fn hide(&self, container: &str, init: i32) -> io::Result<()> {
        let Some(entry) = self.entry(container) else { return Ok(()) };
        let shown = fs::metadata(&entry)?.dev();
        let device = format!("{}:{}", major(shown), minor(shown));
        let file = format!("/{}", usage_name());
        // Device and the path on it (proc_pid_mountinfo(5)). The host's own mount is of the whole file
        // system.
        let has_it = |line: &[u8]| {
            let mut fields = line.split(|byte| *byte == b' ').skip(2);
            fields.next() == Some(device.as_bytes()) && fields.next() == Some(file.as_bytes())
        };
        let mut table = Vec::new();
        File::open(format!("/proc/{init}/mountinfo"))?.take(LONGEST_TABLE).read_to_end(&mut table)?;
        match table.split(|byte| *byte == b'\n').any(has_it) {
            true => Ok(umount2(&entry, AWAY)?),
            false => Ok(()),
        }
    }

    /// As [`Region::hide`], for a container that does not get `usage`.
    pub(crate) fn hide_from_all(&self, container: &str) {
        let _ = self.entry(container).map(|entry| umount2(&entry, AWAY));
    }

    /// Removes the entry of `container` and its loader's cache, if it has them.
    pub fn leave(&self, container: &str) {
        self.remove_loader_cache(container);
        if let Some(entry) = self.entry(container) {
            // A creation that was killed and tried again has left two.
            while umount2(&entry, AWAY).is_ok() {}
            let _ = fs::remove_dir(entry);
        }
    }

    /// Removes all entries and their folder.
    pub(super) fn leave_all(&self) {
        let entries = fs::read_dir(self.members()).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).for_each(|name| self.leave(&name));
        let _ = fs::remove_dir(self.members());
    }

    /// Makes the entry of a container, if it is not there, and returns its path.
    pub(super) fn make_entry(&self, container: &str) -> io::Result<PathBuf> {
        let entry = self.entry(container).ok_or_else(|| io::Error::other("an id that is no name"))?;
        make_private(&self.members())?;
        make_private(&entry)?;
        Ok(entry)
    }

    /// The folder of entries.
    pub(super) fn members(&self) -> PathBuf {
        let mut name = self.folder.clone().into_os_string();
        name.push(MEMBERS);
        name.into()
    }

    /// Path of the entry; `None` for an id that would lead out of the folder.
    fn entry(&self, container: &str) -> Option<PathBuf> {
        let plain = Path::new(container).file_name().is_some_and(|name| name == container);
        plain.then(|| self.members().join(container))
    }
}

/// A second mount of what is mounted at `path`, attached nowhere yet.
fn copy_of(path: &Path) -> io::Result<OwnedFd> {
    Ok(sys::clone_tree(File::open(path)?.as_fd())?)
}
