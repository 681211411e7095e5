//! Utilisation: the used part of a GPU's time in windows of fixed length, in whole percents. The node's physics
//! give length and delay, and whether a window has each process's exact part or names one process alone.

use std::sync::atomic::Ordering;

use gpushare_simulator::clock;
use gpushare_simulator::lock::Owner;
use gpushare_simulator::physics::DRAWN_PERCENT;
use gpushare_simulator::state::Gpu;
use gpushare_simulator::timeline::busy;

use crate::abi::{Code, Handle, Out, Result};
use crate::node::{Node, gpu, node, session};

/// A window that can be read.
struct Window {
    /// Number of the window since the device clock's begin.
    number: u64,
    /// Length in nanoseconds.
    length: u64,
    /// End in nanoseconds of the device clock.
    end: u64,
    /// End in microseconds since 1970.
    time: u64,
}

/// One process's part of a window.
struct Part {
    owner: Owner,
    percent: u32,
}

/// The last windows that can be read now, the newest at the end.
fn windows(node: &Node) -> impl Iterator<Item = Window> {
    let state = node.reader.state;
    let length = state.physics.period.load(Ordering::Relaxed).max(1);
    let kept = u64::from(state.physics.kept.load(Ordering::Relaxed));
    let offset = state.wall_offset.load(Ordering::Relaxed);
    let now = clock::now();
    let ended = now / length;
    let is_readable = move |number: &u64| (number + 1) * length + state.physics.delay_of(*number) <= now;
    let count = (0..ended).rev().find(is_readable).map_or(0, |newest| newest + 1);
    (count.saturating_sub(kept)..count).map(move |number| {
        let end = (number + 1) * length;
        Window { number, length, end, time: (end + offset) / 1000 }
    })
}

impl Window {
    /// `time` nanoseconds as percent of the window.
    fn percent(&self, time: u64) -> Result<u32> {
        let nearest = node()?.reader.state.sampling.nearest.load(Ordering::Relaxed) != 0;
        let half = if nearest { self.length / 2 } else { 0 };
        Ok(u32::try_from((time * 100 + half) / self.length).unwrap_or(100).min(100))
    }

    /// The process that a draw names, with the percent in which the GPU worked for anybody; `None` if it was idle.
    ///
    /// The draw falls on a moment of the GPU's work. So a process that has the GPU alone gets its own part, as a
    /// limit alone held on the card, and one of several gets all of it.
    fn drawn(&self, gpu: &Gpu) -> Result<Option<Part>> {
        let all = busy(gpu, session()?, self.end - self.length, self.end);
        let worked: u64 = all.iter().map(|one| one.time).sum();
        let moment = node()?.reader.state.physics.moment_of(self.number);
        let drawn = u128::from(worked) * u128::from(moment) / u128::from(self.length);
        let mut before = 0;
        let named = all.iter().find(|one| {
            before += u128::from(one.time);
            drawn < before
        });
        let (slice, switch) =
            (gpu.turns.slice.load(Ordering::Relaxed), gpu.turns.switch.load(Ordering::Relaxed));
        // The GPU counts as busy while it switches from one process to another.
        let switches = if all.len() > 1 && slice > 0 { worked / slice * switch } else { 0 };
        let percent = self.percent(worked + switches)?.min(DRAWN_PERCENT);
        Ok(named.map(|one| Part { owner: one.owner, percent }))
    }

    /// The parts of the processes in the window, dead ones included.
    fn parts(&self, gpu: &Gpu) -> Result<Vec<Part>> {
        if draws()? {
            return Ok(self.drawn(gpu)?.into_iter().collect());
        }
        let all = busy(gpu, session()?, self.end - self.length, self.end);
        all.iter().map(|one| Ok(Part { owner: one.owner, percent: self.percent(one.time)? })).collect()
    }

    /// Percent of the window that all processes used, dead ones included.
    fn utilisation(&self, gpu: &Gpu) -> Result<u32> {
        if draws()? {
            return Ok(self.drawn(gpu)?.map_or(0, |part| part.percent));
        }
        let all = busy(gpu, session()?, self.end - self.length, self.end);
        self.percent(all.iter().map(|one| one.time).sum())
    }
}

