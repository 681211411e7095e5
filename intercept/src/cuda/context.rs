//! Contexts: the memory that the driver takes for the first one of a process on a device, and what dies with one.
//!
//! The driver tells nobody inside the process what a context costs, and other tenants' use makes a difference of its
//! free figure meaningless. The estimate therefore stays charged as long as a context of this process is alive; what
//! further contexts cost is not documented, and left to the host's audit.

pub(super) mod green;
pub(super) mod limit;

use core::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use gpushare_region::MAX_DEVICES;

use self::limit::LIMITS;
use super::charge::Charge;
use super::queue::{self, Ran};
use super::{
    Context, Device, Here, OUT_OF_MEMORY, SUCCESS, Status, UNLISTED, here, launch, line_of, read, real,
};
use crate::mutex::Mutex;
use crate::table::{Entry, Kind};

/// Device memory charged for the first context of a process on a device.
pub const CONTEXT_BYTES: u64 = 320 << 20;
/// Contexts whose end we can follow; the objects of further ones stay charged until they are freed one by one.
const KNOWN: usize = 64;

/// The contexts of this process.
#[repr(C)]
pub(super) struct Contexts {
    known: [Known; KNOWN],
    /// Held by the one thread that makes a context: two that pay the estimate at once would need room for it twice.
    /// Taken before `lines`.
    making: Mutex<()>,
    /// By line of the limits file; held while a context comes or goes, the driver's part of it included. Who holds it
    /// may take the locks of the families, so nobody asks for a charge meanwhile: that looks for room in all of them.
    lines: Mutex<[Line; MAX_DEVICES]>,
}

/// The contexts of this process on one device.
#[derive(Clone, Copy)]
#[repr(C)]
struct Line {
    /// Contexts that were entered and have not ended, whether or not there was a place for them.
    alive: u32,
    /// Those among them that found no place.
    unplaced: u32,
    /// Whether the primary context is one of these.
    primary_unplaced: bool,
    /// Whether the estimate is charged.
    charged: bool,
    /// Whether a context was met that could not be counted: nobody can say then which one is the last.
    uncounted: bool,
}

#[repr(C)]
struct Known {
    /// The driver's handle; 0: this place is free.
    handle: AtomicUsize,
    device: AtomicU8,
    primary: AtomicU8,
    /// The green context behind the handle; 0: none.
    green: AtomicUsize,
    /// Bytes charged for its limits above the driver's defaults.
    limits: [AtomicU64; LIMITS],
}

/// Where an allocation of the calling thread goes.
#[derive(Clone, Copy)]
pub(super) struct Current {
    /// Number of the context; 0 when it is one too many to follow, or green.
    pub(super) context: u8,
    /// Line of the limits file.
    pub(super) device: u8,
}

impl Contexts {
    fn find(&self, handle: Context) -> Option<(u8, &Known)> {
        self.find_by(|known| known.handle.load(Ordering::Acquire) == handle)
    }

    fn find_by(&self, wanted: impl Fn(&Known) -> bool) -> Option<(u8, &Known)> {
        let found = self.known.iter().enumerate().find(|(_, known)| wanted(known));
        found.and_then(|(index, known)| Some((u8::try_from(index + 1).ok()?, known)))
    }

    /// The primary context of `device`, with its number.
    fn primaries(&self, device: u8) -> impl Iterator<Item = (&Known, u8)> {
        self.known.iter().zip(1..).filter(move |(known, _)| {
            known.handle.load(Ordering::Relaxed) != 0
                && known.primary.load(Ordering::Relaxed) == 1
                && known.device.load(Ordering::Relaxed) == device
        })
    }

