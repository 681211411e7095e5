//! Creates and ends contexts: charges the memory that the driver takes for the first context of a process on
//! a device, and releases everything that ends with a context.
//!
//! The driver does not report what a context costs, and other tenants' use makes differences of its free
//! figure meaningless. The host provides the observed cost of contexts, and that is charged as long as a
//! context of this process is alive. Near the limit the host's figure for the container replaces it,
//! including the cost of further contexts.

pub(super) mod green;

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use super::charge::{self, Charge};
use super::context::{Known, Line, device_of};
use super::queue::{self, Ran};
use super::{
    Context, Device, Here, OUT_OF_MEMORY, SUCCESS, Status, UNLISTED, here, launch, line_of, read, real,
};
use crate::table::{Entry, Kind};

/// Creates a context on `device` with `call`, which writes its handle to `handle`.
///
/// # Safety
/// `handle` is null or readable after `call` succeeded.
unsafe fn make(device: Device, handle: *mut Context, primary: bool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return OUT_OF_MEMORY };
    let contexts = &here.state.contexts;
    let device_line = line_of(here, device);
    if device_line == UNLISTED && super::uuid_of(device).is_none() {
        return call(); // no such device, or no cuInit yet: the driver answers with its own error
    }
    let is_charged =
        |lines: &[Line]| lines.get(usize::from(device_line)).is_some_and(|line| line.charged > 0);
    let _making = contexts.making.lock();
    // Hold the lock around the driver's call. Otherwise another thread could end the last context between the
    // driver's answer and our record.
    let mut lines = contexts.lines.lock();
    let mut charge = None;
    while charge.is_none() && !is_charged(&*lines) {
        drop(lines);
        charge = Charge::for_context(here, device_line);
        lines = contexts.lines.lock();
        if charge.is_none() && !is_charged(&*lines) {
            return OUT_OF_MEMORY;
        }
    }
    // If a context was adopted in the meantime, its cost is charged, and this charge is released.
    let charge = charge.filter(|_| !is_charged(&*lines));
    let status = call();
    if status != SUCCESS {
        return status;
    }
    if let (Some(charge), Some(line)) = (charge, lines.get_mut(usize::from(device_line))) {
        line.charged = charge.bytes();
        here.book().note_context(usize::from(device_line), line.charged);
        charge.keep();
    }
    // SAFETY: the caller guarantees this.
    if let Some(handle) = unsafe { read(handle) }.filter(|handle| contexts.find(*handle).is_none()) {
        contexts.enter(&mut *lines, handle, device_line, primary);
    }
    status
}

/// Releases everything that lived in the context with this number, which the driver has ended.
fn leave(here: Here, lines: &mut [Line], number: u8, known: &Known) {
    let device = known.device.load(Ordering::Relaxed);
    let book = here.book();
    here.state.table.remove_all(|entry| entry.context == number, |entry| charge::release(here, entry));
    for bytes in &known.limits {
        book.release(usize::from(device), bytes.swap(0, Ordering::Relaxed));
    }
    queue::ran(here, Ran::ended(number));
    launch::context_ended(here, known.handle.load(Ordering::Relaxed));
    known.handle.store(0, Ordering::Release);
    count_out(here, lines, device);
}

/// Records the end of a context without a place. Everything that lived in that context stays charged.
fn leave_unplaced(here: Here, lines: &mut [Line], device: u8) {
    if let Some(line) = lines.get_mut(usize::from(device)).filter(|line| line.unplaced > 0) {
        line.unplaced -= 1;
        count_out(here, lines, device);
    }
}

/// Counts one context less on `device`. With the last one, releases its cost and everything that lived in any
/// context of the device.
fn count_out(here: Here, lines: &mut [Line], device: u8) {
    let Some(line) = lines.get_mut(usize::from(device)) else { return };
    line.alive = line.alive.saturating_sub(1);
    if line.alive > 0 {
        return;
    }
    let book = here.book();
    if !line.uncounted {
        let ended = |entry: &Entry| entry.device == device && lives_in_context(entry);
        here.state.table.remove_all(ended, |entry| charge::release(here, entry));
        queue::line_ended(here, device);
    }
    let charged = core::mem::take(&mut line.charged);
    // In this order: a charge without its context would raise the limit by figure.
    book.forget_context(usize::from(device), charged);
    book.release(usize::from(device), charged);
}

/// Whether the object ends with its context. Pools follow the driver's figures, and physical memory needs no
/// context.
fn lives_in_context(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::Linear | Kind::Spilled | Kind::Array | Kind::Mipmap | Kind::External)
}

