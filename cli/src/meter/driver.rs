//! What NVML tells of the processes on one GPU: samples of their use, and their memory.

use std::collections::{HashMap, HashSet};

use gpushare_inventory::GpuUuid;
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::Sampling;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::{ProcessInfo, ProcessUtilizationSample};

use super::record::Load;
use super::windows::{PERIOD, Sample};

/// One GPU, opened.
pub struct Gpu<'nvml> {
    device: Device<'nvml>,
    uuid: GpuUuid,
    /// What went wrong so far, so that each error is logged once.
    troubles: HashSet<String>,
    samples: bool,
}

impl<'nvml> Gpu<'nvml> {
    /// The GPU `uuid`, which `device` has opened.
    pub fn new(device: Device<'nvml>, uuid: GpuUuid) -> Self {
        Self { device, uuid, troubles: HashSet::new(), samples: true }
    }

    /// Its UUID.
    pub fn uuid(&self) -> GpuUuid {
        self.uuid
    }

    /// Length of its sampling windows in microseconds: the median gap between the stamps of its own
    /// utilisation.
    pub fn period(&self) -> u64 {
        let told = self.device.samples(Sampling::GpuUtilization, None).unwrap_or_default();
        let mut stamps: Vec<u64> =
            told.iter().map(|sample| sample.timestamp).filter(|stamp| *stamp > 0).collect();
        stamps.sort_unstable();
        let mut apart: Vec<u64> =
            stamps.windows(2).map(|pair| pair[1] - pair[0]).filter(|gap| *gap > 0).collect();
        apart.sort_unstable();
        apart.get(apart.len() / 2).copied().unwrap_or(PERIOD)
    }

    /// Samples of processes, newer than `stamp`. `None` where the driver gives none; the libraries then use
    /// their own events alone.
    pub fn samples(&mut self, stamp: u64) -> Option<Vec<Sample>> {
        if !self.samples {
            return None;
        }
        match self.device.process_utilization_stats(stamp) {
            Ok(told) => Some(told.iter().map(sample).collect()),
            // Nothing is new, or more samples came between the question for their number and the question for
            // them.
            Err(NvmlError::NotFound | NvmlError::InsufficientSize(_)) => Some(Vec::new()),
            Err(error) => {
                self.samples = !is_final(&error);
                self.say("per-process utilisation", &error);
                None
            }
        }
    }

    /// Host pids of the processes that compute on the GPU now, each with its device memory in bytes where the
    /// driver reports it; `None` where the driver lists no processes.
    pub fn processes(&self) -> Option<Vec<(u32, Option<u64>)>> {
        let listed = self.device.running_compute_processes().ok()?;
        let memory = |process: &ProcessInfo| match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        Some(listed.iter().map(|process| (process.pid, memory(process))).collect())
    }

    /// Device memory in bytes by host pid. `None` where the driver does not tell.
    pub fn memory(&mut self) -> Option<HashMap<u32, u64>> {
        let told = self.device.running_compute_processes();
        let told = told.inspect_err(|error| self.say("per-process memory", error)).ok()?;
        let graphics = self.device.running_graphics_processes().unwrap_or_default();
        let mut all = HashMap::new();
        for process in told.iter().chain(&graphics) {
            if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
                // A process may be in both lists, with the same figure.
                let known = all.entry(process.pid).or_default();
                *known = bytes.max(*known);
            }
        }
        Some(all)
    }

    /// How busy it is as a whole, and with whom.
    pub fn load(&self) -> Load {
        let lone = match self.processes().unwrap_or_default()[..] {
            [(pid, _)] => Some(pid),
            _ => None,
        };
        Load { busy: self.device.utilization_rates().ok().map(|rates| rates.gpu), lone }
    }

    fn say(&mut self, what: &str, error: &NvmlError) {
        let text = format!("{what}: {error}");
        if self.troubles.insert(text.clone()) {
            tracing::warn!(gpu = %self.uuid, trouble = %text, "the driver does not tell");
        }
    }
}

fn sample(told: &ProcessUtilizationSample) -> Sample {
    Sample { pid: told.pid, stamp: told.timestamp, percent: told.sm_util }
}

/// Whether the same call will never succeed on this GPU.
fn is_final(error: &NvmlError) -> bool {
    matches!(error, NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_))
}
