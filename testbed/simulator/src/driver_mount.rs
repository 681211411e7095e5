//! A driver in a mount of its own, as on machines that get theirs as one image: libraries and programs in
//! `/usr/local/nvidia`, and in `/usr/bin` at most a script that runs them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount, umount};

/// The directory of the driver in a node.
const FOLDER: &str = "driver/usr/local/nvidia";
/// The directory of its libraries.
pub const LIBRARIES: &str = "driver/usr/local/nvidia/lib64";
/// The directory of its programs.
pub const PROGRAMS: &str = "driver/usr/local/nvidia/bin";

/// Makes the directory of the driver a read-only mount.
pub fn attach(dir: &Path) -> Result<()> {
    let folder = dir.join(FOLDER);
    let bind = |source: Option<&Path>, flags: MsFlags| {
        mount(source, &folder, None::<&str>, MsFlags::MS_BIND | flags, None::<&str>)
    };
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let made = bind(Some(&folder), MsFlags::empty()).and_then(|()| bind(None, read_only));
    made.with_context(|| format!("cannot mount {}", folder.display()))
}

/// Unmounts that directory, if it is mounted.
pub fn detach(dir: &Path) -> Result<()> {
    let folder = dir.join(FOLDER);
    match umount(&folder) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT | Errno::EPERM) => Ok(()),
        Err(error) => bail!("cannot unmount {}: {error}", folder.display()),
    }
}

/// Makes `/usr/bin/nvidia-smi` of the node a script that runs the program in the driver's directory.
pub fn write_script(dir: &Path) -> Result<()> {
    let program = dir.join(PROGRAMS).join("nvidia-smi").display().to_string().replace('\'', r"'\''");
    let script = dir.join("driver/usr/bin/nvidia-smi");
    fs::write(&script, format!("#!/bin/sh\nexec '{program}' \"$@\"\n")).context("cannot write the script")?;
    Ok(fs::set_permissions(script, Permissions::from_mode(0o755))?)
}
