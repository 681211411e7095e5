//! Memory of a GPU: the total is the container's limit, and used and free memory add up to it.

use super::{Device, SUCCESS, Status, book, line_of, read, real, write};

/// The total and used bytes to report, where the driver's total is `driver_total`.
fn seen(device: Device, driver_total: u64) -> (u64, u64) {
    let Some(book) = book() else { return (driver_total, driver_total) };
    match line_of(book, device) {
        Some(line) => {
            let limit = book.limit(line);
            (limit, book.held_by_living(line).min(limit))
        }
        None => (driver_total, driver_total), // not granted, so nothing of it is free
    }
}

/// The hooks of this family.
#[allow(non_snake_case, missing_docs, clippy::missing_safety_doc, reason = "NVML names and documents them")]
pub mod hooks {
    use super::*;

    pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut [u64; 3]) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::nvmlDeviceGetMemoryInfo(device, memory) };
        // SAFETY: written by the driver when it succeeded.
        if let Some([total, ..]) = unsafe { read(memory) }.filter(|_| status == SUCCESS) {
            let (total, used) = seen(device, total);
            // SAFETY: as above; total, free, used.
            unsafe { write(memory, [total, total - used, used]) };
        }
        status
    }

    pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut [u64; 5]) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::nvmlDeviceGetMemoryInfo_v2(device, memory) };
        // SAFETY: written by the driver when it succeeded.
        if let Some([version, total, ..]) = unsafe { read(memory) }.filter(|_| status == SUCCESS) {
            let (total, used) = seen(device, total);
            // SAFETY: as above; version, total, reserved, free, used.
            unsafe { write(memory, [version, total, 0, total - used, used]) };
        }
        status
    }
}
