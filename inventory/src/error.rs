//! Why a node, or one of its GPUs, cannot be given to containers.

use std::path::PathBuf;

use crate::driver::DriverError;
use crate::proc::ProcError;

/// A GPU that the driver shows and that cannot be given to a container. It keeps its index, so the others keep theirs.
#[derive(Debug)]
pub struct SickGpu {
    /// The index that users and NVML count by.
    pub index: u32,
    /// `DOMAIN:BUS:DEVICE.FUNCTION`, as the driver names its folder.
    pub address: String,
    /// What is wrong.
    pub why: NodeError,
}

/// Why the node cannot give GPUs.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The kernel module is not loaded.
    #[error(
        "this node has no NVIDIA driver ({path} is missing); install it and load the nvidia module, or set node.proc_root"
    )]
    NoDriver {
        /// The file that a loaded module shows.
        path: PathBuf,
    },
    /// The kernel module is there, a GPU is not.
    #[error("the NVIDIA driver shows no usable GPU below {path}; see the kernel log and `gpushare doctor`")]
    NoGpu {
        /// The folder with one entry per GPU.
        path: PathBuf,
    },
    /// There are GPUs, and none that could be given.
    #[error("no GPU of this node is in service: {}", told(.sick))]
    NoneInService {
        /// All of them.
        sick: Vec<SickGpu>,
    },
    /// A GPU's file is empty or partial, which the driver does when it could not wake the GPU.
    #[error(
        "{path} does not tell {what}; the GPU may have fallen off the bus: look for Xid in the kernel log (dmesg), and reset the \
         GPU (nvidia-smi -r) or reboot"
    )]
    UnknownGpu {
        /// The file.
        path: PathBuf,
        /// The label that is missing.
        what: &'static str,
    },
    /// A device node is missing or no character device.
    #[error("device node {path} is missing or of another kind; create it with `gpushare system nodes`")]
    NoDeviceNode {
        /// The node.
        path: PathBuf,
    },
    /// A device node of another boot's driver, or of no driver: it would give a container some other device.
    #[error("device node {path} has the number {found}, and the kernel says {wanted}; {remedy}")]
    Number {
        /// The node.
        path: PathBuf,
        /// `MAJOR:MINOR` as it is.
        found: String,
        /// `MAJOR:MINOR` as it should be.
        wanted: String,
        /// Who makes it anew.
        remedy: &'static str,
    },
    /// A `/proc` file could not be used.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// The driver's files could not be located.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

fn told(sick: &[SickGpu]) -> String {
    let one = |gpu: &SickGpu| format!("GPU {} at {}: {}", gpu.index, gpu.address, gpu.why);
    sick.iter().map(one).collect::<Vec<_>>().join("; ")
}
