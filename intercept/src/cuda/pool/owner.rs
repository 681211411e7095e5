//! Finds the pool that an allocation comes from, and the device of a pool.

use super::super::context;
use super::super::stream_handle::is_default;
use super::super::{Context, Device, Here, Pool, SUCCESS, Stream, UNLISTED, each_device, line_of, real};

const POOL_OF_POINTER: i32 = 17; // CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE

/// The device of `context`; 0: of the current one.
fn device_of_context(context: Context) -> Option<Device> {
    let mut device = 0;
    // SAFETY: the driver checks the handle.
    if context != 0 && unsafe { real::cuCtxPushCurrent_v2(context) } != SUCCESS {
        return None;
    }
    // SAFETY: the driver writes one integer.
    let status = unsafe { real::cuCtxGetDevice(&mut device) };
    if context != 0 {
        // SAFETY: pops what was pushed above; the driver writes one handle.
        unsafe { real::cuCtxPopCurrent_v2(&mut 0) };
    }
    (status == SUCCESS).then_some(device)
}

/// The device whose pool an allocation on `stream` uses: the device of the stream, not of the thread's
/// context.
fn device_of_stream(stream: Stream) -> Option<Device> {
    let mut current = 0;
    if !is_default(stream) {
        let mut owner: Context = 0;
        // SAFETY: the driver checks the stream and writes one handle.
        let found = unsafe { real::cuStreamGetCtx(stream, &mut owner) };
        // SAFETY: the driver writes one handle.
        let asked = unsafe { real::cuCtxGetCurrent(&mut current) };
        if found == SUCCESS && asked == SUCCESS && owner != current {
            return device_of_context(owner);
        }
    }
    device_of_context(0)
}

/// The current pool of the stream's device.
pub(super) fn pool_of_stream(here: Here, stream: Stream) -> Option<(Pool, u8)> {
    let device = device_of_stream(stream)?;
    let mut pool = 0;
    // SAFETY: the driver writes one handle.
    let status = unsafe { real::cuDeviceGetMemPool(&mut pool, device) };
    (status == SUCCESS).then(|| (pool, line_of(here, device)))
}

/// The line of a pool that was not made by a hooked call: the default pool of some device.
pub(super) fn line_of_pool(here: Here, pool: Pool) -> u8 {
    let mut found = None;
    each_device(here, |device, line| {
        let mut default = 0;
        // SAFETY: the driver writes one handle.
        if unsafe { real::cuDeviceGetDefaultMemPool(&mut default, device) } == SUCCESS && default == pool {
            found = Some(line);
        }
    });
    found.or_else(|| context::current(here).map(|current| current.device)).unwrap_or(UNLISTED)
}

/// The pool in which `pointer` lies.
pub(super) fn pool_of_pointer(pointer: u64) -> Option<Pool> {
    let mut pool: Pool = 0;
    // SAFETY: the attribute is a handle.
    let status = unsafe {
        real::cuPointerGetAttribute(core::ptr::from_mut(&mut pool).cast(), POOL_OF_POINTER, pointer)
    };
    (status == SUCCESS && pool != 0).then_some(pool)
}