/// Whether a detach has ended the context. It does so only if nothing else is attached to it.
fn is_gone(context: Context) -> bool {
    /// `CUDA_ERROR_INVALID_CONTEXT` and `CUDA_ERROR_CONTEXT_IS_DESTROYED`. Any other error does not mean that
    /// the context is gone.
    const GONE: [Status; 2] = [201, 709];
    device_of(context).is_err_and(|status| GONE.contains(&status))
}

/// Ends the use of a context with `call`. `has_ended` then reports whether the context itself has ended.
fn destroy(context: Context, has_ended: fn(Context) -> bool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here().filter(|_| context != 0) else { return call() };
    let contexts = &here.state.contexts;
    let mut lines = contexts.lines.lock();
    let known = contexts.find(context);
    // After the context has ended, the driver no longer reports its device.
    let unplaced = known.is_none() && lines.iter().any(|line| line.unplaced > 0);
    let device = if unplaced { device_of(context).ok() } else { None };
    launch::context_ends(here, context);
    let status = call();
    if status != SUCCESS || !has_ended(context) {
        launch::context_stays(here, context);
        return status;
    }
    if let Some((number, known)) = known {
        leave(here, &mut *lines, number, known);
        return status;
    }
    launch::context_ended(here, context);
    if let Some(device) = device {
        leave_unplaced(here, &mut *lines, line_of(here, device));
    }
    status
}

/// Forwards a release or reset of the primary context, and asks the driver whether the context has ended.
fn end_primary(device: Device, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    let mut lines = here.state.contexts.lines.lock();
    let primary = here.state.contexts.primaries(line_of(here, device)).next();
    let handle = primary.map_or(0, |(known, _)| known.handle.load(Ordering::Relaxed));
    launch::context_ends(here, handle);
    let status = call();
    if status == SUCCESS {
        settle_primary(here, &mut *lines, device);
    }
    launch::context_stays(here, handle); // no effect if it has ended; most releases only lower a count
    status
}

/// Removes the primary context of `device` if the driver has ended it.
fn settle_primary(here: Here, lines: &mut [Line], device: Device) {
    let (mut flags, mut active) = (0, 1);
    // SAFETY: the driver writes two integers.
    let asked = unsafe { real::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) };
    if asked != SUCCESS || active != 0 {
        return;
    }
    let line = line_of(here, device);
    let primary = here.state.contexts.primaries(line).next();
    if let Some((known, number)) = primary {
        leave(here, lines, number, known);
    } else if lines.get_mut(usize::from(line)).is_some_and(|line| core::mem::take(&mut line.primary_unplaced))
    {
        leave_unplaced(here, lines, line);
    }
}

hooks! { |call|
    cuDevicePrimaryCtxRetain(context: *mut Context, device: Device) =>
        // SAFETY: the driver has written the handle when it succeeded.
        unsafe { make(device, context, true, call) };
    cuCtxCreate(context: *mut Context, flags: u32, device: Device) =>
        // SAFETY: as above.
        unsafe { make(device, context, false, call) };
    cuCtxCreate_v2(context: *mut Context, flags: u32, device: Device) =>
        // SAFETY: as above.
        unsafe { make(device, context, false, call) };
    cuCtxCreate_v3(context: *mut Context, affinity: *mut c_void, count: i32, flags: u32, device: Device) =>
        // SAFETY: as above.
        unsafe { make(device, context, false, call) };
    cuCtxCreate_v4(context: *mut Context, parameters: *mut c_void, flags: u32, device: Device) =>
        // SAFETY: as above.
        unsafe { make(device, context, false, call) };
    cuGLCtxCreate(context: *mut Context, flags: u32, device: Device) =>
        // SAFETY: as above.
        unsafe { make(device, context, false, call) };
    cuGLCtxCreate_v2(context: *mut Context, flags: u32, device: Device) =>
        // SAFETY: as above.
        unsafe { make(device, context, false, call) };
    cuVDPAUCtxCreate(context: *mut Context, flags: u32, device: Device, vdpau: u32, lookup: *mut c_void) =>
        // SAFETY: as above.
        unsafe { make(device, context, false, call) };
    cuVDPAUCtxCreate_v2(context: *mut Context, flags: u32, device: Device, vdpau: u32, lookup: *mut c_void) =>
        // SAFETY: as above.
        unsafe { make(device, context, false, call) };

    cuDevicePrimaryCtxRelease(device: Device) => end_primary(device, call);
    cuDevicePrimaryCtxRelease_v2(device: Device) => end_primary(device, call);
    cuDevicePrimaryCtxReset(device: Device) => end_primary(device, call);
    cuDevicePrimaryCtxReset_v2(device: Device) => end_primary(device, call);
    cuCtxDestroy(context: Context) => destroy(context, |_| true, call);
    cuCtxDestroy_v2(context: Context) => destroy(context, |_| true, call);
    cuCtxDetach(context: Context) => destroy(context, is_gone, call);
}
