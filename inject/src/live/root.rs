//! The container's root folder, held by descriptor, and the places in it where something is put. The kernel
//! follows the image's links inside the root only. Nothing is made on a mount that is not the container's
//! own.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, makedev, mkdirat, mknodat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, unlinkat};
use oci_spec::runtime::LinuxDevice;

use super::LiveError;
use super::process::{Process, identity};
use crate::image::{kind, relative};
use crate::mount_table::Table;

/// How often a look-up is tried again when somebody disturbs it by renaming folders.
const TRIES: usize = 16;

/// The root folder of a container before pivot_root, in the container's mount namespace.
#[derive(Debug)]
pub(super) struct Root {
    folder: OwnedFd,
    mounts: Table,
    host: Table,
    created: Vec<Created>,
}

/// A file, folder or node that this process made.
#[derive(Debug)]
struct Created {
    folder: OwnedFd,
    name: OsString,
    flag: UnlinkatFlags,
}

impl Root {
    /// Opens the folder that the bundle calls its root, as `process` sees it. `host_root` is its path on the
    /// host.
    pub fn of(process: &Process, host_root: &Path) -> Result<Self, LiveError> {
        let other = || process.is_not_it("does not see the bundle's root folder");
        let host_root =
            std::path::absolute(host_root).map_err(|source| LiveError::io("find", host_root, source))?;
        let folder = look_up(&process.root()?, &host_root, OFlag::O_PATH | OFlag::O_DIRECTORY);
        let folder = folder.map_err(|errno| match errno {
            Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP => other(),
            errno => LiveError::at("find", &host_root, errno),
        })?;
        let seen = stat(&folder, &host_root)?;
        let host = fs::metadata(&host_root).map_err(|source| LiveError::io("look at", &host_root, source))?;
        // After pivot_root a path of the host would be looked up in the image, so the two folders must be the
        // same.
        if identity(&seen) != (host.dev(), host.ino()) {
            return Err(other());
        }
        let own = "/proc/self/mountinfo";
        let own = fs::read(own).map_err(|source| LiveError::io("read", own, source))?;
        let mounts = Table::parse(&process.read("mountinfo")?);
        Ok(Self { folder, mounts, host: Table::parse(&own), created: Vec::new() })
    }

    /// Type, numbers and identity of what `path` names now, mounts included.
    pub fn look_up(&self, path: &Path) -> Result<FileStat, LiveError> {
        let fd = look_up(&self.folder, path, OFlag::O_PATH);
        stat(fd.map_err(|errno| LiveError::at("find", path, errno))?, path)
    }

    /// Opens the regular file at `path` to mount something over it; makes it if it is missing.
    pub fn file(&mut self, path: &Path) -> Result<OwnedFd, LiveError> {
        let (parent, name) = split(path)?;
        let folder = self.folder(parent)?;
        let fd = match look_up(&self.folder, path, OFlag::O_PATH) {
            Ok(fd) => fd,
            Err(Errno::ENOENT) => self.make_file(folder, name, path)?,
            Err(errno) => return Err(LiveError::at("find", path, errno)),
        };
        expect_file(&fd, path)?;
        self.check_mount(&fd, path)?;
        Ok(fd)
    }

    /// Opens the folder at `path`; makes it and its parents where missing.
    pub fn folder(&mut self, path: &Path) -> Result<OwnedFd, LiveError> {
        match look_up(&self.folder, path, OFlag::O_PATH | OFlag::O_DIRECTORY) {
            Ok(fd) => return Ok(fd),
            Err(Errno::ENOENT) => {}
            Err(Errno::ENOTDIR | Errno::ELOOP) => return Err(bad(path, "no folder")),
            Err(errno) => return Err(LiveError::at("find", path, errno)),
        }
        let (parent, name) = split(path)?;
        let folder = self.folder(parent)?;
        self.check_mount(&folder, path)?;
        mkdirat(&folder, name, Mode::from_bits_truncate(0o755)).map_err(|errno| made(path, errno))?;
        self.open_made(folder, name, path, OFlag::O_DIRECTORY, UnlinkatFlags::RemoveDir)
    }

    /// Opens the folder at `path` to mount something over it; makes it if it is missing.
    pub fn folder_target(&mut self, path: &Path) -> Result<OwnedFd, LiveError> {
        let fd = self.folder(path)?;
        self.check_mount(&fd, path)?;
        Ok(fd)
    }

    /// Makes the device node of the plan. One that is there already must be the same device.
    pub fn node(&mut self, device: &LinuxDevice) -> Result<(), LiveError> {
        let path = device.path();
        let (parent, name) = split(path)?;
        let folder = self.folder(parent)?;
        let number = |number: i64| u64::try_from(number).unwrap_or(u64::MAX);
        let wanted = makedev(number(device.major()), number(device.minor()));
        match below(&folder, name, OFlag::O_PATH, None) {
            Ok(fd) => return expect_device(&fd, wanted, path),
            Err(Errno::ENOENT) => {}
            Err(errno) => return Err(made(path, errno)),
        }
        self.check_mount(&folder, path)?;
        let mode = Mode::from_bits_truncate(device.file_mode().unwrap_or(0o600) & 0o7777);
        mknodat(&folder, name, SFlag::S_IFCHR, mode, wanted).map_err(|errno| made(path, errno))?;
        let node = self.open_made(folder, name, path, OFlag::empty(), UnlinkatFlags::NoRemoveDir)?;
        expect_device(&node, wanted, path)?;
        let owner = (device.uid().map(Uid::from_raw), device.gid().map(Gid::from_raw));
        fchownat(&node, "", owner.0, owner.1, AtFlags::AT_EMPTY_PATH).map_err(|errno| made(path, errno))
    }

