//! Memory of a GPU: the total is the container's limit, and used and free memory add up to it.

use super::{Device, Status, book, each_granted, real, rewrite};

/// The total and used bytes to report, where the driver's total is `driver_total`. A GPU that is divided has those
/// of the container's instances together.
fn seen(device: Device, driver_total: u64) -> (u64, u64) {
    let Some(book) = book() else { return (driver_total, driver_total) };
    let mut seen = None;
    each_granted(book, device, |granted| {
        let limit = book.limit(granted.line);
        let (total, used) = seen.unwrap_or((0u64, 0u64));
        let held = book.held_by_living(granted.line).min(limit);
        seen = Some((total.saturating_add(limit), used.saturating_add(held)));
    });
    seen.unwrap_or((driver_total, driver_total)) // not granted, so nothing of it is free
}

hooks! { |call|
    nvmlDeviceGetMemoryInfo(device: Device, memory: *mut [u64; 3]) => {
        let change = |[driver_total, ..]: [u64; 3]| {
            let (total, used) = seen(device, driver_total);
            [total, total - used, used] // total, free, used
        };
        // SAFETY: written by the driver when it succeeded.
        unsafe { rewrite(memory, call, change) }
    };
    nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut [u64; 5]) => {
        let change = |[version, driver_total, ..]: [u64; 5]| {
            let (total, used) = seen(device, driver_total);
            [version, total, 0, total - used, used] // version, total, reserved, free, used
        };
        // SAFETY: written by the driver when it succeeded.
        unsafe { rewrite(memory, call, change) }
    };
}
