//! Finds the pool that an allocation comes from, and the device of a pool.

use super::super::context::{current, current_device, current_handle, device_of};
use super::super::stream_handle::{is_default, owner};
use super::super::{Device, Here, Pool, SUCCESS, Stream, UNLISTED, each_device, line_of, real};

const POOL_OF_POINTER: i32 = 17; // CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE

/// The device whose pool an allocation on `stream` uses: the device of the stream, not of the thread's
/// context.
fn device_of_stream(stream: Stream) -> Option<Device> {
    let owner = if is_default(stream) { None } else { owner(stream) };
    match owner.filter(|owner| current_handle() != Some(*owner)) {
        Some(elsewhere) => device_of(elsewhere).ok(),
        None => current_device().ok(),
    }
}

/// The current pool of the stream's device.
pub(super) fn pool_of_stream(here: Here, stream: Stream) -> Option<(Pool, u8)> {
    let device = device_of_stream(stream)?;
    let mut pool = 0;
    // SAFETY: the driver writes one handle.
    let status = unsafe { real::cuDeviceGetMemPool(&mut pool, device) };
    (status == SUCCESS).then(|| (pool, line_of(here, device)))
}

/// The line of a pool that was not created by a hooked call: the default pool of some device.
pub(super) fn line_of_pool(here: Here, pool: Pool) -> u8 {
    let mut found = None;
    each_device(here, |device, line| {
        let mut default = 0;
        // SAFETY: the driver writes one handle.
        if unsafe { real::cuDeviceGetDefaultMemPool(&mut default, device) } == SUCCESS && default == pool {
            found = Some(line);
        }
    });
    found.or_else(|| current(here).map(|current| current.device)).unwrap_or(UNLISTED)
}

/// The pool that contains `pointer`.
pub(super) fn pool_of_pointer(pointer: u64) -> Option<Pool> {
    let mut pool: Pool = 0;
    // SAFETY: the attribute is a handle.
    let status = unsafe {
        real::cuPointerGetAttribute(core::ptr::from_mut(&mut pool).cast(), POOL_OF_POINTER, pointer)
    };
    (status == SUCCESS && pool != 0).then_some(pool)
}
