//! Green contexts: parts of a GPU's processors, each with its own handle. A green context keeps the primary
//! context of its device alive. A second handle makes it current and also identifies its streams (CUDA driver
//! API, green contexts).

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use super::super::{Context, Device, Here, SUCCESS, Status, after_writing, each_device, here, launch, real};
use super::{leave, make, settle_primary};

/// Replaces the handle of a green context with the context handle that makes it current.
fn convert(here: Here, green: Context, context: Context) {
    let contexts = &here.state.contexts;
    let _lines = contexts.lines.lock();
    if let Some((_, known)) = contexts.find(green)
        && contexts.find(context).is_none()
    {
        known.green.store(green, Ordering::Relaxed);
        known.handle.store(context, Ordering::Release);
    }
}

/// Enters both handles of a new green context: the program can put work into its streams without requesting
/// the second one.
fn made(here: Here, green: Context) {
    let mut context = 0;
    // SAFETY: just created; the driver writes one handle.
    if unsafe { real::cuCtxFromGreenCtx(&mut context, green) } == SUCCESS {
        convert(here, green, context);
    }
}

/// Ends a green context. The primary context of its device, which it kept alive, may end with it.
fn end_green(green: Context, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here().filter(|_| green != 0) else { return call() };
    let contexts = &here.state.contexts;
    let mut lines = contexts.lines.lock();
    let known = contexts.find_by(|known| {
        let [handle, behind] = [&known.handle, &known.green].map(|word| word.load(Ordering::Relaxed));
        handle == green || handle != 0 && behind == green
    });
    let handle = known.map_or(0, |(_, known)| known.handle.load(Ordering::Relaxed));
    launch::context_ends(here, handle);
    let status = call();
    let Some((number, known)) = known.filter(|_| status == SUCCESS) else {
        launch::context_stays(here, handle);
        return status;
    };
    let line = known.device.load(Ordering::Relaxed);
    leave(here, &mut *lines, number, known);
    each_device(here, |device, at| {
        if at == line {
            settle_primary(here, &mut *lines, device);
        }
    });
    status
}

hooks! { |call|
    cuGreenCtxCreate(green: *mut Context, resources: *mut c_void, device: Device, flags: u32) =>
    {
        // SAFETY: the driver has written the handle when it succeeded.
        let make = || unsafe { make(device, green, false, call) };
        // SAFETY: as above.
        unsafe { after_writing(green, make, made) }
    };
    cuCtxFromGreenCtx(context: *mut Context, green: Context) =>
        // SAFETY: the driver has written the handle when it succeeded.
        unsafe { after_writing(context, call, |here, context| convert(here, green, context)) };
    cuGreenCtxDestroy(green: Context) => end_green(green, call);
}
