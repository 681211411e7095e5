//! Prints what CUDA and NVML say of the first GPU: its size, what is used, which processes use it.

use std::io::{Write, stdout};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::driver::{Driver, SONAME, done};
use crate::kernel::MULTIPROCESSORS;

/// Status `NVML_ERROR_FUNCTION_NOT_FOUND`.
const NOT_FOUND: i32 = 13;
/// The name by which programs load NVML.
pub const NVML: &str = "libnvidia-ml.so.1";
/// First word of version 2 of the memory structure: version and size.
const MEMORY_2: u64 = 2 << 24 | 40;
/// Processes that are listed at most.
const PROCESSES: usize = 256;

crate::functions! {
    /// The functions of NVML that this program calls.
    Nvml, absent = NOT_FOUND;
    init = nvmlInit_v2();
    device = nvmlDeviceGetHandleByIndex_v2(index: u32, device: &mut usize);
    memory = nvmlDeviceGetMemoryInfo(device: usize, memory: &mut [u64; 3]);
    memory_2 = nvmlDeviceGetMemoryInfo_v2(device: usize, memory: &mut [u64; 5]);
    processes = nvmlDeviceGetComputeRunningProcesses_v3(device: usize, count: &mut u32, list: &mut [[u64; 3]; PROCESSES]);
    set_limits = nvmlDeviceSetMemoryLimits_v1(device: usize, limits: &mut [u64; 3]);
    limits = nvmlDeviceGetMemoryLimits_v1(device: usize, limits: &mut [u64; 4]);
    compute_mode = nvmlDeviceGetComputeMode(device: usize, mode: &mut u32);
    utilisation = nvmlDeviceGetUtilizationRates(device: usize, rates: &mut [u32; 2]);
}

/// What to ask.
#[derive(clap::Args)]
pub struct Sizes {
    /// Leave CUDA out: no context is made
    #[arg(long)]
    nvml: bool,
    /// Seconds for which the context is kept after the last line
    #[arg(long, default_value_t = 0)]
    hold: u64,
}

impl Sizes {
    /// Prints `NAME VALUE` for each answer, sizes in bytes. Processes are printed as `process PID BYTES`, and
    /// `listed` comes last.
    ///
    /// # Errors
    /// When a library does not answer.
    pub fn run(&self) -> Result<()> {
        if !self.nvml {
            let driver = Driver::start(SONAME)?;
            let (free, total) = driver.memory()?;
            let mut whole = 0;
            done((driver.total)(&mut whole, 0), "cuDeviceTotalMem")?;
            println!("cuda_total {total}\ncuda_free {free}\ncuda_device {whole}");
            println!("multiprocessors {}", driver.property(MULTIPROCESSORS)?);
        }
        // The context stays while NVML is asked.
        nvml()?;
        stdout().flush()?;
        sleep(Duration::from_secs(self.hold));
        Ok(())
    }
}

fn answered(status: i32, name: &str) -> Result<()> {
    if status == 0 { Ok(()) } else { bail!("{name} answered {status}") }
}

/// NVML in the file `name`, initialised, and its first GPU.
///
/// # Errors
/// When it cannot be opened or does not answer.
pub fn first_gpu(name: &str) -> Result<(Nvml, usize)> {
    let (nvml, mut device) = (Nvml::open(name)?, 0);
    answered((nvml.init)(), "nvmlInit")?;
    answered((nvml.device)(0, &mut device), "nvmlDeviceGetHandleByIndex")?;
    Ok((nvml, device))
}

fn nvml() -> Result<()> {
    let (nvml, device) = first_gpu(NVML)?;
    let (mut memory, mut newer) = ([0; 3], [MEMORY_2, 0, 0, 0, 0]);
    answered((nvml.memory)(device, &mut memory), "nvmlDeviceGetMemoryInfo")?;
    println!("nvml_total {}\nnvml_free {}\nnvml_used {}", memory[0], memory[1], memory[2]);
    if (nvml.memory_2)(device, &mut newer) == 0 {
        println!("nvml_total_v2 {}\nnvml_reserved_v2 {}\nnvml_used_v2 {}", newer[1], newer[2], newer[4]);
    }
    let (mut count, mut list) = (u32::try_from(PROCESSES)?, [[0; 3]; PROCESSES]);
    answered((nvml.processes)(device, &mut count, &mut list), "nvmlDeviceGetComputeRunningProcesses")?;
    let listed = list.get(..usize::try_from(count)?).context("more processes than there was room for")?;
    listed.iter().for_each(|[pid, bytes, _]| println!("process {} {bytes}", pid & u64::from(u32::MAX)));
    let mut mode = 0;
    if (nvml.compute_mode)(device, &mut mode) == 0 {
        println!("compute_mode {mode}");
    }
    let mut rates = [0; 2];
    if (nvml.utilisation)(device, &mut rates) == 0 {
        println!("utilisation {}", rates[0]);
    }
    println!("listed");
    Ok(())
}
