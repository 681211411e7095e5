//! Memory of a GPU, as the sum of all processes' books.

use std::sync::atomic::Ordering;

use gpushare_simulator::session::Life;
use gpushare_simulator::state::Gpu;

use crate::abi::{Code, Handle, Out, Result};
use crate::node::{Node, gpu, node};

impl Node {
    /// Bytes that living processes hold on `gpu`.
    pub fn used(&self, gpu: &Gpu) -> u64 {
        let state = self.reader.state;
        let held = |slot: &usize| gpu.bytes[*slot].load(Ordering::Acquire);
        let living =
            (0..state.used_slots()).filter(|slot| held(slot) > 0 && self.reader.life(*slot) != Life::Dead);
        living.map(|slot| held(&slot)).sum()
    }
}

const MEMORY_V2: u32 = 0x0200_0028;

fn used_and_total(device: Handle) -> Result<(u64, u64)> {
    let gpu = gpu(device)?;
    let total = gpu.memory.load(Ordering::Relaxed);
    Ok((node()?.used(gpu).min(total), total))
}

exports! {
    fn nvmlDeviceGetMemoryInfo(device: Handle, out: Out<[u64; 3]>) {
        let (used, total) = used_and_total(device)?;
        out.set([total, total - used, used])
    }

    /// The five words are version, total, reserved, free and used.
    fn nvmlDeviceGetMemoryInfo_v2(device: Handle, out: Out<[u64; 5]>) {
        let version: Out<u32> = out.offset(0);
        if version.get()? != MEMORY_V2 {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let (used, total) = used_and_total(device)?;
        out.set([u64::from(MEMORY_V2), total, 0, total - used, used])
    }

    fn nvmlDeviceGetBAR1MemoryInfo(device: Handle, out: Out<[u64; 3]>) {
        let (_, total) = used_and_total(device)?;
        out.set([total, total - (1 << 20), 1 << 20])
    }
}
