//! Memory sizes as the container sees them. The driver is asked first, with the caller's own pointers, so
//! that it answers null outputs and errors itself.

use super::context::current;
use super::virtual_memory::share;
use super::{Device, Here, SUCCESS, Status, UNLISTED, here, line_of, read, real, write};

/// The free and total bytes to report.
fn seen(here: Here, line: u8, driver_free: u64, driver_total: u64) -> (u64, u64) {
    if line == UNLISTED {
        return (0, driver_total); // every allocation will be refused
    }
    share::reap(here); // memory whose exported descriptors were closed is free now
    let line = usize::from(line);
    let limit = here.book().limit(line);
    (limit.saturating_sub(here.book().used_by_living(line)).min(driver_free), limit)
}

/// Adjusts what the driver wrote. `L` is the type of the caller's integers; what does not fit becomes
/// `widest`.
///
/// # Safety
/// The pointers are null or readable and writable.
unsafe fn memory_info<L: Copy + TryFrom<u64> + TryInto<u64>>(free: *mut L, total: *mut L, widest: L) {
    let Some(here) = here() else { return };
    let Some(current) = current(here) else { return };
    // SAFETY: as our caller says.
    let driver_free = unsafe { read(free) }.and_then(|bytes| bytes.try_into().ok());
    // SAFETY: as our caller says.
    let driver_total = unsafe { read(total) }.and_then(|bytes| bytes.try_into().ok());
    let (seen_free, seen_total) =
        seen(here, current.device, driver_free.unwrap_or(u64::MAX), driver_total.unwrap_or(u64::MAX));
    // SAFETY: as our caller says.
    unsafe { write(free, L::try_from(seen_free).unwrap_or(widest)) };
    // SAFETY: as our caller says.
    unsafe { write(total, L::try_from(seen_total).unwrap_or(widest)) };
}

/// As [`memory_info`], for the size of a device.
///
/// # Safety
/// `bytes` is null or readable and writable.
unsafe fn total_memory<L: Copy + TryFrom<u64>>(bytes: *mut L, device: Device, widest: L) {
    let Some(here) = here() else { return };
    let line = line_of(here, device);
    if line != UNLISTED {
        let limit = here.book().limit(usize::from(line));
        // SAFETY: as our caller says.
        unsafe { write(bytes, L::try_from(limit).unwrap_or(widest)) };
    }
}

/// The hooks of this family.
#[allow(
    non_snake_case,
    missing_docs,
    clippy::missing_safety_doc,
    reason = "the driver names and documents them"
)]
pub mod hooks {
    use super::*;

    pub unsafe extern "C" fn cuMemGetInfo(free: *mut u32, total: *mut u32) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::cuMemGetInfo(free, total) };
        if status == SUCCESS {
            // SAFETY: the driver has accepted them.
            unsafe { memory_info(free, total, u32::MAX) };
        }
        status
    }

    pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::cuMemGetInfo_v2(free, total) };
        if status == SUCCESS {
            // SAFETY: the driver has accepted them.
            unsafe { memory_info(free, total, usize::MAX) };
        }
        status
    }

    pub unsafe extern "C" fn cuDeviceTotalMem(bytes: *mut u32, device: Device) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::cuDeviceTotalMem(bytes, device) };
        if status == SUCCESS {
            // SAFETY: the driver has accepted it.
            unsafe { total_memory(bytes, device, u32::MAX) };
        }
        status
    }

    pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: Device) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::cuDeviceTotalMem_v2(bytes, device) };
        if status == SUCCESS {
            // SAFETY: the driver has accepted it.
            unsafe { total_memory(bytes, device, usize::MAX) };
        }
        status
    }
}
