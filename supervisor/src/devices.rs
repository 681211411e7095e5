//! Identifies open files of the resource manager.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::sys::stat::{SFlag, major};

use crate::sys;

/// A device's identity: the major and minor number of a device node, or the identity of any other file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Identity {
    Node(u64),
    File(u64, u64),
}

/// Kind of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// nvidiactl, the control device of RM.
    Control,
    /// A GPU's own file.
    Gpu,
    /// nvidia-uvm.
    Uvm,
    /// Any other file.
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
    /// Finds the devices at these paths. nvidia-uvm may be missing if its module is not loaded. A device node
    /// with the control device's major number belongs to a GPU: `gpus` names files that are not device nodes.
    ///
    /// # Errors
    /// If one of the others cannot be read.
    pub fn find(control: &Path, uvm: &Path, gpus: &[&Path]) -> io::Result<Self> {
        let gpus = gpus.iter().map(|path| identity(path)).collect::<Result<_, _>>()?;
        Ok(Self { control: identity(control)?, uvm: identity(uvm).ok(), gpus })
    }

    /// Returns the kind of an open file. Does not query the file system, which could block.
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
