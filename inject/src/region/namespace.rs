//! The mount namespace in which all regions are mounted.
//!
//! Each container that the node starts copies the mounts of the namespace that it comes from (unshare(2)):
//! with a region among them for each share, plain runc took two thirds more processor time beside 1,000
//! shares. So regions have a namespace of their own, in which no process lives. The file `namespace` among
//! the limits files names it, as namespaces(7) describes.
//!
//! The kernel does not copy the mount of such a file into a namespace that is made later (Linux,
//! fs/namespace.c, `copy_tree`). A process there finds it by way of init's root.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::{Builder, scope};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, CpuSet, sched_getcpu, sched_setaffinity, setns, unshare};
use nix::sys::statfs::{FsType, fstatfs};
use nix::unistd::{Pid, chdir, chroot, pivot_root};

use super::{AWAY, if_there, locked, state};

/// `NSFS_MAGIC` (linux/magic.h).
const NSFS: FsType = FsType(0x6e73_6673);
/// The root of the namespace holds nothing but folders, a mount in each, which take no room.
const OPTIONS: &str = "size=4k,nr_inodes=100k,mode=0700";
const FLAGS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);
const NONE: Option<&str> = None;

/// The file that names the namespace, which may be there or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Namespace {
    file: PathBuf,
}

impl Namespace {
    /// The one beside these limits files, which have a file system of their own.
    pub fn beside(limits: &Path) -> Self {
        Self { file: limits.join("namespace") }
    }

    /// Runs `work` in the namespace, in whose root each region has a folder.
    ///
    /// # Errors
    /// `NotFound` if no such namespace is to be seen from here; else what the system or `work` says.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let namespace = self.open()?.ok_or(ErrorKind::NotFound)?;
        apart(|| {
            setns(&namespace, CloneFlags::CLONE_NEWNS)?;
            work()
        })
    }

    /// Makes the namespace, if it is not there. The folder of limits must be mounted.
    pub fn ensure(&self) -> io::Result<()> {
        // Who may not look at init's root makes one of its own.
        let is_there = || self.open().map(|found| found.is_some()).or_else(no_leave);
        if is_there()? {
            return Ok(());
        }
        let limits = self.file.parent().ok_or(ErrorKind::InvalidInput)?;
        let _turn = locked(state(limits)?)?.ok_or(ErrorKind::TimedOut)?;
        if is_there()? { Ok(()) } else { self.make(limits) }
    }

    fn make(&self, limits: &Path) -> io::Result<()> {
        // A file that names a namespace cannot be mounted where the mount would be passed on to others.
        mount(NONE, limits, NONE, MsFlags::MS_PRIVATE, NONE)?;
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o400).open(&self.file)?;
        let mut namespace = empty_namespace()?;
        for _ in 0..TRIES {
            match self.name(&namespace) {
                Err(Errno::EINVAL) => namespace = younger_namespace()?,
                named => return Ok(named?),
            }
        }
        Err(io::Error::other(
            "the kernel takes every new mount namespace for an older one than this process's",
        ))
    }

    fn name(&self, namespace: &File) -> nix::Result<()> {
        let source = format!("/proc/self/fd/{}", namespace.as_raw_fd());
        mount(Some(&*source), &self.file, NONE, MsFlags::MS_BIND, NONE)
    }

    fn open(&self) -> io::Result<Option<File>> {
        let Some(here) = if_there(File::open(&self.file))? else { return Ok(None) };
        if names_one(&here)? {
            return Ok(Some(here));
        }
        // It was named in another mount namespace, which may be init's.
        let inits = Path::new("/proc/1/root").join(self.file.strip_prefix("/").unwrap_or(&self.file));
        match if_there(File::open(inits))? {
            Some(found) if names_one(&found)? && self.is_inits()? => Ok(Some(found)),
            _ => Ok(None),
        }
    }

    /// Whether init sees the same folder of limits.
    fn is_inits(&self) -> io::Result<bool> {
        let limits = self.file.parent().ok_or(ErrorKind::InvalidInput)?;
        let of_init = Path::new("/proc/1/root").join(limits.strip_prefix("/").unwrap_or(limits));
        let (ours, inits) = (fs::metadata(limits)?, fs::metadata(of_init)?);
        Ok((ours.dev(), ours.ino()) == (inits.dev(), inits.ino()))
    }
}

