//! Who uses a GPU, and how much of its time.
//!
//! Pids are those of the reader's own pid namespace, as the kernel tells them for the holder of a slot's byte lock. A
//! process that has no pid there is not listed.

use std::sync::atomic::Ordering;

use gpushare_simulator::clock;
use gpushare_simulator::lock::Owner;
use gpushare_simulator::session::Life;
use gpushare_simulator::state::Gpu;
use gpushare_simulator::timeline::busy;

use crate::abi::{Code, Handle, Out, Result};
use crate::node::{Node, gpu, node};

/// A process that holds memory.
pub struct User {
    /// Its pid in our namespace.
    pub pid: u32,
    /// Bytes it holds.
    pub memory: u64,
}

/// Samples of utilisation cover a sixth of a second.
pub const WINDOW: u64 = clock::SECOND / 6;
/// Samples are kept for this many windows.
const KEPT: u64 = 6;

impl Node {
    /// The processes on `gpu`.
    pub fn users(&self, gpu: &Gpu) -> Vec<User> {
        let state = self.reader.state;
        let user = |slot: usize| {
            let memory = gpu.bytes[slot].load(Ordering::Acquire);
            match self.reader.life(slot) {
                Life::Alive(Some(pid)) if memory > 0 => Some(User { pid, memory }),
                _ => None,
            }
        };
        (0..state.used_slots()).filter_map(user).collect()
    }

    fn pid(&self, owner: Owner) -> Option<u32> {
        let slot = self.reader.state.slots.get(owner.slot as usize)?;
        match self.reader.life(owner.slot as usize) {
            Life::Alive(pid) if slot.generation.load(Ordering::Acquire) == owner.generation => pid,
            _ => None,
        }
    }
}

/// Percent of the last whole window in which the GPU worked.
pub fn utilisation(gpu: &Gpu) -> u32 {
    let end = clock::now() / WINDOW * WINDOW;
    percent(busy(gpu, end - WINDOW, end).iter().map(|sum| sum.time).sum())
}

fn percent(time: u64) -> u32 {
    u32::try_from(time * 100 / WINDOW).unwrap_or(100).min(100)
}

/// Writes as many entries as the caller has room for, by NVML's protocol of two calls.
fn list(device: Handle, count: Out<u32>, write: impl Fn(usize, &User) -> Result, no_room: bool) -> Result {
    let users = node()?.users(gpu(device)?);
    let room = count.get()? as usize;
    count.set(u32::try_from(users.len()).unwrap_or(u32::MAX))?;
    if users.len() > room || (no_room && !users.is_empty()) {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    users.iter().enumerate().try_for_each(|(index, user)| write(index, user))
}

/// The form of `_v2` and `_v3`.
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
    count.set(0)
}

/// A process's share of one window.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sample {
    pid: u32,
    reserved: u32,
    time: u64,
    cores: u32,
    memory: u32,
    encoder: u32,
    decoder: u32,
}

/// One sample per process and whole window that ended after `last_seen`, in microseconds since 1970.
fn samples(device: Handle, last_seen: u64) -> Result<Vec<Sample>> {
    let (node, gpu) = (node()?, gpu(device)?);
    let offset = node.reader.state.wall_offset.load(Ordering::Relaxed);
    let newest = clock::now() / WINDOW;
    let mut all = Vec::new();
    for window in newest.saturating_sub(KEPT)..newest {
        let end = (window + 1) * WINDOW;
        let time = (end + offset) / 1000;
        if time <= last_seen {
            continue;
        }
        for sum in busy(gpu, window * WINDOW, end) {
            let Some(pid) = node.pid(sum.owner) else { continue };
            let cores = percent(sum.time);
            all.push(Sample { pid, reserved: 0, time, cores, memory: cores / 4, encoder: 0, decoder: 0 });
        }
    }
    Ok(all)
}

exports! {
    fn nvmlDeviceGetComputeRunningProcesses_v3 also nvmlDeviceGetComputeRunningProcesses_v2
    (device: Handle, count: Out<u32>, out: Out<Entry>) {
        entries(device, count, out)
    }

    /// Pid and memory alone.
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

    fn nvmlDeviceGetUtilizationRates(device: Handle, out: Out<[u32; 2]>) {
        let cores = utilisation(gpu(device)?);
        out.set([cores, cores / 4])
    }

    fn nvmlDeviceGetProcessUtilization(device: Handle, out: Out<Sample>, count: Out<u32>, last_seen: u64) {
        let found = samples(device, last_seen)?;
        let room = count.get()? as usize;
        if found.is_empty() {
            count.set(0)?;
            return Err(Code::NOT_FOUND);
        }
        count.set(u32::try_from(found.len()).unwrap_or(u32::MAX))?;
        if out.is_null() || room < found.len() {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        found.into_iter().enumerate().try_for_each(|(index, sample)| out.set_at(index, sample))
    }

    /// Samples of the whole GPU's utilisation: type 0 is power, 1 the multiprocessors, 2 the memory.
    fn nvmlDeviceGetSamples(
        device: Handle, kind: u32, last_seen: u64, value_type: Out<u32>, count: Out<u32>, out: Out<[u64; 2]>,
    ) {
        let (node, gpu) = (node()?, gpu(device)?);
        if !matches!(kind, 1 | 2) {
            return Err(Code::NOT_SUPPORTED);
        }
        value_type.set(1)?;
        let room = count.get()? as usize;
        if out.is_null() {
            return count.set(u32::try_from(KEPT).unwrap_or(0));
        }
        let offset = node.reader.state.wall_offset.load(Ordering::Relaxed);
        let newest = clock::now() / WINDOW;
        let mut written = 0;
        for window in newest.saturating_sub(KEPT)..newest {
            let end = (window + 1) * WINDOW;
            let time = (end + offset) / 1000;
            if time > last_seen && written < room {
                let cores = percent(busy(gpu, window * WINDOW, end).iter().map(|sum| sum.time).sum());
                out.set_at(written, [time, u64::from(if kind == 1 { cores } else { cores / 4 })])?;
                written += 1;
            }
        }
        count.set(u32::try_from(written).unwrap_or(0))?;
        if written == 0 { Err(Code::NOT_FOUND) } else { Ok(()) }
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
