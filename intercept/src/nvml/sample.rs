//! Utilisation and accounting by process: the driver's own figures, less every process that is not the container's.
//!
//! The comparison is by pid. Where the driver reports pids of the host, few will match one of the container's by
//! number, and the rest is dropped: too little is shown rather than another tenant.

use core::ffi::c_void;

use super::{Device, NOT_FOUND, SUCCESS, Status, book, read, real, write};

/// Keeps the entries whose pid, `pid_at` bytes inside an entry of `stride`, is one of the container's; their number.
/// What lies behind them is cleared.
///
/// # Safety
/// `list` is null or holds `count` entries.
unsafe fn keep_own(list: *mut u8, count: u32, stride: usize, pid_at: usize) -> u32 {
    if list.is_null() {
        return count;
    }
    let mut kept = 0u32;
    for index in 0..count {
        let entry = list.wrapping_add(index as usize * stride);
        // SAFETY: below the number of entries.
        let pid = unsafe { read(entry.wrapping_add(pid_at).cast::<u32>()) };
        if pid.is_some_and(|pid| book().is_some_and(|book| book.is_own_pid(pid))) {
            // SAFETY: both lie in the list; the target is the same entry or one before it.
            unsafe { core::ptr::copy(entry, list.wrapping_add(kept as usize * stride), stride) };
            kept += 1;
        }
    }
    let rest = (count - kept) as usize * stride;
    // SAFETY: the rest of the list.
    unsafe { list.wrapping_add(kept as usize * stride).write_bytes(0, rest) };
    kept
}

/// `nvmlProcessesUtilizationInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Utilization {
    version: u32,
    count: u32,
    last: u64,
    list: *mut u8,
}

/// The hooks of this family.
#[allow(non_snake_case, missing_docs, clippy::missing_safety_doc, reason = "NVML names and documents them")]
pub mod hooks {
    use super::*;

    pub unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
        device: Device,
        samples: *mut c_void,
        count: *mut u32,
        last: u64,
    ) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::nvmlDeviceGetProcessUtilization(device, samples, count, last) };
        // SAFETY: written by the driver when it succeeded.
        let Some(found) = (unsafe { read(count) }).filter(|_| status == SUCCESS) else { return status };
        // SAFETY: the driver has written `found` samples of 32 bytes, with the pid first.
        let kept = unsafe { keep_own(samples.cast(), found, 32, 0) };
        // SAFETY: as above.
        unsafe { write(count, kept) };
        if kept == 0 { NOT_FOUND } else { SUCCESS }
    }

    pub unsafe extern "C" fn nvmlDeviceGetProcessesUtilizationInfo(
        device: Device,
        samples: *mut c_void,
    ) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::nvmlDeviceGetProcessesUtilizationInfo(device, samples) };
        let samples: *mut Utilization = samples.cast();
        // SAFETY: accepted by the driver when it succeeded.
        let Some(found) = (unsafe { read(samples) }).filter(|_| status == SUCCESS) else { return status };
        // SAFETY: the driver has written `count` entries of 40 bytes, with the pid at 8.
        let count = unsafe { keep_own(found.list, found.count, 40, 8) };
        // SAFETY: as above.
        unsafe { write(samples, Utilization { count, ..found }) };
        if count == 0 { NOT_FOUND } else { SUCCESS }
    }

    pub unsafe extern "C" fn nvmlDeviceGetAccountingPids(
        device: Device,
        count: *mut u32,
        pids: *mut u32,
    ) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::nvmlDeviceGetAccountingPids(device, count, pids) };
        // SAFETY: written by the driver when it succeeded.
        if let Some(found) = unsafe { read(count) }.filter(|_| status == SUCCESS) {
            // SAFETY: the driver has written `found` pids.
            let kept = unsafe { keep_own(pids.cast(), found, 4, 0) };
            // SAFETY: as above.
            unsafe { write(count, kept) };
        }
        status
    }

    pub unsafe extern "C" fn nvmlDeviceGetAccountingStats(
        device: Device,
        pid: u32,
        stats: *mut c_void,
    ) -> Status {
        if !book().is_some_and(|book| book.is_own_pid(pid)) {
            return NOT_FOUND;
        }
        // SAFETY: our caller's arguments, unchanged.
        unsafe { real::nvmlDeviceGetAccountingStats(device, pid, stats) }
    }

    pub unsafe extern "C" fn nvmlDeviceGetAccountingStats_v2(device: Device, stats: *mut c_void) -> Status {
        // SAFETY: null, or our caller's structure, which begins with the pid that it asks about.
        let pid = unsafe { read(stats.cast::<u32>()) };
        if pid.is_some_and(|pid| !book().is_some_and(|book| book.is_own_pid(pid))) {
            return NOT_FOUND;
        }
        // SAFETY: our caller's arguments, unchanged.
        unsafe { real::nvmlDeviceGetAccountingStats_v2(device, stats) }
    }
}
