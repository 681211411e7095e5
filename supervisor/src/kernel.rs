//! The driver's resource manager, called by ioctl.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::abi::put;
use crate::books::Gpu;
use crate::manager::{Manager, Pointed};
use crate::sys;

/// RM in the kernel.
#[derive(Clone)]
pub struct Kernel {
    /// nvidiactl.
    control: PathBuf,
    /// The GPUs' own files, by their lines in the lease.
    gpus: Vec<PathBuf>,
}

impl Kernel {
    /// Creates access to RM through nvidiactl and the lease's GPU files.
    pub fn new(control: PathBuf, gpus: Vec<PathBuf>) -> Self {
        Self { control, gpus }
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
            put(structure, *offset, &[0; 8]); // do not leak an address of ours
        }
        done
    }

    fn copy(&self, file: &OwnedFd) -> Option<OwnedFd> {
        file.try_clone().ok()
    }

    fn open(&mut self) -> Option<OwnedFd> {
        open(&self.control)
    }

    fn open_gpu(&mut self, gpu: Gpu) -> Option<OwnedFd> {
        open(self.gpus.get(gpu)?)
    }
}

fn open(path: &Path) -> Option<OwnedFd> {
    File::options().read(true).write(true).open(path).ok().map(OwnedFd::from)
}
