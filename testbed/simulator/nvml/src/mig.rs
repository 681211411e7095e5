//! MIG: which GPUs are divided, and their instances.

use std::sync::atomic::Ordering;

use gpushare_simulator::state::Gpu;

use crate::abi::{Code, Handle, Out, Result};
use crate::node::{gpu, node};

/// Most instances that a GPU can have.
const MOST: u32 = 7;

fn mode(gpu: &Gpu) -> u32 {
    gpu.mig_mode.load(Ordering::Relaxed)
}

/// The instance of a handle; NOT_SUPPORTED for a whole GPU's.
fn instance(device: Handle) -> Result<&'static Gpu> {
    Some(gpu(device)?).filter(|gpu| gpu.card().is_some()).ok_or(Code::NOT_SUPPORTED)
}

exports! {
    fn nvmlDeviceGetMigMode(device: Handle, current: Out<u32>, pending: Out<u32>) {
        let mode = mode(gpu(device)?);
        current.set(mode)?;
        pending.set(mode)
    }

    fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, out: Out<u32>) {
        out.set(MOST * mode(gpu(device)?))
    }

    /// Counts the instances that this process may use.
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: u32, out: Out<Handle>) {
        if index >= MOST {
            return Err(Code::INVALID_ARGUMENT);
        }
        let node = node()?;
        let place = node.instances(device)?.get(index as usize).copied();
        out.set(node.handle(place.ok_or(Code::NOT_FOUND)?)?)
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device: Handle, out: Out<Handle>) {
        let card = instance(device)?.card();
        let node = node()?;
        let place = node.devices.iter().position(|index| Some(*index) == card);
        out.set(node.handle(place.ok_or(Code::NOT_FOUND)?)?)
    }

    fn nvmlDeviceIsMigDeviceHandle(device: Handle, out: Out<u32>) {
        out.set(gpu(device)?.card().is_some().into())
    }

    fn nvmlDeviceGetGpuInstanceId(device: Handle, out: Out<u32>) {
        out.set(instance(device)?.part.gpu_instance.load(Ordering::Relaxed))
    }

    /// Each GPU instance has one compute instance.
    fn nvmlDeviceGetComputeInstanceId(device: Handle, out: Out<u32>) {
        instance(device)?;
        out.set(0)
    }

    /// Multiprocessors, five counts of engines, slices of both kinds, MiB of memory; the last two are one
    /// word.
    fn nvmlDeviceGetAttributes_v2(device: Handle, out: Out<[u32; 10]>) {
        let gpu = instance(device)?;
        let slices = gpu.part.slices.load(Ordering::Relaxed);
        let memory = gpu.memory.load(Ordering::Relaxed) >> 20;
        let (low, high) = (memory & u64::from(u32::MAX), memory >> 32);
        let word = |part: u64| u32::try_from(part).unwrap_or(u32::MAX);
        out.set([gpu.cores.load(Ordering::Relaxed), 1, 0, 0, 0, 0, slices, slices, word(low), word(high)])
    }
}
