//! The one file system of all `limits` files.
//!
//! A container that may open files by handle (CAP_DAC_READ_SEARCH) reaches every file of a file system of
//! which it has a mount. It may write the file where that mount is writable. So containers get this file
//! system only as read-only mounts, and the file that they may write lies on another. The host's own mount
//! stays writable.

use std::fs::{self, DirBuilder, File, Metadata, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};

/// Only the host writes there. A file takes a page, so there is room for 16,000 containers.
const OPTIONS: &str = "size=64m,mode=0700";

/// How long a creation waits for another one that mounts the file system.
const PATIENCE: Duration = Duration::from_secs(5);

/// Makes sure that `folder`, directly below the state folder, is a file system of its own.
pub(super) fn ensure(folder: &Path) -> io::Result<()> {
    if is_mounted(folder)? {
        return Ok(());
    }
    // Of two mounts at once one would lie over the other, and hide a limits file.
    let _turn = locked(state(folder)?)?;
    if is_mounted(folder)? { Ok(()) } else { mount_at(folder) }
}

fn mount_at(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    Ok(mount(Some("gpushare"), folder, Some("tmpfs"), flags, Some(OPTIONS))?)
}

/// Whether `folder` lies on another file system than the state folder.
fn is_mounted(folder: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(folder) {
        Ok(found) => is_other(&found, &fs::metadata(state(folder)?)?),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_other(found: &Metadata, state: &Metadata) -> io::Result<bool> {
    if found.is_dir() { Ok(found.dev() != state.dev()) } else { Err(ErrorKind::NotADirectory.into()) }
}

fn state(folder: &Path) -> io::Result<&Path> {
    folder.parent().ok_or_else(|| ErrorKind::InvalidInput.into())
}

/// Holds the lock of the state folder until the file is closed. Nobody but root can open that folder.
fn locked(state: &Path) -> io::Result<File> {
    let file = File::open(state)?;
    let until = Instant::now() + PATIENCE;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < until => sleep(Duration::from_millis(5)),
            Err(TryLockError::WouldBlock) => return Err(ErrorKind::TimedOut.into()),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}
