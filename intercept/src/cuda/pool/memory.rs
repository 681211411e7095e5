//! Allocations from pools, and frees in stream order.

use super::super::charge::{self, Charge};
use super::super::pending;
use super::super::queue::{self, Place, Queue, Ran, is_captured};
use super::super::size::charged;
use super::super::stream_handle::{StreamHandle, relaxed};
use super::super::{Here, OUT_OF_MEMORY, Pool, SUCCESS, Status, Stream, here, read, real, write};
use super::owner::{line_of_pool, pool_of_pointer, pool_of_stream};
use super::{RESERVED, State, USED, ask, known, list, place, settle_all, settle_one};
use crate::table::{Entry, Kind};

/// Step in which the driver grows a pool.
const CHUNK: u64 = 32 << 20;

/// One stream-ordered allocation, as its hook describes it.
struct Request {
    /// `None`: the current pool of the stream's device.
    pool: Option<Pool>,
    bytes: u64,
    stream: Stream,
    per_thread: bool,
}

impl Request {
    fn new(pool: Option<Pool>, bytes: usize, stream: Stream, per_thread: bool) -> Self {
        Self { pool, bytes: bytes as u64, stream, per_thread }
    }
}

/// The place of the pool that a request uses; `None` if there is no place left. `Err`: the driver does not
/// know the pool, and its own answer will say so.
fn pool_of(here: Here, request: &Request) -> Result<Option<usize>, ()> {
    let Some(pool) = request.pool else {
        let (pool, line) = pool_of_stream(here, request.stream).ok_or(())?;
        return Ok(place(here, pool, line, State::Charged));
    };
    if let Some((at, _)) = known(here, pool) {
        return Ok(Some(at));
    }
    ask(pool, RESERVED).map_err(|_| ())?;
    Ok(place(here, pool, line_of_pool(here, pool), State::Charged))
}

/// The pool that serves a request.
#[derive(Clone, Copy)]
struct Source {
    /// Place of the pool.
    at: usize,
    pool: Pool,
    device: u8,
    /// The number of changes of choice that had ended before we looked up this pool.
    changes: u32,
}

/// An allocation that the driver has made.
#[derive(Clone, Copy)]
struct Given {
    key: u64,
    /// Place of its pool.
    at: usize,
    /// The pool was destroyed in the meantime, so its growth can no longer be found out.
    is_of_destroyed: bool,
}

/// # Safety
/// `pointer` is null, or readable and writable.
unsafe fn allocate(request: &Request, pointer: *mut u64, call: impl Fn() -> Status) -> Status {
    let Some(here) = here() else { return OUT_OF_MEMORY };
    if is_captured(here, request.stream, request.per_thread) {
        return call();
    }
    let changes = here.state.pools.choices.made();
    let Ok(found) = pool_of(here, request) else { return call() };
    let Some(at) = found else { return OUT_OF_MEMORY };
    let Some(known) = list(here).get(at).copied() else { return OUT_OF_MEMORY };
    if known.state == State::Unpaid {
        return call();
    }
    let source = Source { at, pool: known.handle, device: known.device, changes };
    let growth = charged(request.bytes).checked_next_multiple_of(CHUNK).unwrap_or(u64::MAX);
    let mut charge = Charge::take_once(here, known.device, growth);
    if charge.is_none() {
        // Try this before the charge that makes all families release unused memory, which would remove the
        // pools' own room. SAFETY: the caller guarantees this.
        if let Some(status) = unsafe { allocate_from_room(here, request, source, pointer, &call) } {
            return status;
        }
        charge = Charge::take(here, known.device, growth);
    }
    let Some(charge) = charge else { return OUT_OF_MEMORY };
    // SAFETY: the caller guarantees this.
    match unsafe { give(here, request, source, pointer, &call) } {
        Ok(given) => {
            if given.is_of_destroyed
                && let Some(known) = list(here).get_mut(given.at)
            {
                known.add_charged(here, growth);
                charge.keep();
            }
            SUCCESS
        }
        Err(status) => status,
    }
}

