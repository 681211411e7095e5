//! A GPU's memory as NVML reports it.
#![allow(
    unsafe_code,
    reason = "nvml-wrapper asks only for the second version, which drivers before 510 lack"
)]

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};

/// Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// All that the GPU has; 0 if NVML reports no size, as for a GPU with unified memory.
    pub total: u64,
    /// The part that the driver keeps for itself; 0 if NVML does not report it.
    pub reserved: u64,
}

impl Memory {
    /// Asks NVML by its second version, else by its first, which reports nothing as reserved.
    pub fn of(device: &Device<'_>) -> Self {
        match device.memory_info() {
            Ok(info) => Self { total: info.total, reserved: info.reserved },
            Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound | NvmlError::NotSupported) => {
                Self { total: first_version(device).unwrap_or(0), reserved: 0 }
            }
            // Another error may pass. A total without what is reserved would promise too much.
            Err(_) => Self::default(),
        }
    }
}

/// The total by nvmlDeviceGetMemoryInfo, in bytes.
fn first_version(device: &Device<'_>) -> Result<u64, NvmlError> {
    let ask = nvml_sym(device.nvml().lib().nvmlDeviceGetMemoryInfo.as_ref())?;
    // SAFETY: the structure of NVML's first version is three numbers.
    let mut memory = unsafe { std::mem::zeroed() };
    // SAFETY: the handle is used while `device` lives, which holds NVML open.
    let handle = unsafe { device.handle() };
    // SAFETY: NVML writes one structure.
    nvml_try(unsafe { ask(handle, &mut memory) })?;
    Ok(memory.total)
}
