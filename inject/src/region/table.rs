//! The one file system of all `limits` files.
//!
//! A container that may open files by handle (CAP_DAC_READ_SEARCH) reaches every file of a file system of
//! which it has a mount. It may write the file where that mount is writable. So containers get this file
//! system only as read-only mounts, and the file that they may write lies on another. The host's own mount
//! stays writable.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MsFlags, mount};

use super::{if_there, locked, make_private, state};

/// Only the host writes there. A file takes a page, so there is room for 16,000 containers.
const OPTIONS: &str = "size=64m,mode=0700";

/// Makes sure that `folder`, directly below the state folder, is a file system of its own.
pub(super) fn ensure(folder: &Path) -> io::Result<()> {
    if is_mounted(folder)? {
        return Ok(());
    }
    // Of two mounts at once one would lie over the other, and hide a limits file.
    let _turn = locked(state(folder)?)?.ok_or(ErrorKind::TimedOut)?;
    if is_mounted(folder)? { Ok(()) } else { mount_at(folder) }
}

fn mount_at(folder: &Path) -> io::Result<()> {
    make_private(folder)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    Ok(mount(Some("gpushare"), folder, Some("tmpfs"), flags, Some(OPTIONS))?)
}

/// Whether `folder` lies on another file system than the state folder.
fn is_mounted(folder: &Path) -> io::Result<bool> {
    let Some(found) = if_there(fs::symlink_metadata(folder))? else { return Ok(false) };
    match found.is_dir() {
        true => Ok(found.dev() != fs::metadata(state(folder)?)?.dev()),
        false => Err(ErrorKind::NotADirectory.into()),
    }
}
