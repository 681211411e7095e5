//! Frees of ordinary memory that were put into a stream. The memory stays charged until the frees have run.

use core::sync::atomic::{AtomicBool, Ordering};

use super::queue::{self, Queue, Ran};
use super::{Here, Status, Stream, charge, spill};
use crate::mutex::Mutex;
use crate::table::{Entry, Kind};

/// Places for frees: two for each pair of stream and device that is tracked separately. Further frees wait
/// together.
const MOST: usize = 128;

/// Frees that may not have run yet.
#[repr(C)]
pub(super) struct Frees {
    list: Mutex<[Free; MOST]>,
    /// Whether there ever was such a free. If not, a synchronisation costs nothing here.
    any: AtomicBool,
}

/// Frees in one queue on one device.
#[derive(Clone, Copy)]
#[repr(C)]
struct Free {
    queue: Queue,
    /// 0: this place is free.
    bytes: u64,
    /// The part that is managed memory.
    managed: u64,
    /// Line of the queue's device.
    device: u8,
    /// Line on which the memory is charged.
    line: u8,
}

pub(super) fn is_unused(here: Here) -> bool {
    !here.state.frees.any.load(Ordering::Relaxed)
}

/// Puts the free of ordinary memory into `queue` with `call`.
pub(super) fn free(
    here: Here,
    pointer: u64,
    queue: impl FnOnce() -> Queue,
    call: impl FnOnce() -> Status,
) -> Status {
    let kind = if spill::holds(here, pointer) { Kind::Spilled } else { Kind::Linear };
    charge::free(here, kind, pointer, call, |entry| add(here, queue(), entry))
}

fn add(here: Here, queue: Queue, entry: &Entry) {
    let (bytes, device, line) = (entry.size, entry.device, charge::line(here, entry));
    here.state.frees.any.store(true, Ordering::Relaxed);
    let mut list = here.state.frees.list.lock();
    let mut newest: Option<(usize, u64)> = None;
    let mut places = 0;
    for (at, free) in list.iter().enumerate() {
        if free.bytes > 0 && free.queue == queue && (free.device, free.line) == (device, line) {
            places += 1;
            let note = free.queue.last_note();
            newest = newest.filter(|(_, newest)| *newest > note).or(Some((at, note)));
        }
    }
    // Two places: a wait ends the older frees, even if more enter the queue in the meantime.
    let empty = || list.iter().position(|free| free.bytes == 0);
    let at = if places < 2 { empty() } else { None };
    let at = at.or(newest.map(|(at, _)| at)).or_else(empty);
    let at = at.or_else(|| list.iter().position(|free| (free.device, free.line) == (device, line)));
    // No place even among those of the device: the memory stays charged until the process ends.
    let Some(free) = at.and_then(|at| list.get_mut(at)) else { return };
    let before = if free.bytes == 0 { Queue::default() } else { free.queue };
    *free = Free {
        queue: before.and(queue.noted(here)),
        bytes: free.bytes.saturating_add(bytes),
        managed: free.managed.saturating_add(charge::managed(entry)),
        device,
        line,
    };
}

fn release(here: Here, gone: impl Fn(&Free) -> bool) {
    if is_unused(here) {
        return;
    }
    for free in here.state.frees.list.lock().iter_mut().filter(|free| free.bytes > 0 && gone(free)) {
        here.book().release(usize::from(free.line), free.bytes);
        here.book().settle_managed(usize::from(free.line), free.managed, 0);
        (free.bytes, free.managed) = (0, 0);
    }
}

pub(super) fn ran(here: Here, work: Ran) {
    release(here, |free| work.covers(free.queue));
}

pub(super) fn line_ended(here: Here, line: u8) {
    release(here, |free| free.device == line);
}

pub(super) fn forget(here: Here, stream: Stream) {
    if !is_unused(here) {
        here.state.frees.list.lock().iter_mut().for_each(|free| free.queue = free.queue.without(stream));
    }
}

/// Asks the driver which frees have run.
pub(super) fn ask_driver(here: Here) {
    if !is_unused(here) {
        queue::ask_driver(here, MOST, |at, found| {
            let list = here.state.frees.list.lock();
            if let Some(free) = list.get(at).filter(|free| free.bytes > 0) {
                found(free.queue);
            }
        });
    }
}
