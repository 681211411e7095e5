//! The driver's resource manager, called by ioctl.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use nix::errno::Errno;

use crate::abi::put;
use crate::manager::{Manager, Pointed};
use crate::sys;

/// RM in the kernel.
pub struct Kernel {
    /// nvidiactl.
    control: PathBuf,
}

impl Kernel {
    /// RM behind this device file.
    pub fn new(control: PathBuf) -> Self {
        Self { control }
    }
}

impl Manager for Kernel {
    type File = OwnedFd;

    fn call(
        &mut self,
        file: &OwnedFd,
        number: u8,
        structure: &mut [u8],
        pointed: &mut [Pointed<'_>],
    ) -> Result<(), Errno> {
        for Pointed { offset, bytes } in pointed.iter_mut() {
            let address = bytes.as_mut_ptr().expose_provenance() as u64;
            put(structure, *offset, &address.to_ne_bytes());
        }
        let done = sys::manager_call(file.as_fd(), number, structure);
        for Pointed { offset, .. } in pointed.iter() {
            put(structure, *offset, &[0; 8]); // an address of ours is nobody else's business
        }
        done
    }

    /// No GPU's own file is opened, so that none is initialised, or kept so, by us: RM knows those that the container
    /// uses.
    fn open(&mut self) -> Option<OwnedFd> {
        File::options().read(true).write(true).open(&self.control).ok().map(OwnedFd::from)
    }
}