    /// Enters a context that the driver has made; its number, 0 when there is no place.
    fn enter(&self, lines: &mut [Line], handle: Context, device: u8, primary: bool) -> u8 {
        let mut line = lines.get_mut(usize::from(device));
        if primary && line.as_ref().is_some_and(|line| line.primary_unplaced) {
            return 0; // the driver hands out the same one again, and it was counted
        }
        if let Some(line) = &mut line {
            line.alive = line.alive.saturating_add(1);
        }
        let Some((number, known)) = self.find(0) else {
            if let Some(line) = line {
                line.unplaced = line.unplaced.saturating_add(1);
                line.primary_unplaced |= primary;
            }
            return 0;
        };
        known.device.store(device, Ordering::Relaxed);
        known.primary.store(primary.into(), Ordering::Relaxed);
        known.green.store(0, Ordering::Relaxed);
        known.limits.iter().for_each(|bytes| bytes.store(0, Ordering::Relaxed));
        known.handle.store(handle, Ordering::Release);
        number
    }
}

/// The calling thread's context and device; `None` when it has none, and the driver shall say so.
pub(super) fn current(here: Here) -> Option<Current> {
    let mut handle = 0;
    // SAFETY: the driver writes one handle.
    if unsafe { real::cuCtxGetCurrent(&mut handle) } != SUCCESS || handle == 0 {
        return None;
    }
    match here.state.contexts.find(handle) {
        Some((number, known)) => {
            // What is allocated under a green context is the primary one's, and outlives it.
            let context = if known.green.load(Ordering::Relaxed) == 0 { number } else { 0 };
            Some(Current { context, device: known.device.load(Ordering::Relaxed) })
        }
        None => adopt(here, handle),
    }
}

/// Runs `act` in the context of `number`, which cannot end meanwhile; not at all where there is none.
pub(super) fn within(here: Here, number: u64, act: impl FnOnce()) {
    let contexts = &here.state.contexts;
    let _lines = contexts.lines.lock();
    let place = usize::try_from(number).ok().and_then(|number| contexts.known.get(number.checked_sub(1)?));
    let handle = place.map_or(0, |known| known.handle.load(Ordering::Acquire));
    // SAFETY: a context that has not ended: its end would need the lock.
    if handle == 0 || unsafe { real::cuCtxPushCurrent_v2(handle) } != SUCCESS {
        return;
    }
    act();
    // SAFETY: takes back the push above; the driver writes one handle.
    unsafe { real::cuCtxPopCurrent_v2(&mut 0) };
}

/// The number of `context`; 0 when it is none that we follow.
pub(super) fn number(here: Here, context: Context) -> u8 {
    if context == 0 { 0 } else { here.state.contexts.find(context).map_or(0, |(number, _)| number) }
}

/// Line of the limits file of a context that this process made.
pub(super) fn line_of_context(here: Here, context: Context) -> Option<u8> {
    let known = here.state.contexts.find(context).filter(|_| context != 0);
    known.map(|(_, known)| known.device.load(Ordering::Relaxed))
}

/// Enters the current context, which was made where we could not see it: its estimate is charged, limit or not.
#[cold]
fn adopt(here: Here, handle: Context) -> Option<Current> {
    let mut device = 0;
    // SAFETY: the driver writes one integer.
    if unsafe { real::cuCtxGetDevice(&mut device) } != SUCCESS {
        return None;
    }
    let device = line_of(here, device);
    let contexts = &here.state.contexts;
    let mut lines = contexts.lines.lock();
    if let Some((context, _)) = contexts.find(handle) {
        return Some(Current { context, device }); // another thread was faster
    }
    if let Some(line) = lines.get_mut(usize::from(device)).filter(|line| !line.charged) {
        here.book().add(usize::from(device), CONTEXT_BYTES);
        here.book().note_context(usize::from(device), CONTEXT_BYTES);
        line.charged = true;
    }
    let unplaced = lines.get(usize::from(device)).is_some_and(|line| line.unplaced > 0);
    if unplaced || contexts.find(0).is_none() {
        if let Some(line) = lines.get_mut(usize::from(device)) {
            line.uncounted = true;
        }
        return Some(Current { context: 0, device }); // counted when it was made, or made where nobody counts
    }
    Some(Current { context: contexts.enter(&mut *lines, handle, device, false), device })
}

