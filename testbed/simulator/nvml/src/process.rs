//! The processes that use a GPU.
//!
//! Pids are those of the reader's own pid namespace, as the kernel names the holder of a slot's byte lock; or
//! always those of the node's, if the node was made so. A process without such a pid is not listed.

use std::sync::atomic::Ordering;

use gpushare_simulator::state::Gpu;

use crate::abi::{Code, Handle, Out, Result};
use crate::node::{Node, gpu, node};

/// A process that holds memory of a GPU.
pub struct User {
    /// Its pid as NVML tells it.
    pub pid: u32,
    /// Bytes that it holds on the GPU.
    pub memory: u64,
}

impl Node {
    /// The processes that hold memory on `gpu` and have a pid to tell.
    pub fn users(&self, gpu: &Gpu) -> Vec<User> {
        let state = self.reader.state;
        let user = |slot: usize| {
            let memory = gpu.bytes[slot].load(Ordering::Acquire);
            (memory > 0).then(|| Some(User { pid: self.reader.told_pid(slot)?, memory })).flatten()
        };
        (0..state.used_slots()).filter_map(user).collect()
    }
}

/// Writes the list of processes by NVML's protocol of two calls: INSUFFICIENT_SIZE and the count if there is
/// too little room.
fn list(device: Handle, count: Out<u32>, write: impl Fn(usize, &User) -> Result, no_room: bool) -> Result {
    node()?.tells_processes()?;
    let users = node()?.users(gpu(device)?);
    let room = count.get()? as usize;
    count.set(u32::try_from(users.len()).unwrap_or(u32::MAX))?;
    if users.len() > room || (no_room && !users.is_empty()) {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    users.iter().enumerate().try_for_each(|(index, user)| write(index, user))
}

/// Entry of the process list in the forms `_v2` and `_v3`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Entry {
    pid: u32,
    reserved: u32,
    memory: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

fn entries(device: Handle, count: Out<u32>, out: Out<Entry>) -> Result {
    let write = |index, user: &User| {
        let (gpu_instance, compute_instance) = (u32::MAX, u32::MAX);
        out.set_at(
            index,
            Entry { pid: user.pid, reserved: 0, memory: user.memory, gpu_instance, compute_instance },
        )
    };
    list(device, count, write, out.is_null())
}

fn nobody(device: Handle, count: Out<u32>) -> Result {
    gpu(device)?;
    node()?.tells_processes()?;
    count.set(0)
}

exports! {
    fn nvmlDeviceGetComputeRunningProcesses_v3 also nvmlDeviceGetComputeRunningProcesses_v2
    (device: Handle, count: Out<u32>, out: Out<Entry>) {
        entries(device, count, out)
    }

    /// The oldest form has pid and memory only.
    fn nvmlDeviceGetComputeRunningProcesses(device: Handle, count: Out<u32>, out: Out<[u64; 2]>) {
        let write = |index, user: &User| out.set_at(index, [u64::from(user.pid), user.memory]);
        list(device, count, write, out.is_null())
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3 also nvmlDeviceGetGraphicsRunningProcesses_v2
    also nvmlDeviceGetGraphicsRunningProcesses (device: Handle, count: Out<u32>, _out: Out<Entry>) {
        nobody(device, count)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3 also nvmlDeviceGetMPSComputeRunningProcesses_v2
    also nvmlDeviceGetMPSComputeRunningProcesses (device: Handle, count: Out<u32>, _out: Out<Entry>) {
        nobody(device, count)
    }

    fn nvmlDeviceGetEncoderUtilization(device: Handle, out: Out<u32>, period: Out<u32>) {
        gpu(device)?;
        out.set(0)?;
        period.set(167_000)
    }

    fn nvmlDeviceGetDecoderUtilization(device: Handle, out: Out<u32>, period: Out<u32>) {
        gpu(device)?;
        out.set(0)?;
        period.set(167_000)
    }

    fn nvmlDeviceGetAccountingMode(device: Handle, out: Out<u32>) {
        gpu(device)?;
        out.set(0)
    }

    fn nvmlDeviceGetAccountingBufferSize(device: Handle, out: Out<u32>) {
        gpu(device)?;
        out.set(4000)
    }
}
