//! Detects whether this process is a client of MPS, and applies the consequences.
//!
//! The server itself is not simulated: all processes share the simulated GPU's clock. A client finds the
//! control daemon as the driver does, may have a context whatever the GPU's compute mode is, and sees the
//! multiprocessors of its thread percentage.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use gpushare_simulator::state::Gpu;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::abi::{Code, Result};

/// Compute modes as NVML numbers them.
const PROHIBITED: u32 = 2;
const EXCLUSIVE_PROCESS: u32 = 3;

/// A client of the control daemon.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    /// Its part of the multiprocessors, above 0 to 100.
    percent: f64,
}

impl Client {
    /// Returns this process as a client, if a daemon listens in the pipe directory that the environment
    /// names.
    pub fn of_environment() -> Option<Self> {
        let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map(PathBuf::from);
        let control = folder.unwrap_or_else(|| PathBuf::from("/tmp/nvidia-mps")).join("control");
        let address = UnixAddr::new(&control).ok()?;
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).ok()?;
        // Close it at once: the daemon would wait for messages from its own clients.
        connect(socket.as_raw_fd(), &address).ok()?;
        let percent =
            std::env::var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").ok().and_then(|text| text.parse().ok());
        Some(Self {
            percent: percent
                .filter(|percent| *percent > 0.0)
                .map_or(100.0, |percent: f64| percent.min(100.0)),
        })
    }

    /// Returns how many of the GPU's multiprocessors the client may use, rounded up, as in the MPS guide.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a part of a number of cores"
    )]
    pub fn cores(self, all: u32) -> u32 {
        ((f64::from(all) * self.percent / 100.0).ceil() as u32).clamp(1, all.max(1))
    }
}

/// Whether the GPU's compute mode allows a process a context.
pub fn admit(client: Option<Client>, gpu: &Gpu, own: usize) -> Result {
    let others =
        || gpu.bytes.iter().enumerate().any(|(slot, bytes)| slot != own && bytes.load(Ordering::Relaxed) > 0);
    match gpu.compute_mode.load(Ordering::Relaxed) {
        PROHIBITED => Err(Code::DEVICE_UNAVAILABLE),
        EXCLUSIVE_PROCESS if client.is_none() && others() => Err(Code::DEVICE_UNAVAILABLE),
        _ => Ok(()),
    }
}
