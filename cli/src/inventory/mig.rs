//! The MIG instances of a GPU, as NVML tells them.
#![allow(unsafe_code, reason = "nvml-wrapper has no function for the ids of an instance")]

use gpushare_inventory::InstanceTotals;
use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};

use super::memory::Memory;

/// Whether the GPU is divided into MIG instances now (nvmlDeviceGetMigMode: current mode 1).
pub fn is_on(gpu: &Device<'_>) -> bool {
    gpu.mig_mode().is_ok_and(|mode| mode.current == 1)
}

/// The compute instances of `gpu`. One that NVML does not tell of wholly is left out, with a line on standard
/// error: `/proc` shows it, so it is out of service.
pub fn instances(gpu: &Device<'_>) -> Vec<InstanceTotals> {
    let count = gpu.mig_device_count().unwrap_or(0);
    let mut found = Vec::new();
    for position in 0..count {
        match gpu.mig_device_by_index(position).and_then(|device| instance(&device, position)) {
            Ok(instance) => found.push(instance),
            Err(NvmlError::NotFound) => {} // positions may have gaps
            Err(error) => eprintln!("gpushare: NVML cannot open MIG instance {position} of a GPU: {error}"),
        }
    }
    found
}

fn instance(device: &Device<'_>, position: u32) -> Result<InstanceTotals, NvmlError> {
    let (gpu_instance, compute_instance) = ids(device)?;
    let Memory { total, reserved } = Memory::of(device);
    Ok(InstanceTotals {
        uuid: device.uuid()?,
        gpu_instance,
        compute_instance,
        position,
        name: device.name()?,
        memory_bytes: total,
        reserved_bytes: reserved,
    })
}

/// The ids of an instance: nvmlDeviceGetGpuInstanceId and nvmlDeviceGetComputeInstanceId.
fn ids(device: &Device<'_>) -> Result<(u32, u32), NvmlError> {
    let library = device.nvml().lib();
    let gpu = nvml_sym(library.nvmlDeviceGetGpuInstanceId.as_ref())?;
    let compute = nvml_sym(library.nvmlDeviceGetComputeInstanceId.as_ref())?;
    let (mut ids, handle) = ((0, 0), {
        // SAFETY: the handle is used while `device` lives, which holds NVML open.
        unsafe { device.handle() }
    });
    // SAFETY: NVML writes one number.
    nvml_try(unsafe { gpu(handle, &mut ids.0) })?;
    // SAFETY: NVML writes one number.
    nvml_try(unsafe { compute(handle, &mut ids.1) })?;
    Ok(ids)
}