/// Whether a window names one process alone.
fn draws() -> Result<bool> {
    Ok(node()?.reader.state.physics.draws.load(Ordering::Relaxed) != 0)
}

/// The GPU of a handle, if NVML samples its use: it does not in MIG mode (nvml.h,
/// nvmlDeviceGetUtilizationRates).
fn sampled(device: Handle) -> Result<&'static Gpu> {
    let gpu = gpu(device)?;
    let is_mig = gpu.mig_mode.load(Ordering::Relaxed) == 1 || gpu.card().is_some();
    if is_mig { Err(Code::NOT_SUPPORTED) } else { Ok(gpu) }
}

/// Percent of the last readable window in which the GPU worked.
pub fn utilisation(gpu: &Gpu) -> Result<u32> {
    session()?.sweep();
    windows(node()?).last().map_or(Ok(0), |window| window.utilisation(gpu))
}

impl Node {
    /// Refuses questions about single processes, if the node was made to.
    pub fn tells_processes(&self) -> Result {
        let refused = self.reader.state.sampling.no_processes.load(Ordering::Relaxed) != 0;
        if refused { Err(Code::NOT_SUPPORTED) } else { Ok(()) }
    }

    fn pid(&self, owner: Owner) -> Option<u32> {
        let slot = self.reader.state.slots.get(owner.slot as usize)?;
        let same = slot.generation.load(Ordering::Acquire) == owner.generation;
        same.then(|| self.reader.told_pid(owner.slot as usize)).flatten()
    }
}

/// Use of one window by one process.
struct Share {
    pid: u32,
    time: u64,
    cores: u32,
}

/// A share for every living process and every window that it worked in, of the windows that ended after
/// `last_seen` (microseconds since 1970). Where windows are drawn, each process has one share: its mean over them.
fn shares(device: Handle, last_seen: u64) -> Result<Vec<Share>> {
    let (node, gpu) = (node()?, sampled(device)?);
    node.tells_processes()?;
    session()?.sweep();
    let (mut all, mut count) = (Vec::new(), 0);
    for window in windows(node).filter(|window| window.time > last_seen) {
        count += 1;
        for part in window.parts(gpu)? {
            let Some(pid) = node.pid(part.owner) else { continue };
            all.push(Share { pid, time: window.time, cores: part.percent });
        }
    }
    Ok(if draws()? { means(&all, count) } else { all })
}

/// One share for each process of `all`: the mean over `count` windows, at the time of the last that names it.
fn means(all: &[Share], count: u32) -> Vec<Share> {
    let mut means: Vec<Share> = Vec::new();
    for &Share { pid, time, cores } in all {
        match means.iter_mut().find(|mean| mean.pid == pid) {
            Some(mean) => (mean.time, mean.cores) = (time, mean.cores + cores),
            None => means.push(Share { pid, time, cores }),
        }
    }
    means.iter_mut().for_each(|mean| mean.cores /= count.max(1));
    means
}

/// Writes the shares by NVML's protocol of two calls; NOT_FOUND if there are none.
fn list(
    device: Handle,
    last_seen: u64,
    count: Out<u32>,
    no_room: bool,
    write: impl Fn(usize, &Share) -> Result,
) -> Result {
    let room = count.get()? as usize;
    let found = shares(device, last_seen)?;
    count.set(u32::try_from(found.len()).unwrap_or(u32::MAX))?;
    if found.is_empty() {
        return Err(Code::NOT_FOUND);
    }
    if no_room || room < found.len() {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    found.iter().enumerate().try_for_each(|(index, share)| write(index, share))
}

/// nvmlProcessUtilizationSample_t of NVML's header.
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

/// nvmlProcessUtilizationInfo_v1_t of NVML's header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Entry {
    time: u64,
    pid: u32,
    cores: u32,
    memory: u32,
    encoder: u32,
    decoder: u32,
    jpeg: u32,
    flow: u32,
}

/// nvmlProcessesUtilizationInfo_v1_t of NVML's header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Entries {
    version: u32,
    count: u32,
    last_seen: u64,
    list: usize,
}

const ENTRIES_V1: u32 = 0x0100_0018;

