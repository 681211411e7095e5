//! Utilisation and accounting by process: the driver's own figures, without processes that do not belong to
//! the container.
//!
//! Processes are compared by pid. If the driver reports host pids, few of them equal a pid of the container,
//! and the rest is dropped. Showing too little is better than showing another tenant's process.

use core::ffi::c_void;

use super::{Device, NOT_FOUND, SUCCESS, Status, book, read, real, rewrite, write};

/// Whether `pid` belongs to the container.
fn is_own(pid: u32) -> bool {
    book().is_some_and(|book| book.is_own_pid(pid))
}

/// Keeps the entries whose pid belongs to the container, clears the rest of the list, and returns how many
/// were kept. The pid is at offset `pid_at` in an entry of `stride` bytes.
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
        if pid.is_some_and(is_own) {
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

/// Size of one moment in the list that `nvidia-smi pmon` reads: a time and four engines.
const MOMENT: usize = 328;
const ENGINES: usize = 4;
/// Size of an engine's part. Its first word is the utilisation, its third the process that used the engine.
const ENGINE: usize = 80;
/// No process.
const NOBODY: u32 = u32::MAX;

/// Keeps in a list of moments only the activity of processes for which `is_own` is true. The number of
/// moments stays the same: a reader divides by it.
///
/// # Safety
/// `list` holds `count` moments.
unsafe fn hide_foreign(list: *mut u8, count: u32, is_own: impl Fn(u32) -> bool) {
    for part in 0..count as usize * ENGINES {
        let at = part / ENGINES * MOMENT + size_of::<u64>() + part % ENGINES * ENGINE;
        let engine = list.wrapping_add(at).cast::<[u32; 3]>();
        // SAFETY: an engine of one of the moments.
        if let Some([_, other, pid]) = unsafe { read(engine) }.filter(|[_, _, pid]| *pid != NOBODY)
            && !is_own(pid)
        {
            // SAFETY: as above.
            unsafe { write(engine, [0, other, NOBODY]) };
        }
    }
}

/// Runs `call`, and removes the activity of other processes from the moments that it wrote.
///
/// # Safety
/// `count` is null or readable, and `list` null or the list of that many moments, after `call` succeeded.
pub(super) unsafe fn moments(count: *mut u32, list: *mut u8, call: impl FnOnce() -> Status) -> Status {
    let status = call();
    // SAFETY: the caller guarantees this.
    if let Some(found) = unsafe { read(count) }.filter(|_| status == SUCCESS && !list.is_null()) {
        // SAFETY: the caller guarantees this.
        unsafe { hide_foreign(list, found, is_own) };
    }
    status
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

hooks! { |call|
    nvmlDeviceGetProcessUtilization(device: Device, samples: *mut c_void, count: *mut u32, last: u64) => {
        let status = call();
        // SAFETY: written by the driver when it succeeded.
        let Some(found) = (unsafe { read(count) }).filter(|_| status == SUCCESS) else { return status };
        // SAFETY: the driver has written `found` samples of 32 bytes, with the pid first.
        let kept = unsafe { keep_own(samples.cast(), found, 32, 0) };
        // SAFETY: as above.
        unsafe { write(count, kept) };
        if kept == 0 { NOT_FOUND } else { SUCCESS }
    };
    nvmlDeviceGetProcessesUtilizationInfo(device: Device, samples: *mut c_void) => {
        let status = call();
        let samples: *mut Utilization = samples.cast();
        // SAFETY: accepted by the driver when it succeeded.
        let Some(found) = (unsafe { read(samples) }).filter(|_| status == SUCCESS) else { return status };
        // SAFETY: the driver has written `count` entries of 40 bytes, with the pid at 8.
        let count = unsafe { keep_own(found.list, found.count, 40, 8) };
        // SAFETY: as above.
        unsafe { write(samples, Utilization { count, ..found }) };
        if count == 0 { NOT_FOUND } else { SUCCESS }
    };
    nvmlDeviceGetAccountingPids(device: Device, count: *mut u32, pids: *mut u32) => {
        // SAFETY: the driver has written as many pids as it says.
        let keep = |found| unsafe { keep_own(pids.cast(), found, 4, 0) };
        // SAFETY: written by the driver when it succeeded.
        unsafe { rewrite(count, call, keep) }
    };
    nvmlDeviceGetAccountingStats(device: Device, pid: u32, stats: *mut c_void) =>
        if is_own(pid) { call() } else { NOT_FOUND };
    nvmlDeviceGetAccountingStats_v2(device: Device, stats: *mut c_void) =>
        // SAFETY: null, or our caller's structure, which begins with the pid that it asks about.
        match unsafe { read(stats.cast::<u32>()) } {
            Some(pid) if !is_own(pid) => NOT_FOUND,
            _ => call(),
        };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_list_of_moments_the_containers_own_engines_remain() {
        let mut list = [[0u32; MOMENT / 4]; 3];
        let engine = |number: usize| 2 + number * ENGINE / 4;
        for (moment, entry) in list.iter_mut().enumerate() {
            entry[0] = 7; // the time
            for (number, pid) in [11, 12, NOBODY, 13].into_iter().enumerate() {
                let at = engine(number);
                entry[at..at + 3].copy_from_slice(&[50 + u32::try_from(moment).unwrap(), 5, pid]);
            }
        }
        // SAFETY: a list of three moments, the last of which must stay untouched.
        unsafe { hide_foreign(list.as_mut_ptr().cast(), 2, |pid| pid == 12) };
        for (moment, entry) in list.iter().enumerate() {
            let part = |number: usize| &entry[engine(number)..engine(number) + 3];
            let used = 50 + u32::try_from(moment).unwrap();
            let foreign = |pid| if moment < 2 { [0, 5, NOBODY] } else { [used, 5, pid] };
            assert_eq!((entry[0], part(0), part(3)), (7, &foreign(11)[..], &foreign(13)[..]), "{moment}");
            assert_eq!((part(1), part(2)), (&[used, 5, 12][..], &[used, 5, NOBODY][..]), "{moment}");
        }
    }
}
