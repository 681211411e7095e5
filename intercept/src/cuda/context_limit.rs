//! Limits of a context that use device memory. Memory above the driver's defaults is charged before the
//! driver makes room for it. The other limits use no memory, or an undocumented amount.

use core::sync::atomic::Ordering;

use super::charge::Charge;
use super::context::{LIMITS, current, current_device};
use super::size::charged;
use super::{OUT_OF_MEMORY, SUCCESS, Status, here, real};

/// The stack limit is per thread. The driver keeps one stack for every thread that the GPU can run at once.
const STACK: usize = 0;
const MULTIPROCESSORS: i32 = 16; // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
const THREADS_PER_MULTIPROCESSOR: i32 = 39; // CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR

/// The device memory that a limit uses: for the stack, one stack for each thread that the device can run;
/// otherwise the size of the buffer.
fn taken_by(limit: usize, value: u64) -> u64 {
    if limit != STACK {
        return charged(value);
    }
    let Ok(device) = current_device() else { return u64::MAX };
    let mut known = true;
    let threads = [MULTIPROCESSORS, THREADS_PER_MULTIPROCESSOR].map(|attribute| {
        let mut value = 0;
        // SAFETY: the driver writes one integer.
        known &= unsafe { real::cuDeviceGetAttribute(&mut value, attribute, device) } == SUCCESS;
        u64::try_from(value).unwrap_or(0)
    });
    if known { threads.iter().fold(value, |bytes, count| bytes.saturating_mul(*count)) } else { u64::MAX }
}

/// Charges a larger limit before the driver makes room for it.
fn set_limit(limit: i32, value: usize, call: impl FnOnce() -> Status) -> Status {
    let number = usize::try_from(limit).unwrap_or(LIMITS);
    let Some(here) = here().filter(|_| number < LIMITS) else { return call() };
    let Some(current) = current(here) else { return call() };
    let place = usize::from(current.context).checked_sub(1).and_then(|at| here.state.contexts.known.get(at));
    let Some(held) = place.and_then(|known| known.limits.get(number)) else { return call() };
    let mut old = 0;
    // SAFETY: the driver writes one integer.
    if unsafe { real::cuCtxGetLimit(&mut old, limit) } != SUCCESS {
        return call();
    }
    let (old, new) = (taken_by(number, old as u64), taken_by(number, value as u64));
    let grown = new.saturating_sub(old);
    let Some(charge) = Charge::take(here, current.device, grown) else { return OUT_OF_MEMORY };
    let status = call();
    if status != SUCCESS {
        return status;
    }
    charge.keep();
    held.fetch_add(grown, Ordering::Relaxed);
    let less = old.saturating_sub(new).min(held.load(Ordering::Relaxed));
    held.fetch_sub(less, Ordering::Relaxed);
    here.book().release(usize::from(current.device), less);
    status
}

hooks! { |call|
    cuCtxSetLimit(limit: i32, value: usize) => set_limit(limit, value, call);
}
