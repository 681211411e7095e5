//! Linear, pitched and managed memory: charged against the device of the current context.

use super::charge::Charge;
use super::context::{Current, current};
use super::size::{charged, pitched};
use super::{Here, OUT_OF_MEMORY, SUCCESS, Status, here, pool, read, real};
use crate::table::{Entry, Kind};

/// Allocates with `call`, which takes at most `bytes` (already rounded). `key` then names the object.
pub(super) fn allocate(
    kind: Kind,
    bytes: u64,
    call: impl FnOnce() -> Status,
    key: impl FnOnce() -> Option<u64>,
) -> Status {
    let Some(here) = here() else { return OUT_OF_MEMORY };
    let Some(current) = current(here) else { return call() };
    let Some(charge) = Charge::take(here, current.device, bytes) else { return OUT_OF_MEMORY };
    let status = call();
    if status != SUCCESS {
        return status;
    }
    let Current { context, device } = current;
    match key() {
        Some(key) => charge.keep_for(Entry { key, size: bytes, extra: 0, kind, device, context }),
        None => charge.keep(),
    }
    status
}

/// Frees the object of `kind` and `key` with `call`, then gives its charge back. For an unknown object only
/// the driver is called.
pub(super) fn free(kind: Kind, key: u64, call: impl FnOnce() -> Status) -> Status {
    match here() {
        Some(here) => free_here(here, kind, key, call),
        None => call(),
    }
}

fn free_here(here: Here, kind: Kind, key: u64, call: impl FnOnce() -> Status) -> Status {
    // The entry goes first: once freed, the driver may give another thread the same name.
    let entry = here.state.table.take(kind, key);
    let status = call();
    if let Some(entry) = entry {
        if status == SUCCESS {
            here.book().release(usize::from(entry.device), entry.size);
        } else {
            // The object is still there. If the entry cannot be put back, the charge stays until the process
            // ends.
            let _ = here.state.table.put(entry);
        }
    }
    status
}

fn free_pointer(pointer: u64, call: impl FnOnce() -> Status) -> Status {
    match here() {
        Some(here) if !pool::is_unused(here) && here.state.table.get(Kind::Async, pointer).is_some() => {
            pool::memory::free(here, pointer, call)
        }
        Some(here) => free_here(here, Kind::Linear, pointer, call),
        None => call(),
    }
}

/// Settles a pitched allocation, for which the driver has chosen the pitch.
fn settle_pitch(here: Here, pointer: u64, pitch: u64, height: u64) {
    let real = charged(pitch.saturating_mul(height));
    let change = here
        .state
        .table
        .change(Kind::Linear, pointer, |entry| (entry.device, core::mem::replace(&mut entry.size, real)));
    let Some((device, bound)) = change else { return };
    let device = usize::from(device);
    if real > bound {
        here.book().add(device, real - bound);
    } else {
        here.book().release(device, bound - real);
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

    pub unsafe extern "C" fn cuMemAlloc(pointer: *mut u32, bytes: u32) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let call = || unsafe { real::cuMemAlloc(pointer, bytes) };
        // SAFETY: written by the driver when it succeeded.
        allocate(Kind::Linear, charged(bytes.into()), call, || unsafe { read(pointer) }.map(u64::from))
    }

    pub unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let call = || unsafe { real::cuMemAlloc_v2(pointer, bytes) };
        // SAFETY: written by the driver when it succeeded.
        allocate(Kind::Linear, charged(bytes as u64), call, || unsafe { read(pointer) })
    }

    pub unsafe extern "C" fn cuMemAllocManaged(pointer: *mut u64, bytes: usize, flags: u32) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let call = || unsafe { real::cuMemAllocManaged(pointer, bytes, flags) };
        // SAFETY: written by the driver when it succeeded.
        allocate(Kind::Linear, charged(bytes as u64), call, || unsafe { read(pointer) })
    }

    pub unsafe extern "C" fn cuMemAllocPitch(
        pointer: *mut u32,
        pitch: *mut u32,
        width: u32,
        height: u32,
        element: u32,
    ) -> Status {
        let bound = charged(pitched(width.into(), height.into()));
        // SAFETY: our caller's arguments, unchanged.
        let call = || unsafe { real::cuMemAllocPitch(pointer, pitch, width, height, element) };
        // SAFETY: written by the driver when it succeeded.
        let key = || unsafe { read(pointer) }.map(u64::from);
        let status = allocate(Kind::Linear, bound, call, key);
        if status == SUCCESS
            && let (Some(here), Some(pointer)) = (here(), key())
            // SAFETY: written by the driver, which succeeded.
            && let Some(pitch) = unsafe { read(pitch) }
        {
            settle_pitch(here, pointer, pitch.into(), height.into());
        }
        status
    }

    pub unsafe extern "C" fn cuMemAllocPitch_v2(
        pointer: *mut u64,
        pitch: *mut usize,
        width: usize,
        height: usize,
        element: u32,
    ) -> Status {
        let bound = charged(pitched(width as u64, height as u64));
        // SAFETY: our caller's arguments, unchanged.
        let call = || unsafe { real::cuMemAllocPitch_v2(pointer, pitch, width, height, element) };
        // SAFETY: written by the driver when it succeeded.
        let key = || unsafe { read(pointer) };
        let status = allocate(Kind::Linear, bound, call, key);
        if status == SUCCESS
            && let (Some(here), Some(pointer)) = (here(), key())
            // SAFETY: written by the driver, which succeeded.
            && let Some(pitch) = unsafe { read(pitch) }
        {
            settle_pitch(here, pointer, pitch as u64, height as u64);
        }
        status
    }

    pub unsafe extern "C" fn cuMemFree(pointer: u32) -> Status {
        // SAFETY: our caller's argument, unchanged.
        free_pointer(pointer.into(), || unsafe { real::cuMemFree(pointer) })
    }

    pub unsafe extern "C" fn cuMemFree_v2(pointer: u64) -> Status {
        // SAFETY: our caller's argument, unchanged.
        free_pointer(pointer, || unsafe { real::cuMemFree_v2(pointer) })
    }
}
