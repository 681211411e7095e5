//! The contexts of this process, by our number, and the current context of the calling thread. The hooks that
//! create and end contexts are in [`lifetime`](super::lifetime).

use core::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use gpushare_region::{ContextCost, MAX_DEVICES};

use super::{Context, Device, Here, SUCCESS, Status, line_of, real};
use crate::mutex::Mutex;

/// How many contexts can be tracked to their end. The objects of further contexts stay charged until they are
/// freed one by one.
const KNOWN: usize = 64;
/// `CU_LIMIT_STACK_SIZE`, `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`, numbered from 0.
pub(super) const LIMITS: usize = 3;

/// The contexts of this process.
#[repr(C)]
pub(super) struct Contexts {
    pub(super) known: [Known; KNOWN],
    /// Locked by the one thread that creates a context: two threads that pay its cost at once would need room
    /// for it twice. Taken before `lines`.
    pub(super) making: Mutex<()>,
    /// By line of the limits file. Locked while a context is created or ended, including the driver's call.
    /// The holder may take the locks of the families, so no thread may take a charge while holding it: a
    /// charge searches all families for room.
    pub(super) lines: Mutex<[Line; MAX_DEVICES]>,
}

/// The contexts of this process on one device.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Line {
    /// Contexts that were entered and have not ended, with or without a place.
    pub(super) alive: u32,
    /// How many of them found no place.
    pub(super) unplaced: u32,
    /// Whether the primary context is one of these.
    pub(super) primary_unplaced: bool,
    /// Bytes charged for them; 0: nothing is charged.
    pub(super) charged: u64,
    /// Whether a context was found that could not be counted. It is then unknown which context is the last.
    pub(super) uncounted: bool,
}

#[repr(C)]
pub(super) struct Known {
    /// The driver's handle; 0: this place is free.
    pub(super) handle: AtomicUsize,
    pub(super) device: AtomicU8,
    pub(super) primary: AtomicU8,
    /// The green context behind the handle; 0: none.
    pub(super) green: AtomicUsize,
    /// Bytes charged for its limits above the driver's defaults.
    pub(super) limits: [AtomicU64; LIMITS],
}

/// Where an allocation of the calling thread goes.
#[derive(Clone, Copy)]
pub(super) struct Current {
    /// Number of the context whose end frees the allocation; 0 if there was no place for it, or if it is a
    /// green context.
    pub(super) context: u8,
    /// Number of the context that the default streams belong to; 0 if there was no place for it.
    pub(super) queues: u8,
    /// Line of the limits file.
    pub(super) device: u8,
}

impl Contexts {
    pub(super) fn find(&self, handle: Context) -> Option<(u8, &Known)> {
        self.find_by(|known| known.handle.load(Ordering::Acquire) == handle)
    }

    pub(super) fn find_by(&self, wanted: impl Fn(&Known) -> bool) -> Option<(u8, &Known)> {
        let found = self.known.iter().enumerate().find(|(_, known)| wanted(known));
        found.and_then(|(index, known)| Some((u8::try_from(index + 1).ok()?, known)))
    }

    /// The primary context of `device`, with its number.
    pub(super) fn primaries(&self, device: u8) -> impl Iterator<Item = (&Known, u8)> {
        self.known.iter().zip(1..).filter(move |(known, _)| {
            known.handle.load(Ordering::Relaxed) != 0
                && known.primary.load(Ordering::Relaxed) == 1
                && known.device.load(Ordering::Relaxed) == device
        })
    }

