//! The mount namespace in which all regions are mounted.
//!
//! Each container that the node starts copies the mounts of the namespace that it comes from (unshare(2)):
//! with a region among them for each share, plain runc took two thirds more processor time beside 1,000
//! shares. So regions have a namespace of their own, in which no process lives. The file `namespace` among the
//! limits files names it, as namespaces(7) describes.
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
use nix::sched::{CloneFlags, CpuSet, sched_getaffinity, sched_setaffinity, setns, unshare};
use nix::sys::statfs::{FsType, fstatfs};
use nix::unistd::{Pid, chdir, chroot, pivot_root};

use super::{if_there, locked, state};

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
        if self.open()?.is_some() {
            return Ok(());
        }
        let limits = self.file.parent().ok_or(ErrorKind::InvalidInput)?;
        let _turn = locked(state(limits)?)?.ok_or(ErrorKind::TimedOut)?;
        if self.open()?.is_some() { Ok(()) } else { self.make(limits) }
    }

    fn make(&self, limits: &Path) -> io::Result<()> {
        // A file that names a namespace cannot be mounted where the mount would be passed on to others.
        mount(NONE, limits, NONE, MsFlags::MS_PRIVATE, NONE)?;
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o400).open(&self.file)?;
        let mut made = self.name(&empty_namespace(limits, None)?);
        // The kernel mounts the name only of a younger namespace than this process's, and 6.18 tells their
        // age by numbers that rise on each processor by itself (kernel/nstree.c, `ns_tree_gen_id`).
        let here = sched_getaffinity(Pid::from_raw(0))?;
        for processor in (0..CpuSet::count()).filter(|processor| here.is_set(*processor) == Ok(true)) {
            if made != Err(Errno::EINVAL) {
                break;
            }
            made = self.name(&empty_namespace(limits, Some(processor))?);
        }
        Ok(made?)
    }

    fn name(&self, namespace: &File) -> nix::Result<()> {
        let source = format!("/proc/self/fd/{}", namespace.as_raw_fd());
        mount(Some(&*source), &self.file, NONE, MsFlags::MS_BIND, NONE)
    }

    fn open(&self) -> io::Result<Option<File>> {
        if let Some(found) = named(&self.file)? {
            return Ok(Some(found));
        }
        let limits = self.file.parent().unwrap_or(&self.file);
        let of_init = Path::new("/proc/1/root").join(limits.strip_prefix("/").unwrap_or(limits));
        let is_same = match (fs::metadata(limits), fs::metadata(&of_init)) {
            (Ok(ours), Ok(inits)) => (ours.dev(), ours.ino()) == (inits.dev(), inits.ino()),
            _ => false,
        };
        if is_same { named(&of_init.join("namespace")) } else { Ok(None) }
    }
}

/// A namespace with an empty root, made on this processor. `mount_point` is any folder.
fn empty_namespace(mount_point: &Path, processor: Option<usize>) -> io::Result<File> {
    apart(|| {
        if let Some(processor) = processor {
            let mut only = CpuSet::new();
            only.set(processor)?;
            sched_setaffinity(Pid::from_raw(0), &only)?;
        }
        unshare(CloneFlags::CLONE_NEWNS)?;
        let namespace = File::open("/proc/thread-self/ns/mnt")?;
        become_empty(mount_point)?;
        Ok(namespace)
    })
}

/// The namespace that the file at `path` names; `None` if it names none.
fn named(path: &Path) -> io::Result<Option<File>> {
    let Some(file) = if_there(File::open(path))? else { return Ok(None) };
    Ok((fstatfs(&file)?.filesystem_type() == NSFS).then_some(file))
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
fn become_empty(mount_point: &Path) -> io::Result<()> {
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
    mount(Some("gpushare"), mount_point, Some("tmpfs"), FLAGS, Some(OPTIONS))?;
    chdir(mount_point)?;
    // The old root comes to lie over the new one, and is taken away from there (pivot_root(2)).
    match pivot_root(".", ".") {
        Ok(()) => Ok(umount2(".", MntFlags::MNT_DETACH)?),
        // A node that runs from its initial RAM disk cannot give up that root, which stays below.
        Err(Errno::EINVAL) => {
            mount(Some("."), "/", NONE, MsFlags::MS_MOVE, NONE)?;
            Ok(chroot(".")?)
        }
        Err(error) => Err(error.into()),
    }
}
