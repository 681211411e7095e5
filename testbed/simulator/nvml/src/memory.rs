//! Memory of a GPU, as the sum of all processes' books.

use std::path::Path;
use std::sync::atomic::Ordering;

use gpushare_simulator::cgroup::{self, NO_LIMIT};
use gpushare_simulator::session::Life;
use gpushare_simulator::state::Gpu;

use crate::abi::{Code, Handle, Out, Result, Text};
use crate::node::{Node, gpu, node, session};

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

/// nvmlSetMemoryLimits_v1_t of NVML 13.4.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SetLimits {
    /// Path of the cgroup's folder.
    name_space: Text,
    soft: u64,
    hard: u64,
}

/// nvmlGetMemoryLimits_v1_t of NVML 13.4.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GetLimits {
    limits: SetLimits,
    used: u64,
}

/// The GPU of a handle that can have limits by cgroup: a whole one.
fn limited(device: Handle) -> Result<&'static Gpu> {
    Some(gpu(device)?).filter(|gpu| gpu.card().is_none()).ok_or(Code::NOT_SUPPORTED)
}

fn cgroup_at(path: Text) -> Result<u64> {
    cgroup::at(Path::new(&path.get()?)).ok_or(Code::NOT_FOUND)
}

/// Whether this process has CAP_SYS_ADMIN, in the user namespace of the machine.
fn may_administer() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let is_the_machines = map.split_whitespace().eq(["0", "0", "4294967295"]);
    effective & SYS_ADMIN != 0 && is_the_machines
}

/// CAP_SYS_ADMIN of linux/capability.h as a bit.
const SYS_ADMIN: u64 = 1 << 21;

const MEMORY_V2: u32 = 0x0200_0028;

/// What NVML reports of a GPU's memory, in bytes: `total` is what CUDA reports and what is reserved for the driver.
struct Memory {
    total: u64,
    reserved: u64,
    used: u64,
}

fn memory_of(device: Handle) -> Result<Memory> {
    let (gpu, node) = (gpu(device)?, node()?);
    let is_whole = gpu.card().is_none();
    let reserved = if is_whole { node.reader.state.physics.reserved.load(Ordering::Relaxed) } else { 0 };
    Ok(Memory { total: gpu.total() + reserved, reserved, used: node.used(gpu).min(gpu.total()) })
}

exports! {
    /// The three words are total, free and used, which includes what is reserved.
    fn nvmlDeviceGetMemoryInfo(device: Handle, out: Out<[u64; 3]>) {
        let Memory { total, reserved, used } = memory_of(device)?;
        out.set([total, total - reserved - used, reserved + used])
    }

    /// The five words are version, total, reserved, free and used.
    fn nvmlDeviceGetMemoryInfo_v2(device: Handle, out: Out<[u64; 5]>) {
        let version: Out<u32> = out.offset(0);
        if version.get()? != MEMORY_V2 {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let Memory { total, reserved, used } = memory_of(device)?;
        let state = node()?.reader.state;
        let (used, total, reserved) = match gpu(device)?.left_to_cgroup(state, cgroup::own()) {
            Some((left, limit)) => (limit.saturating_sub(left), limit.min(total), 0),
            None => (used, total, reserved),
        };
        out.set([u64::from(MEMORY_V2), total, reserved, total.saturating_sub(reserved + used), used])
    }

    fn nvmlDeviceSetMemoryLimits_v1(device: Handle, limits: Out<SetLimits>) {
        let gpu = limited(device)?;
        let SetLimits { name_space, soft, hard } = limits.get()?;
        let cgroup = cgroup_at(name_space)?;
        if soft > hard {
            return Err(Code::INVALID_ARGUMENT);
        }
        if !may_administer() {
            return Err(Code::NO_PERMISSION);
        }
        if !gpu.set_cgroup_limit(session()?, cgroup, soft, hard) {
            return Err(Code::UNKNOWN);
        }
        Ok(())
    }

    fn nvmlDeviceGetMemoryLimits_v1(device: Handle, limits: Out<GetLimits>) {
        let gpu = limited(device)?;
        let asked = limits.get()?;
        let cgroup = cgroup_at(asked.limits.name_space)?;
        let (soft, hard) = match gpu.cgroup_limit(cgroup) {
            Some(limit) => (limit.soft.load(Ordering::Acquire), limit.hard.load(Ordering::Acquire)),
            None => (0, NO_LIMIT),
        };
        let used = gpu.used_by_cgroup(node()?.reader.state, cgroup);
        limits.set(GetLimits { limits: SetLimits { soft, hard, ..asked.limits }, used })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(device: Handle, out: Out<[u64; 3]>) {
        let total = gpu(device)?.total();
        out.set([total, total - (1 << 20), 1 << 20])
    }
}
