//! Why a node or one of its GPUs cannot be used.

use std::path::PathBuf;

use crate::driver::DriverError;
use crate::mig::InstanceId;
use crate::proc::ProcError;
use crate::uuid::GpuUuid;

/// A GPU that the driver shows but that cannot be given to a container. It keeps its index, so that the
/// others keep theirs.
#[derive(Debug)]
pub struct SickGpu {
    /// Index in NVML, in the order of PCI addresses.
    pub index: u32,
    /// PCI address from the driver's folder for the GPU, `DOMAIN:BUS:DEVICE.FUNCTION`.
    pub address: String,
    /// Why it cannot be given.
    pub why: NodeError,
}

/// Why the node cannot give GPUs to containers.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The kernel module is not loaded.
    #[error(
        "this node has no NVIDIA driver ({path} is missing); install it and load the nvidia module, or set node.proc_root"
    )]
    NoDriver {
        /// The file that a loaded module would show.
        path: PathBuf,
    },
    /// The kernel module is loaded, but shows no GPU.
    #[error("the NVIDIA driver shows no usable GPU below {path}; see the kernel log and `gpushare doctor`")]
    NoGpu {
        /// The folder with one entry per GPU.
        path: PathBuf,
    },
    /// There are GPUs, but none of them can be given to a container.
    #[error("no GPU of this node is in service: {}", told(.sick))]
    NoneInService {
        /// All GPUs, each with its reason.
        sick: Vec<SickGpu>,
    },
    /// A GPU's file is empty or incomplete. This happens if the driver could not wake the GPU.
    #[error(
        "{path} does not tell {what}; the GPU may have fallen off the bus: look for Xid in the kernel log (dmesg), and reset the \
         GPU (nvidia-smi -r) or reboot"
    )]
    UnknownGpu {
        /// Path of the GPU's `information` file.
        path: PathBuf,
        /// The missing label.
        what: &'static str,
    },
    /// The kernel log has an error after which new containers do not get the GPU.
    #[error(
        "the driver reported {why} in this boot (kernel log, gpushare meter); drain and reset it (nvidia-smi -r), then run \
         `gpushare uncordon {gpu}`"
    )]
    Faulty {
        /// The GPU.
        gpu: GpuUuid,
        /// Number and text of the error.
        why: String,
    },
    /// The GPU is in MIG mode, and has no instance that a container could get.
    #[error(
        "MIG mode is on and {gpu} has no compute instance; make some (nvidia-smi mig -cgi PROFILE -C), or turn MIG mode off and \
         run `gpushare inventory refresh`"
    )]
    NoInstance {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// NVML reports an instance that `/proc` does not show, or the reverse, or the instance lacks data that a
    /// request could name.
    #[error(
        "MIG instance {id} of {gpu} ({name:?}) is known to NVML or to /proc alone, or not wholly; run `gpushare inventory \
         refresh`, and see the kernel log"
    )]
    UnknownInstance {
        /// The GPU that contains it.
        gpu: GpuUuid,
        /// The instance's ids.
        id: InstanceId,
        /// Its name in NVML.
        name: String,
    },
    /// A device node is missing or is not a character device.
    #[error("device node {path} is missing or of another kind; create it with `gpushare system nodes`")]
    NoDeviceNode {
        /// Path of the node on this host.
        path: PathBuf,
    },
    /// A device node has a wrong number, for example from an earlier boot: it would give a container another
    /// device.
    #[error("device node {path} has the number {found}, and the kernel says {wanted}; {remedy}")]
    Number {
        /// Path of the node on this host.
        path: PathBuf,
        /// The node's number as `MAJOR:MINOR`.
        found: String,
        /// The number that the kernel reports, as `MAJOR:MINOR`.
        wanted: String,
        /// How to create the node again.
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