/// Makes a context on `device` with `call`, which writes its handle to `handle`.
///
/// # Safety
/// `handle` is null or readable after `call` succeeded.
unsafe fn make(device: Device, handle: *mut Context, primary: bool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return OUT_OF_MEMORY };
    let contexts = &here.state.contexts;
    let device_line = line_of(here, device);
    if device_line == UNLISTED && super::uuid_of(device).is_none() {
        return call(); // no such device, or no cuInit yet: the driver's own error
    }
    let is_charged = |lines: &[Line]| lines.get(usize::from(device_line)).is_some_and(|line| line.charged);
    let _making = contexts.making.lock();
    // Held around the call: otherwise another thread could end the last context between its answer and our note of it.
    let mut lines = contexts.lines.lock();
    let mut charge = None;
    while charge.is_none() && !is_charged(&*lines) {
        drop(lines);
        charge = Charge::take(here, device_line, CONTEXT_BYTES);
        lines = contexts.lines.lock();
        if charge.is_none() && !is_charged(&*lines) {
            return OUT_OF_MEMORY;
        }
    }
    // A context was adopted meanwhile, which paid: this charge goes back.
    let charge = charge.filter(|_| !is_charged(&*lines));
    let status = call();
    if status != SUCCESS {
        return status;
    }
    if let (Some(charge), Some(line)) = (charge, lines.get_mut(usize::from(device_line))) {
        charge.keep();
        here.book().note_context(usize::from(device_line), CONTEXT_BYTES);
        line.charged = true;
    }
    // SAFETY: as our caller says.
    if let Some(handle) = unsafe { read(handle) }.filter(|handle| contexts.find(*handle).is_none()) {
        contexts.enter(&mut *lines, handle, device_line, primary);
    }
    status
}

/// Drops all that lived in the context in place `number`, which the driver has ended.
fn leave(here: Here, lines: &mut [Line], number: u8, known: &Known) {
    let device = known.device.load(Ordering::Relaxed);
    let book = here.book();
    here.state.table.remove_all(
        |entry| entry.context == number,
        |entry| book.release(usize::from(entry.device), entry.size),
    );
    for bytes in &known.limits {
        book.release(usize::from(device), bytes.swap(0, Ordering::Relaxed));
    }
    queue::ran(here, Ran::Context(number));
    launch::context_ended(here, known.handle.load(Ordering::Relaxed));
    known.handle.store(0, Ordering::Release);
    count_out(here, lines, device);
}

/// Notes the end of a context without a place. What lived in it stays charged.
fn leave_unplaced(here: Here, lines: &mut [Line], device: u8) {
    if let Some(line) = lines.get_mut(usize::from(device)).filter(|line| line.unplaced > 0) {
        line.unplaced -= 1;
        count_out(here, lines, device);
    }
}

/// One context less on `device`. With the last one go the estimate and all that lived in contexts, whichever it was.
fn count_out(here: Here, lines: &mut [Line], device: u8) {
    let Some(line) = lines.get_mut(usize::from(device)) else { return };
    line.alive = line.alive.saturating_sub(1);
    if line.alive > 0 {
        return;
    }
    let book = here.book();
    if !line.uncounted {
        here.state.table.remove_all(
            |entry| entry.device == device && lives_in_context(entry),
            |entry| book.release(usize::from(entry.device), entry.size),
        );
        queue::line_ended(here, device);
    }
    if core::mem::take(&mut line.charged) {
        book.release(usize::from(device), CONTEXT_BYTES);
        book.forget_context(usize::from(device), CONTEXT_BYTES);
    }
}

/// Pools follow the driver's figures, and physical memory needs no context.
fn lives_in_context(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::Linear | Kind::Array | Kind::Mipmap | Kind::External)
}

/// Asks the driver for a context by making it current for a moment: its device, or why not.
fn ask(context: Context) -> Result<Device, Status> {
    // SAFETY: a handle that the driver checks.
    let pushed = unsafe { real::cuCtxPushCurrent_v2(context) };
    if pushed != SUCCESS {
        return Err(pushed);
    }
    let (mut device, mut popped) = (0, 0);
    // SAFETY: the driver writes one integer.
    let asked = unsafe { real::cuCtxGetDevice(&mut device) };
    // SAFETY: takes back the push above; the driver writes one handle.
    unsafe { real::cuCtxPopCurrent_v2(&mut popped) };
    if asked == SUCCESS { Ok(device) } else { Err(asked) }
}

