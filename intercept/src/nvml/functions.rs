//! Every NVML function that we hook or call, with its signature.

use core::ffi::{c_char, c_void};

use super::{Device, Status};

/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
const FUNCTION_NOT_FOUND: Status = 13;

crate::driver_functions! {
    missing: FUNCTION_NOT_FOUND;
    hooked {
        nvmlDeviceGetMemoryInfo(device: Device, memory: *mut [u64; 3]);
        nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut [u64; 5]);
        nvmlDeviceGetComputeRunningProcesses(device: Device, count: *mut u32, list: *mut c_void);
        nvmlDeviceGetComputeRunningProcesses_v2(device: Device, count: *mut u32, list: *mut c_void);
        nvmlDeviceGetComputeRunningProcesses_v3(device: Device, count: *mut u32, list: *mut c_void);
        nvmlDeviceGetGraphicsRunningProcesses(device: Device, count: *mut u32, list: *mut c_void);
        nvmlDeviceGetGraphicsRunningProcesses_v2(device: Device, count: *mut u32, list: *mut c_void);
        nvmlDeviceGetGraphicsRunningProcesses_v3(device: Device, count: *mut u32, list: *mut c_void);
        nvmlDeviceGetMPSComputeRunningProcesses(device: Device, count: *mut u32, list: *mut c_void);
        nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Device, count: *mut u32, list: *mut c_void);
        nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Device, count: *mut u32, list: *mut c_void);
        nvmlDeviceGetRunningProcessDetailList(device: Device, list: *mut c_void);
        nvmlDeviceGetProcessUtilization(device: Device, samples: *mut c_void, count: *mut u32, last: u64);
        nvmlDeviceGetProcessesUtilizationInfo(device: Device, samples: *mut c_void);
        nvmlDeviceGetAccountingPids(device: Device, count: *mut u32, pids: *mut u32);
        nvmlDeviceGetAccountingStats(device: Device, pid: u32, stats: *mut c_void);
        nvmlDeviceGetAccountingStats_v2(device: Device, stats: *mut c_void);
        nvmlInternalGetExportTable(table: *mut usize, id: *const c_void);
    }
    used {
        nvmlDeviceGetUUID(device: Device, text: *mut c_char, length: u32);
        nvmlDeviceGetMigDeviceHandleByIndex(device: Device, index: u32, instance: *mut Device);
        nvmlDeviceGetGpuInstanceId(device: Device, id: *mut u32);
        nvmlDeviceGetComputeInstanceId(device: Device, id: *mut u32);
        nvmlSystemGetDriverVersion(text: *mut c_char, length: u32);
    }
}
