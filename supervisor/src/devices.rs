//! Which open files are the resource manager's.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::sys::stat::{SFlag, major};

use crate::sys;

/// A device's identity: of a device node its major and minor number, of any other file that of the file
/// itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Identity {
    Node(u64),
    File(u64, u64),
}

/// Kind of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// nvidiactl, by which RM is called.
    Control,
    /// A GPU's own file.
    Gpu,
    /// nvidia-uvm.
    Uvm,
    /// No file of RM's.
    Other,
}

/// The node's device files.
#[derive(Clone, Debug)]
pub struct Devices {
    control: Identity,
    uvm: Option<Identity>,
    gpus: Vec<Identity>,
}

impl Devices {
    /// The devices that these paths lead to. nvidia-uvm may be missing, where its module is not loaded. A
    /// device node with the control device's major number is a GPU's: `gpus` names files that are no device
    /// nodes.
    ///
    /// # Errors
    /// When one of the others cannot be looked at.
    pub fn find(control: &Path, uvm: &Path, gpus: &[&Path]) -> io::Result<Self> {
        let gpus = gpus.iter().map(|path| identity(path)).collect::<Result<_, _>>()?;
        Ok(Self { control: identity(control)?, uvm: identity(uvm).ok(), gpus })
    }

    /// What an open file is. Nobody's file system is asked for it: it could take its time.
    pub fn kind(&self, file: impl AsFd) -> FileKind {
        let Ok(seen) = sys::glance(file) else { return FileKind::Other };
        let is_node = SFlag::from_bits_truncate(seen.mode) & SFlag::S_IFMT == SFlag::S_IFCHR;
        let identity =
            if is_node { Identity::Node(seen.number) } else { Identity::File(seen.device, seen.inode) };
        match identity {
            one if one == self.control => FileKind::Control,
            one if Some(one) == self.uvm => FileKind::Uvm,
            one if self.gpus.contains(&one) => FileKind::Gpu,
            Identity::Node(number) if self.is_of_the_driver(number) => FileKind::Gpu,
            _ => FileKind::Other,
        }
    }

    fn is_of_the_driver(&self, number: u64) -> bool {
        matches!(self.control, Identity::Node(control) if major(control) == major(number))
    }
}

fn identity(path: &Path) -> io::Result<Identity> {
    let metadata = fs::metadata(path)?;
    let is_node = metadata.file_type().is_char_device();
    Ok(if is_node { Identity::Node(metadata.rdev()) } else { Identity::File(metadata.dev(), metadata.ino()) })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_device_node_of_the_control_devices_driver_is_a_gpus() {
        let devices = Devices::find(Path::new("/dev/null"), Path::new("/nowhere"), &[]).unwrap();
        let kind = |path| devices.kind(File::open(path).unwrap());
        assert_eq!(kind("/dev/null"), FileKind::Control);
        assert_eq!(kind("/dev/zero"), FileKind::Gpu);
        assert_eq!(kind("/proc/self/exe"), FileKind::Other);
        assert_eq!(kind("/dev"), FileKind::Other);
    }

    #[test]
    fn files_that_are_no_device_nodes_are_told_by_themselves() {
        let folder = tempfile::tempdir().unwrap();
        let [control, uvm, gpu, other] = ["a", "b", "c", "d"].map(|name| folder.path().join(name));
        for path in [&control, &uvm, &gpu, &other] {
            fs::write(path, "").unwrap();
        }
        let devices = Devices::find(&control, &uvm, &[&gpu]).unwrap();
        let kind = |path: &Path| devices.kind(File::open(path).unwrap());
        assert_eq!(
            [&control, &uvm, &gpu, &other].map(|path| kind(path)),
            [FileKind::Control, FileKind::Uvm, FileKind::Gpu, FileKind::Other]
        );
        assert_eq!(kind(Path::new("/dev/null")), FileKind::Other);
        assert!(Devices::find(&folder.path().join("none"), &uvm, &[]).is_err());
    }
}