/// A detach ends a context only if nobody else is attached to it.
fn is_gone(context: Context) -> bool {
    /// `CUDA_ERROR_INVALID_CONTEXT` and `CUDA_ERROR_CONTEXT_IS_DESTROYED`: any other error tells nothing.
    const GONE: [Status; 2] = [201, 709];
    ask(context).is_err_and(|status| GONE.contains(&status))
}

fn destroy(context: Context, has_ended: fn(Context) -> bool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here().filter(|_| context != 0) else { return call() };
    let contexts = &here.state.contexts;
    let mut lines = contexts.lines.lock();
    let known = contexts.find(context);
    // Afterwards nobody can say where it was.
    let unplaced = known.is_none() && lines.iter().any(|line| line.unplaced > 0);
    let device = if unplaced { ask(context).ok() } else { None };
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

fn detach(context: Context, call: impl FnOnce() -> Status) -> Status {
    destroy(context, is_gone, call)
}

fn end(context: Context, call: impl FnOnce() -> Status) -> Status {
    destroy(context, |_| true, call)
}

/// Forwards a release or reset of the primary context and asks the driver whether it ended.
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
    launch::context_stays(here, handle); // unless it has left: most releases only lower a count
    status
}

/// Drops the primary context of `device` if the driver has ended it.
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

/// The hooks of this family.
#[allow(
    non_snake_case,
    missing_docs,
    clippy::missing_safety_doc,
    reason = "the driver names and documents them"
)]
pub mod hooks {
    use super::*;
    use core::ffi::c_void;

    macro_rules! makers {
        ($($name:ident, $primary:literal ( $handle:ident; $($before:ident : $type:ty),* ; $device:ident $(; $after:ident : $after_type:ty)* );)*) => { $(
            pub unsafe extern "C" fn $name($handle: *mut Context, $($before: $type,)* $device: Device $(, $after: $after_type)*) -> Status {
                // SAFETY: our caller's arguments, unchanged.
                let call = || unsafe { real::$name($handle, $($before,)* $device $(, $after)*) };
                // SAFETY: the driver has written the handle when it succeeded.
                unsafe { make($device, $handle, $primary, call) }
            }
        )* };
    }

    makers! {
        cuDevicePrimaryCtxRetain, true (context; ; device);
        cuCtxCreate, false (context; flags: u32; device);
        cuCtxCreate_v2, false (context; flags: u32; device);
        cuCtxCreate_v3, false (context; affinity: *mut c_void, count: i32, flags: u32; device);
        cuCtxCreate_v4, false (context; parameters: *mut c_void, flags: u32; device);
        cuGLCtxCreate, false (context; flags: u32; device);
        cuGLCtxCreate_v2, false (context; flags: u32; device);
        cuVDPAUCtxCreate, false (context; flags: u32; device; vdpau: u32; lookup: *mut c_void);
        cuVDPAUCtxCreate_v2, false (context; flags: u32; device; vdpau: u32; lookup: *mut c_void);
    }

    macro_rules! endings {
        ($end:ident: $($name:ident($argument:ident: $type:ty);)*) => { $(
            pub unsafe extern "C" fn $name($argument: $type) -> Status {
                // SAFETY: our caller's argument, unchanged.
                $end($argument, || unsafe { real::$name($argument) })
            }
        )* };
    }

    endings! { end_primary:
        cuDevicePrimaryCtxRelease(device: Device);
        cuDevicePrimaryCtxRelease_v2(device: Device);
        cuDevicePrimaryCtxReset(device: Device);
        cuDevicePrimaryCtxReset_v2(device: Device);
    }
    endings! { end:
        cuCtxDestroy(context: Context);
        cuCtxDestroy_v2(context: Context);
    }
    endings! { detach:
        cuCtxDetach(context: Context);
    }
}
