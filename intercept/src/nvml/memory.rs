//! Memory of a GPU: the total is the container's limit, and used and free memory add up to it.

use super::{Device, Status, book, each_granted, real, rewrite};

/// The bytes of a GPU that are reported.
#[derive(Clone, Copy)]
struct Seen {
    total: u64,
    used: u64,
    /// The part of a growable limit's size that other containers hold.
    reserved: u64,
}

/// The bytes to report if the driver's total is `driver_total`. A divided GPU reports the sum over the
/// container's instances.
fn seen(device: Device, driver_total: u64) -> Seen {
    // The GPU is not granted, so none of its memory is free.
    let nothing = Seen { total: driver_total, used: driver_total, reserved: 0 };
    let Some(book) = book() else { return nothing };
    let mut seen = None;
    each_granted(book, device, |granted| {
        let (total, reach) = (book.size(granted.line), book.within_reach(granted.line));
        let uncharged = book.uncharged(granted.line);
        let used = book.held_by_living(granted.line).saturating_sub(uncharged).min(total);
        // Uncharged memory is in both; count it as free once.
        let reserved = total - reach.saturating_sub(uncharged).clamp(used, total);
        let others = seen.unwrap_or(Seen { total: 0, used: 0, reserved: 0 });
        seen = Some(Seen {
            total: others.total.saturating_add(total),
            used: others.used.saturating_add(used),
            reserved: others.reserved.saturating_add(reserved),
        });
    });
    seen.unwrap_or(nothing)
}

hooks! { |call|
    nvmlDeviceGetMemoryInfo(device: Device, memory: *mut [u64; 3]) => {
        let change = |[driver_total, ..]: [u64; 3]| {
            let Seen { total, used, reserved } = seen(device, driver_total);
            let free = total.saturating_sub(used).saturating_sub(reserved);
            [total, free, total - free] // total, free, used, which includes the reserved part
        };
        // SAFETY: written by the driver when it succeeded.
        unsafe { rewrite(memory, call, change) }
    };
    nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut [u64; 5]) => {
        let change = |[version, driver_total, ..]: [u64; 5]| {
            let Seen { total, used, reserved } = seen(device, driver_total);
            let free = total.saturating_sub(used).saturating_sub(reserved);
            [version, total, reserved, free, used] // version, total, reserved, free, used
        };
        // SAFETY: written by the driver when it succeeded.
        unsafe { rewrite(memory, call, change) }
    };
}