/// An entry of the list that `nvidia-smi pmon` reads through the private table: a moment, and 80 bytes for
/// each of four engines. It reads two words of those: how much of the engine was used, and the pid that used
/// it. It divides the sum for a process by the number of entries.
#[repr(C)]
#[derive(Clone, Copy)]
struct Glance {
    time: u64,
    engines: [[u32; 20]; 4],
}

const _: () = assert!(size_of::<Glance>() == 328);

const NOBODY: u32 = u32::MAX;

/// Fills `pmon`'s list. Each window gets as many entries as the fullest window has processes, and each use is
/// multiplied by that number, because `pmon` divides by it.
pub fn glances(device: Handle, last_seen: u64, count: Out<u32>, out: Out<u8>) -> Result {
    let found = shares(device, last_seen)?;
    let fullest = found.iter().map(|share| found.iter().filter(|other| other.time == share.time).count());
    let weight = fullest.max().unwrap_or(0);
    let mut windows: Vec<u64> = found.iter().map(|share| share.time).collect();
    windows.dedup();
    let room = count.get()? as usize;
    let mut written = 0;
    for time in windows {
        let mut of_window = found.iter().filter(|share| share.time == time);
        for _ in 0..weight.min(room - written) {
            let (pid, cores) = of_window.next().map_or((NOBODY, 0), |share| (share.pid, share.cores));
            let used = |part: u32| {
                let mut engine = [0; 20];
                engine[0] = part * u32::try_from(weight).unwrap_or(1);
                engine[2] = pid;
                engine
            };
            let engines = [used(cores), used(cores / 4), used(0), used(0)];
            out.offset::<Glance>(written * size_of::<Glance>()).set(Glance { time, engines })?;
            written += 1;
        }
    }
    count.set(u32::try_from(written).unwrap_or(0))?;
    if written == 0 { Err(Code::NOT_FOUND) } else { Ok(()) }
}

/// Samples of the whole GPU, each a time and a percent: of the multiprocessors for type 1, of the memory for
/// type 2.
fn device_samples(device: Handle, kind: u32, last_seen: u64) -> Result<Vec<[u64; 2]>> {
    let gpu = sampled(device)?;
    if !matches!(kind, 1 | 2) {
        return Err(Code::NOT_SUPPORTED);
    }
    session()?.sweep();
    let new = windows(node()?).filter(|window| window.time > last_seen);
    new.map(|window| {
        let cores = window.utilisation(gpu)?;
        Ok([window.time, u64::from(if kind == 1 { cores } else { cores / 4 })])
    })
    .collect()
}

exports! {
    fn nvmlDeviceGetUtilizationRates(device: Handle, out: Out<[u32; 2]>) {
        let cores = utilisation(sampled(device)?)?;
        out.set([cores, cores / 4])
    }

    fn nvmlDeviceGetProcessUtilization(device: Handle, out: Out<Sample>, count: Out<u32>, last_seen: u64) {
        list(device, last_seen, count, out.is_null(), |index, share| {
            let Share { pid, time, cores } = *share;
            out.set_at(index, Sample { pid, reserved: 0, time, cores, memory: cores / 4, encoder: 0, decoder: 0 })
        })
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(device: Handle, entries: Out<Entries>) {
        let Entries { version, last_seen, list: address, .. } = entries.get()?;
        if version != ENTRIES_V1 {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let out: Out<Entry> = Out::from_address(address);
        list(device, last_seen, entries.offset(4), out.is_null(), |index, share| {
            let Share { pid, time, cores } = *share;
            let memory = cores / 4;
            out.set_at(index, Entry { time, pid, cores, memory, encoder: 0, decoder: 0, jpeg: 0, flow: 0 })
        })
    }

    fn nvmlDeviceGetSamples(
        device: Handle, kind: u32, last_seen: u64, value_type: Out<u32>, count: Out<u32>, out: Out<[u64; 2]>,
    ) {
        let found = device_samples(device, kind, last_seen)?;
        value_type.set(1)?;
        let room = count.get()? as usize;
        if out.is_null() {
            return count.set(node()?.reader.state.physics.kept.load(Ordering::Relaxed));
        }
        count.set(u32::try_from(found.len().min(room)).unwrap_or(0))?;
        if found.is_empty() {
            return Err(Code::NOT_FOUND);
        }
        found.into_iter().take(room).enumerate().try_for_each(|(index, sample)| out.set_at(index, sample))
    }
}