    /// Enters a context that the driver has created. Returns its number; 0 if there is no place.
    pub(super) fn enter(&self, lines: &mut [Line], handle: Context, device: u8, primary: bool) -> u8 {
        let mut line = lines.get_mut(usize::from(device));
        if primary && line.as_ref().is_some_and(|line| line.primary_unplaced) {
            return 0; // the driver returns the same context again, which is already counted
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

/// The calling thread's context and device; `None` if it has no context. The driver's own answer will report
/// that.
pub(super) fn current(here: Here) -> Option<Current> {
    let handle = current_handle()?;
    match here.state.contexts.find(handle) {
        Some((number, known)) => {
            // An allocation under a green context belongs to the primary context and outlives the green one.
            let context = if known.green.load(Ordering::Relaxed) == 0 { number } else { 0 };
            Some(Current { context, queues: number, device: known.device.load(Ordering::Relaxed) })
        }
        None => adopt(here, handle),
    }
}

/// The driver's handle of the calling thread's context.
#[inline]
pub(super) fn current_handle() -> Option<Context> {
    let mut handle = 0;
    // SAFETY: the driver writes one handle.
    let asked = unsafe { real::cuCtxGetCurrent(&mut handle) };
    (asked == SUCCESS && handle != 0).then_some(handle)
}

/// The device of the calling thread's context, or the driver's error.
pub(super) fn current_device() -> Result<Device, Status> {
    let mut device = 0;
    // SAFETY: the driver writes one integer.
    match unsafe { real::cuCtxGetDevice(&mut device) } {
        SUCCESS => Ok(device),
        status => Err(status),
    }
}

/// The device of `context`, or the driver's error.
pub(super) fn device_of(context: Context) -> Result<Device, Status> {
    within(context, current_device)?
}

/// Makes `context` current while `act` runs. Skips `act` if the driver refuses that.
pub(super) fn within<T>(context: Context, act: impl FnOnce() -> T) -> Result<T, Status> {
    // SAFETY: a handle that the driver checks.
    let pushed = unsafe { real::cuCtxPushCurrent_v2(context) };
    if pushed != SUCCESS {
        return Err(pushed);
    }
    let result = act();
    // SAFETY: undoes the push above; the driver writes one handle.
    unsafe { real::cuCtxPopCurrent_v2(&mut 0) };
    Ok(result)
}

/// Runs `act` in the context of `number`, which cannot end in the meantime. Skips `act` if there is no such
/// context.
pub(super) fn within_number(here: Here, number: u64, act: impl FnOnce()) {
    let contexts = &here.state.contexts;
    let _lines = contexts.lines.lock();
    let place = usize::try_from(number).ok().and_then(|number| contexts.known.get(number.checked_sub(1)?));
    let handle = place.map_or(0, |known| known.handle.load(Ordering::Acquire));
    if handle != 0 {
        let _ = within(handle, act); // it has not ended: ending it would need the lock
    }
}

/// The number of `context`; 0 if it is not tracked.
pub(super) fn number(here: Here, context: Context) -> u8 {
    if context == 0 { 0 } else { here.state.contexts.find(context).map_or(0, |(number, _)| number) }
}

/// Line of the limits file of a context that this process created.
pub(super) fn line_of_context(here: Here, context: Context) -> Option<u8> {
    let known = here.state.contexts.find(context).filter(|_| context != 0);
    known.map(|(_, known)| known.device.load(Ordering::Relaxed))
}

/// Enters the current context, which was created by a call that we did not see. Its cost is charged even
/// beyond the limit.
#[cold]
fn adopt(here: Here, handle: Context) -> Option<Current> {
    let device = line_of(here, current_device().ok()?);
    let contexts = &here.state.contexts;
    let mut lines = contexts.lines.lock();
    if let Some((context, _)) = contexts.find(handle) {
        return Some(Current { context, queues: context, device }); // another thread has entered it
    }
    if let Some(line) = lines.get_mut(usize::from(device)).filter(|line| line.charged == 0) {
        let ContextCost { most, .. } = here.book().context_cost(device.into());
        here.book().add(usize::from(device), most);
        here.book().note_context(usize::from(device), most);
        line.charged = most;
    }
    let unplaced = lines.get(usize::from(device)).is_some_and(|line| line.unplaced > 0);
    if unplaced || contexts.find(0).is_none() {
        if let Some(line) = lines.get_mut(usize::from(device)) {
            line.uncounted = true;
        }
        return Some(Current { context: 0, queues: 0, device }); // counted when it was created, or not countable
    }
    let context = contexts.enter(&mut *lines, handle, device, false);
    Some(Current { context, queues: context, device })
}
