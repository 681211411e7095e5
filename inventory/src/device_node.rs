//! Character device nodes: path, number and rights of a node, and the number that it should have according to
//! the kernel.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};

use crate::error::NodeError;
use crate::proc;
use crate::roots::Roots;

/// The NVIDIA driver's fixed major number.
pub(crate) const MAJOR: u32 = 195;
pub(crate) const CONTROL_MINOR: u32 = 255;
pub(crate) const MODESET_MINOR: u32 = 254;

/// A character device of the host, as a container gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// Path in the container, which is also that on an ordinary host (`/dev/nvidia0`).
    pub path: PathBuf,
    /// Path on this host, below the dev root.
    pub host_path: PathBuf,
    /// Major number of the device.
    pub major: u32,
    /// Minor number of the device.
    pub minor: u32,
    /// Permission bits, without the file type.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Id of the group.
    pub gid: u32,
}

/// Turns a missing node into `None`, for devices that not every host has.
pub(crate) fn where_made(node: Result<DeviceNode, NodeError>) -> Result<Option<DeviceNode>, NodeError> {
    match node {
        Ok(node) => Ok(Some(node)),
        Err(NodeError::NoDeviceNode { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads a node of the driver. Its numbers must be those of this boot's driver, because a container gets a
/// device rule for them.
pub(crate) fn nvidias_node(
    dev_root: &Path,
    name: &str,
    (major, minor): (u32, u32),
) -> Result<DeviceNode, NodeError> {
    let wanted = format!("{major}:{minor}");
    device_node(dev_root, name)?.numbered(&wanted, "make it anew with `gpushare system nodes`")
}

impl DeviceNode {
    /// Whether `path`, after following links, is a character device with this node's number.
    pub fn is_at(&self, path: &Path) -> bool {
        let found = fs::metadata(path).ok().filter(|metadata| metadata.file_type().is_char_device());
        found.is_some_and(|metadata| numbers(metadata.rdev()) == (self.major, self.minor))
    }

    /// The link through which systemd finds the node (`/dev/char/195:255` on an ordinary host), and its
    /// expected target.
    pub fn char_link(&self, roots: &Roots) -> (PathBuf, PathBuf) {
        let link = roots.dev.join(format!("dev/char/{}:{}", self.major, self.minor));
        let below = self.path.strip_prefix("/dev").unwrap_or(&self.path);
        (link, Path::new("..").join(below))
    }

    /// Returns the node if its number is `wanted` (`MAJOR:MINOR`), else an error with `remedy`.
    pub(crate) fn numbered(self, wanted: &str, remedy: &'static str) -> Result<Self, NodeError> {
        let found = format!("{}:{}", self.major, self.minor);
        if found == wanted {
            return Ok(self);
        }
        Err(NodeError::Number { path: self.host_path, found, wanted: wanted.to_owned(), remedy })
    }
}

/// Major numbers of the character devices in `/proc/devices`, by whole names: some names are prefixes of
/// others.
pub(crate) fn majors(proc_root: &Path) -> Result<BTreeMap<String, u32>, NodeError> {
    let text = proc::read(&proc_root.join("proc/devices"))?;
    let lines = text.lines().skip_while(|line| *line != "Character devices:").skip(1);
    let entries = lines.take_while(|line| !line.is_empty()).filter_map(|line| {
        let (major, name) = line.trim().split_once(' ')?;
        Some((name.trim().to_owned(), major.parse().ok()?))
    });
    Ok(entries.collect())
}

/// Major numbers of all of the driver's character devices: GPUs, UVM, and those of MIG instances.
///
/// # Errors
/// When `/proc/devices` cannot be read.
pub fn nvidias_majors(proc_root: &Path) -> Result<Vec<u64>, NodeError> {
    let named = majors(proc_root)?.into_iter().filter(|(name, _)| name.starts_with("nvidia"));
    Ok(named.map(|(_, major)| major.into()).chain([MAJOR.into()]).collect())
}

pub(crate) fn device_node(dev_root: &Path, name: &str) -> Result<DeviceNode, NodeError> {
    let host_path = dev_root.join("dev").join(OsStr::new(name));
    let missing = || NodeError::NoDeviceNode { path: host_path.clone() };
    let metadata = fs::symlink_metadata(&host_path).map_err(|_| missing())?;
    if !metadata.file_type().is_char_device() {
        return Err(missing());
    }
    let (major, minor) = numbers(metadata.rdev());
    Ok(DeviceNode {
        path: Path::new("/dev").join(name),
        major,
        minor,
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        host_path,
    })
}

/// Splits a device number into major and minor.
pub(crate) fn numbers(device: u64) -> (u32, u32) {
    let number = |number| u32::try_from(number).unwrap_or(u32::MAX);
    (number(major(device)), number(minor(device)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_the_number_that_the_kernel_says_or_is_none() {
        // /dev/null exists everywhere and is 1:3.
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("dev")).unwrap();
        let null = |wanted: &str| device_node(Path::new("/"), "null").unwrap().numbered(wanted, "do it");
        assert_eq!(null("1:3").unwrap().path, Path::new("/dev/null"));
        for wanted in ["195:3", "1:1", "", "1:3\n"] {
            let error = null(wanted).unwrap_err();
            assert!(matches!(error, NodeError::Number { .. }), "{wanted:?}: {error}");
            assert!(where_made(Err(error)).is_err(), "{wanted:?}");
        }
        let error = nvidias_node(Path::new("/"), "null", (195, 255)).unwrap_err().to_string();
        assert!(
            ["/dev/null", "1:3", "195:255", "system nodes"].iter().all(|part| error.contains(part)),
            "{error}"
        );
        assert_eq!(where_made(device_node(root.path(), "nvidia-uvm")).unwrap(), None);
    }

    #[test]
    fn device_numbers_split_as_the_kernel_packs_them() {
        assert_eq!((major(0xc3ff), minor(0xc3ff)), (195, 255));
        assert_eq!((major(0x0001_ff34), minor(0x0010_0034)), (511, 0x134));
    }
}