/// Allocates without a charge, from memory that the pool has reserved (and is charged for) and does not use.
/// `None`: it is too little or fragmented.
///
/// # Safety
/// Same as [`allocate`].
unsafe fn allocate_from_room(
    here: Here,
    request: &Request,
    source: Source,
    pointer: *mut u64,
    call: &impl Fn() -> Status,
) -> Option<Status> {
    // Two threads must not count on the same room.
    let alone = here.state.pools.room.lock();
    let before = list(here).get(source.at)?.charged;
    if !has_room(source.pool, charged(request.bytes)) {
        return None;
    }
    // SAFETY: the caller guarantees this.
    let untouched = unsafe { read(pointer) };
    // SAFETY: the caller guarantees this.
    let given = match unsafe { give(here, request, source, pointer, call) } {
        Ok(given) => given,
        Err(status) => return Some(status),
    };
    // Another pool than the expected one may have grown from nothing.
    let before = if given.at == source.at { before } else { 0 };
    if !given.is_of_destroyed && !has_grown_too_much(here, given.at, before) {
        return Some(SUCCESS);
    }
    drop(alone); // other threads need not wait for the stream
    let pool = list(here).get(given.at).map_or(0, |known| known.handle);
    undo(here, given.key, pool, request);
    settle_one(here, given.at);
    // SAFETY: the caller guarantees this.
    unsafe { write(pointer, untouched.unwrap_or(0)) };
    None
}

/// Lets the driver allocate, and enters the result.
///
/// # Safety
/// Same as [`allocate`].
unsafe fn give(
    here: Here,
    request: &Request,
    source: Source,
    pointer: *mut u64,
    call: &impl Fn() -> Status,
) -> Result<Given, Status> {
    // SAFETY: the caller guarantees this.
    let untouched = unsafe { read(pointer) };
    hold(here, source.at);
    let status = call();
    // SAFETY: the caller guarantees this.
    let Some(key) = unsafe { read(pointer) }.filter(|_| status == SUCCESS) else {
        settle_one(here, source.at);
        let_go(here, source.at);
        return Err(status);
    };
    let pool = match here.state.pools.choices.is_still(source.changes) {
        true => source.pool,
        false => chosen_meanwhile(here, request, key).unwrap_or(source.pool),
    };
    let mut at = source.at;
    if pool != source.pool {
        let place = place(here, pool, source.device, State::Charged);
        if let Some(place) = place {
            hold(here, place);
        }
        let_go(here, source.at);
        let Some(place) = place else {
            undo(here, key, pool, request);
            // SAFETY: the caller guarantees this.
            unsafe { write(pointer, untouched.unwrap_or(0)) };
            return Err(OUT_OF_MEMORY);
        };
        at = place;
    }
    enter(here, key, charged(request.bytes), at, source.device);
    let is_known = settle_one(here, at); // before the charge goes
    Ok(Given { key, at, is_of_destroyed: !is_known })
}

/// The pool that gave `key`, if another one may have been chosen between our look-up and the driver's.
#[cold]
fn chosen_meanwhile(here: Here, request: &Request, key: u64) -> Option<Pool> {
    settle_all(here);
    pool_of_pointer(key).filter(|_| request.pool.is_none())
}

/// Counts an allocation into the pool in place `at`, whose place then stays even if the pool is destroyed.
fn hold(here: Here, at: usize) {
    if let Some(known) = list(here).get_mut(at) {
        known.live += 1;
    }
}

fn let_go(here: Here, at: usize) {
    if let Some(known) = list(here).get_mut(at) {
        known.live = known.live.saturating_sub(1);
        known.release_destroyed(here);
    }
}

/// Whether `bytes` fit into the part of the pool's reserve that it does not use.
fn has_room(pool: Pool, bytes: u64) -> bool {
    let (reserved, used) = (ask(pool, RESERVED), ask(pool, USED));
    matches!((reserved, used), (Ok(reserved), Ok(used)) if reserved.saturating_sub(used) >= bytes)
}