/// How many new namespaces are tried, all but the first with new numbers.
const TRIES: usize = 8;
/// How many numbers a processor takes at once (Linux, `COOKIE_LOCAL_BATCH`).
const NUMBERS: usize = 4096;

/// Makes namespaces that end with this thread. The kernel mounts the name only of a younger namespace than
/// this process's, and since 6.18 it tells their age by numbers that rise on each processor by itself
/// (kernel/nstree.c, `ns_tree_gen_id`): one with old numbers left has to take new ones.
fn use_up_numbers() -> io::Result<()> {
    (0..NUMBERS).try_for_each(|_| Ok(unshare(CloneFlags::CLONE_NEWUTS)?))
}

/// As [`empty_namespace`], with a number of those that its processor takes anew. A thread that moves to
/// another processor would use up that one's numbers, so this one and those that it makes stay where it begins.
fn younger_namespace() -> io::Result<File> {
    apart(|| {
        let mut here = CpuSet::new();
        // Who may not stay has the other tries.
        let _ = here.set(sched_getcpu()?).and_then(|()| sched_setaffinity(Pid::from_raw(0), &here));
        apart(use_up_numbers)?;
        empty_namespace()
    })
}

fn empty_namespace() -> io::Result<File> {
    let (namespace, root) = apart(|| {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let namespace = File::open("/proc/thread-self/ns/mnt")?;
        // Its own root, from which a chroot of this process may differ.
        setns(&namespace, CloneFlags::CLONE_NEWNS)?;
        become_empty()?;
        Ok((namespace, fs::metadata("/")?.dev()))
    })?;
    let seen = apart(|| {
        setns(&namespace, CloneFlags::CLONE_NEWNS)?;
        Ok(fs::metadata("/")?.dev())
    })?;
    match seen == root {
        true => Ok(namespace),
        false => Err(io::Error::other("a new mount namespace has kept the root of this one")),
    }
}

fn no_leave(error: io::Error) -> io::Result<bool> {
    if error.kind() == ErrorKind::PermissionDenied { Ok(false) } else { Err(error) }
}

/// Whether the open file is a namespace, and not the plain one below.
fn names_one(file: &File) -> io::Result<bool> {
    Ok(fstatfs(file)?.filesystem_type() == NSFS)
}

/// Runs `work` in a thread with a root, folder and, if it wants one, mount namespace of its own.
fn apart<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    scope(|scope| {
        let thread = Builder::new().spawn_scoped(scope, || {
            unshare(CloneFlags::CLONE_FS)?;
            work()
        });
        thread?.join().unwrap_or_else(|_| Err(io::Error::other("the work in another namespace was cut off")))
    })
}

/// Replaces all mounts of this thread's new namespace by one empty root.
fn become_empty() -> io::Result<()> {
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
    // Any folder serves that every root has.
    mount(Some("gpushare"), "/sys", Some("tmpfs"), FLAGS, Some(OPTIONS))?;
    chdir("/sys")?;
    // The old root comes to lie over the new one, and is taken away from there (pivot_root(2)).
    match pivot_root(".", ".") {
        Ok(()) => Ok(umount2(".", MntFlags::MNT_DETACH)?),
        // A node that runs from its initial RAM disk cannot give up that root, which stays below. No mount
        // may stay on it, which the node could not end any more.
        Err(Errno::EINVAL) => {
            let table = fs::read("/proc/thread-self/mountinfo")?;
            mount(Some("."), "/", NONE, MsFlags::MS_MOVE, NONE)?;
            for point in table.split(|byte| *byte == b'\n').filter_map(mount_point).filter(|at| at != b"/") {
                let _ = umount2(&*point, AWAY);
            }
            Ok(chroot(".")?)
        }
        Err(error) => Err(error.into()),
    }
}

/// The mount point in a line of mountinfo, with `\040` and the like as the bytes they stand for
/// (proc_pid_mountinfo(5)).
fn mount_point(line: &[u8]) -> Option<Vec<u8>> {
    let mut rest = line.split(|byte| *byte == b' ').nth(4)?;
    let mut point = Vec::with_capacity(rest.len());
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| *first == b'\\').and_then(|code| std::str::from_utf8(code).ok());
        let escaped = code.and_then(|code| u8::from_str_radix(code, 8).ok());
        point.push(escaped.unwrap_or(*first));
        rest = &after[if escaped.is_some() { 3 } else { 0 }..];
    }
    Some(point)
}

#[cfg(test)]
mod tests;