    /// Removes what was made, newest first. A folder that somebody else uses by now stays.
    pub fn undo(&mut self) {
        while let Some(Created { folder, name, flag }) = self.created.pop() {
            let _ = unlinkat(&folder, name.as_os_str(), flag);
        }
    }

    fn make_file(&mut self, folder: OwnedFd, name: &OsStr, path: &Path) -> Result<OwnedFd, LiveError> {
        self.check_mount(&folder, path)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW;
        let written = below(&folder, name, flags, Some(Mode::from_bits_truncate(0o644)));
        let written = written.map_err(|errno| made(path, errno))?;
        // The descriptor that may write is not kept: it would keep the runtime from making the root
        // read-only.
        let fd = self.open_made(folder, name, path, OFlag::empty(), UnlinkatFlags::NoRemoveDir)?;
        let file = |fd: &OwnedFd| fstat(fd).map(|stat| identity(&stat)).ok();
        if file(&fd).is_none() || file(&fd) != file(&written) {
            return Err(bad(path, "a file that is being replaced"));
        }
        Ok(fd)
    }

    /// Opens `name`, which this process just made in `folder` for `path`, and remembers it for
    /// [`Root::undo`].
    fn open_made(
        &mut self,
        folder: OwnedFd,
        name: &OsStr,
        path: &Path,
        flags: OFlag,
        flag: UnlinkatFlags,
    ) -> Result<OwnedFd, LiveError> {
        let fd = below(&folder, name, flags | OFlag::O_PATH, None);
        self.created.push(Created { folder, name: name.to_owned(), flag });
        fd.map_err(|errno| made(path, errno))
    }

    /// Checks that `fd` lies on the root's own mount or on a memory file system of this container alone. On a
    /// volume an empty file would be made on the host. What is mounted on a shared mount would appear on the
    /// host.
    fn check_mount(&self, fd: impl AsFd, path: &Path) -> Result<(), LiveError> {
        let foreign = || LiveError::Foreign { target: path.into() };
        let unread = |source| LiveError::io("find the mount of", path, source);
        let root = self.mounts.find(&self.folder).map_err(unread)?.ok_or_else(foreign)?;
        let mount = self.mounts.find(fd).map_err(unread)?.ok_or_else(foreign)?;
        if mount.shared {
            return Err(LiveError::Shared { target: path.into() });
        }
        if mount.id == root.id || mount.is_private_tmpfs(&self.host) { Ok(()) } else { Err(foreign()) }
    }
}

/// Opens `path` below `root`, as if `root` were `/`.
fn look_up(root: &OwnedFd, path: &Path, flags: OFlag) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(resolve);
    let mut answers = (0..TRIES).map(|_| openat2(root, relative(path), how));
    answers.find(|answer| !matches!(answer, Err(Errno::EAGAIN))).unwrap_or(Err(Errno::EAGAIN))
}

/// Opens the entry `name` of `folder` itself: no link, and nothing mounted over it.
fn below(folder: &OwnedFd, name: &OsStr, flags: OFlag, mode: Option<Mode>) -> Result<OwnedFd, Errno> {
    let resolve =
        ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(resolve);
    openat2(folder, name, mode.map_or(how, |mode| how.mode(mode)))
}

fn split(path: &Path) -> Result<(&Path, &OsStr), LiveError> {
    let nameless = || bad(path, "no name for a file");
    Ok((path.parent().ok_or_else(nameless)?, path.file_name().ok_or_else(nameless)?))
}

fn bad(path: &Path, what: &'static str) -> LiveError {
    LiveError::BadTarget { target: path.into(), what }
}

fn made(path: &Path, errno: Errno) -> LiveError {
    match errno {
        Errno::EEXIST | Errno::ELOOP => bad(path, "a link that leads nowhere"),
        Errno::EXDEV => LiveError::Foreign { target: path.into() },
        Errno::EROFS => bad(path, "a read-only file system and no such file"),
        errno => LiveError::at("make", path, errno),
    }
}

fn expect_file(fd: &OwnedFd, path: &Path) -> Result<(), LiveError> {
    match kind(&stat(fd, path)?) {
        SFlag::S_IFREG => Ok(()),
        SFlag::S_IFDIR => Err(bad(path, "a folder")),
        _ => Err(bad(path, "a special file")),
    }
}

fn expect_device(fd: &OwnedFd, wanted: u64, path: &Path) -> Result<(), LiveError> {
    let stat = stat(fd, path)?;
    if kind(&stat) == SFlag::S_IFCHR && stat.st_rdev == wanted {
        return Ok(());
    }
    Err(bad(path, "something else than the granted device"))
}

fn stat(fd: impl AsFd, path: &Path) -> Result<FileStat, LiveError> {
    fstat(fd).map_err(|errno| LiveError::at("look at", path, errno))
}
