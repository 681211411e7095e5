//! Memory sizes as the container sees them. The driver is called first, with the caller's own pointers, so
//! that it handles null outputs and errors itself.

use super::context::current;
use super::virtual_memory::share;
use super::{Device, Here, Status, UNLISTED, after_success, here, line_of, read_number, real, write};

/// The free and total bytes to report.
fn seen(here: Here, line: u8, driver_free: u64, driver_total: u64) -> (u64, u64) {
    if line == UNLISTED {
        return (0, driver_total); // every allocation will be refused
    }
    share::reap(here); // memory whose exported descriptors were closed is now free
    let line = usize::from(line);
    let book = here.book();
    let used = book.used_by_living(line);
    let free = book.within_reach(line).saturating_sub(used);
    (free.min(driver_free), book.size(line))
}

/// Adjusts the values that the driver wrote. `L` is the type of the caller's integers; a value that does not
/// fit becomes `widest`.
///
/// # Safety
/// The pointers are null or readable and writable.
unsafe fn memory_info<L: Copy + TryFrom<u64> + TryInto<u64>>(free: *mut L, total: *mut L, widest: L) {
    let Some(here) = here() else { return };
    let Some(current) = current(here) else { return };
    // SAFETY: the caller guarantees this.
    let driver_free = unsafe { read_number(free) }.unwrap_or(u64::MAX);
    // SAFETY: the caller guarantees this.
    let driver_total = unsafe { read_number(total) }.unwrap_or(u64::MAX);
    let (seen_free, seen_total) = seen(here, current.device, driver_free, driver_total);
    // SAFETY: the caller guarantees this.
    unsafe { write(free, L::try_from(seen_free).unwrap_or(widest)) };
    // SAFETY: the caller guarantees this.
    unsafe { write(total, L::try_from(seen_total).unwrap_or(widest)) };
}

/// Like [`memory_info`], for the size of a device.
///
/// # Safety
/// `bytes` is null or readable and writable.
unsafe fn total_memory<L: Copy + TryFrom<u64>>(bytes: *mut L, device: Device, widest: L) {
    let Some(here) = here() else { return };
    let line = line_of(here, device);
    if line != UNLISTED {
        let size = here.book().size(usize::from(line));
        // SAFETY: the caller guarantees this.
        unsafe { write(bytes, L::try_from(size).unwrap_or(widest)) };
    }
}

hooks! { |call|
    cuMemGetInfo(free: *mut u32, total: *mut u32) =>
        // SAFETY: the driver has accepted them.
        after_success(call, || unsafe { memory_info(free, total, u32::MAX) });
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) =>
        // SAFETY: the driver has accepted them.
        after_success(call, || unsafe { memory_info(free, total, usize::MAX) });
    cuDeviceTotalMem(bytes: *mut u32, device: Device) =>
        // SAFETY: the driver has accepted it.
        after_success(call, || unsafe { total_memory(bytes, device, u32::MAX) });
    cuDeviceTotalMem_v2(bytes: *mut usize, device: Device) =>
        // SAFETY: the driver has accepted it.
        after_success(call, || unsafe { total_memory(bytes, device, usize::MAX) });
}