/// Whether a pool has grown above `before`, its earlier charge, so that the container is over its limit. No
/// growth was charged.
fn has_grown_too_much(here: Here, at: usize, before: u64) -> bool {
    let Some(now) = list(here).get(at).copied() else { return false };
    let line = usize::from(now.device);
    now.charged > before && here.book().is_over_limit(line)
}

/// Undoes an allocation that was not charged: the pool grew, although its free room seemed to suffice (it was
/// fragmented), or the pool cannot be tracked.
#[cold]
fn undo(here: Here, key: u64, pool: Pool, request: &Request) {
    let Request { stream, per_thread, .. } = *request;
    let (handle, queue) = (StreamHandle { stream, per_thread }, Queue::of(here, stream, per_thread));
    // SAFETY: the driver has just given the pointer on this stream, and the caller has not seen it.
    free_on(here, key, queue, || unsafe { handle.free(key) });
    let last = here.state.notes.last();
    relaxed(|| {
        // SAFETY: the driver checks the stream.
        if unsafe { handle.synchronise() } == SUCCESS {
            queue::ran(here, Ran::until(last, Place::Queue(queue)));
        }
    });
    // SAFETY: a pool of this process; the driver refuses one that was destroyed.
    unsafe { real::cuMemPoolTrimTo(pool, 0) };
}

fn enter(here: Here, key: u64, size: u64, at: usize, device: u8) {
    let entry = Entry { key, size, extra: at as u64, kind: Kind::Async, device, context: 0 };
    if let Ok(Some(old)) = here.state.table.put(entry) {
        leave(here, &old, Queue::anywhere(here)); // freed inside a graph
    }
}

/// Removes an allocation, which is freed in `queue`, from its pool's count.
fn leave(here: Here, entry: &Entry, queue: Queue) {
    let mut list = list(here);
    let Some(known) = usize::try_from(entry.extra).ok().and_then(|at| list.get_mut(at)) else { return };
    known.live = known.live.saturating_sub(1);
    known.freed_on = known.freed_on.and(queue.noted(here));
    known.settle(here);
}

/// Frees stream-ordered memory with `call`, which names no stream.
pub(in super::super) fn free(here: Here, pointer: u64, call: impl FnOnce() -> Status) -> Status {
    free_on(here, pointer, Queue::anywhere(here), call)
}

fn free_on(here: Here, pointer: u64, queue: Queue, call: impl FnOnce() -> Status) -> Status {
    charge::free(here, Kind::Async, pointer, call, |entry| leave(here, entry, queue))
}

fn free_async(pointer: u64, stream: Stream, per_thread: bool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    if is_captured(here, stream, per_thread) {
        return call();
    }
    let queue = || Queue::of(here, stream, per_thread);
    if here.state.table.get(Kind::Async, pointer).is_some() {
        free_on(here, pointer, queue(), call)
    } else {
        pending::free(here, pointer, queue, call)
    }
}

hooks! { |call|
    cuMemAllocAsync(pointer: *mut u64, bytes: usize, stream: Stream) =>
        // SAFETY: the driver has written the pointer when it succeeded.
        unsafe { allocate(&Request::new(None, bytes, stream, false), pointer, call) };
    cuMemAllocAsync_ptsz(pointer: *mut u64, bytes: usize, stream: Stream) =>
        // SAFETY: as above.
        unsafe { allocate(&Request::new(None, bytes, stream, true), pointer, call) };
    cuMemAllocFromPoolAsync(pointer: *mut u64, bytes: usize, pool: Pool, stream: Stream) =>
        // SAFETY: as above.
        unsafe { allocate(&Request::new(Some(pool), bytes, stream, false), pointer, call) };
    cuMemAllocFromPoolAsync_ptsz(pointer: *mut u64, bytes: usize, pool: Pool, stream: Stream) =>
        // SAFETY: as above.
        unsafe { allocate(&Request::new(Some(pool), bytes, stream, true), pointer, call) };
    cuMemFreeAsync(pointer: u64, stream: Stream) => free_async(pointer, stream, false, call);
    cuMemFreeAsync_ptsz(pointer: u64, stream: Stream) => free_async(pointer, stream, true, call);
}
