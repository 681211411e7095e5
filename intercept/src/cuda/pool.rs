//! Stream-ordered memory: a pool is charged what the driver has reserved for it, not what is live in it.
//!
//! Before an allocation the largest growth of the pool is charged; afterwards the pool is settled to the driver's own
//! figure. Freed memory returns when the pool shrinks, so pools are settled at frees, trims and synchronisations too.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering};

use super::charge::Charge;
use super::context;
use super::size::charged;
use super::{
    Context, Device, Here, OUT_OF_MEMORY, Pool, SUCCESS, Status, Stream, UNLISTED, each_device, here,
    line_of, linear, read, real,
};
use crate::mutex::{Guard, Mutex};
use crate::table::{Entry, Kind};

/// Step in which the driver grows a pool.
const CHUNK: u64 = 32 << 20;
/// Pools of one process that can be charged; an allocation from a further one is refused.
const MOST: usize = 128;
const RESERVED: i32 = 5; // CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
const USED: i32 = 7; // CU_MEMPOOL_ATTR_USED_MEM_CURRENT
const ON_DEVICE: i32 = 1; // CU_MEM_LOCATION_TYPE_DEVICE
const MANAGED: i32 = 2; // CU_MEM_ALLOCATION_TYPE_MANAGED
/// Stream handles up to here are the default streams of the current context.
const LAST_DEFAULT_STREAM: Stream = 2;

const LEGACY_STREAM: Stream = 1;
const PER_THREAD_STREAM: Stream = 2;
/// No free has to run.
const NOWHERE: Stream = usize::MAX;
/// Frees may have to run on several streams: only a whole context's synchronisation tells.
const ANYWHERE: Stream = usize::MAX - 1;

/// The pools that this process has allocated from or made.
#[repr(C)]
pub(super) struct Pools {
    list: Mutex<[Known; MOST]>,
    /// Places of the list ever used.
    used: AtomicU32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum State {
    Free = 0,
    Charged,
    /// Its memory is not device memory, or another process pays.
    Unpaid,
    /// Destroyed with live allocations or frees in a queue: nobody can ask any more what the driver still holds, so
    /// all of it stays charged until the last allocation is freed and that free has run.
    Destroyed,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Known {
    handle: Pool,
    charged: u64,
    /// Live allocations.
    live: u64,
    /// Where frees may still have to run: a stream, [`NOWHERE`] or [`ANYWHERE`].
    freed_on: Stream,
    device: u8,
    state: State,
}

type List<'a> = Guard<'a, [Known; MOST]>;

pub(super) fn is_unused(here: Here) -> bool {
    here.state.pools.used.load(Ordering::Relaxed) == 0
}

fn list(here: Here) -> List<'static> {
    here.state.pools.list.lock()
}

fn attribute(pool: Pool, attribute: i32) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: both attributes that we ask for are 64-bit numbers.
    let status =
        unsafe { real::cuMemPoolGetAttribute(pool, attribute, core::ptr::from_mut(&mut value).cast()) };
    (status == SUCCESS).then_some(value)
}

/// The place of `pool` in the list, made if it is new.
fn place(here: Here, pool: Pool, device: u8, state: State) -> Option<usize> {
    let mut list = list(here);
    let known = |known: &Known| known.handle == pool && matches!(known.state, State::Charged | State::Unpaid);
    if let Some(at) = list.iter().position(known) {
        return Some(at);
    }
    let at = list.iter().position(|known| known.state == State::Free)?;
    *list.get_mut(at)? = Known { handle: pool, charged: 0, live: 0, freed_on: NOWHERE, device, state };
    here.state.pools.used.fetch_max(u32::try_from(at + 1).ok()?, Ordering::Relaxed);
    Some(at)
}

fn known(here: Here, pool: Pool) -> Option<(usize, Known)> {
    let list = list(here);
    let live = |known: &Known| known.handle == pool && matches!(known.state, State::Charged | State::Unpaid);
    list.iter().enumerate().find(|(_, known)| live(known)).map(|(at, known)| (at, *known))
}

/// Charges the pool in place `at` what the driver has reserved for it. The figure is read under the lock: an older
/// figure must not follow a newer one.
fn settle(here: Here, list: &mut List<'_>, at: usize) {
    let Some(known) = list.get_mut(at).filter(|known| known.state == State::Charged) else { return };
    let Some(reserved) = attribute(known.handle, RESERVED) else { return };
    let device = usize::from(known.device);
    if reserved > known.charged {
        here.book().add(device, reserved - known.charged);
    } else {
        here.book().release(device, known.charged - reserved);
    }
    known.charged = reserved;
}

fn settle_one(here: Here, at: usize) {
    settle(here, &mut list(here), at);
}

pub(super) fn settle_all(here: Here) {
    if is_unused(here) {
        return;
    }
    let mut list = list(here);
    for at in 0..MOST {
        settle(here, &mut list, at);
    }
}

/// The stream that `stream` means: the default one has several names.
pub(super) fn queue(stream: Stream, per_thread: bool) -> Stream {
    match stream {
        0 if per_thread => PER_THREAD_STREAM,
        0 => LEGACY_STREAM,
        _ => stream,
    }
}

/// All work of a context has run.
pub(super) fn context_synchronised(here: Here, context: Context) {
    if is_unused(here) {
        return;
    }
    if let Some(device) = device_of_context(context) {
        let line = line_of(here, device);
        synchronised(here, |known| known.device == line);
    }
}

/// All work of a stream has run.
pub(super) fn stream_synchronised(here: Here, stream: Stream) {
    if !is_unused(here) {
        synchronised(here, |known| known.freed_on == stream);
    }
}

/// The frees of the pools that `has_freed` names have run.
fn synchronised(here: Here, has_freed: impl Fn(&Known) -> bool) {
    for known in list(here).iter_mut().filter(|known| has_freed(known)) {
        known.freed_on = NOWHERE;
        release_destroyed(here, known);
    }
}

/// Ends a destroyed pool in which nothing lives and for which no free has to run.
fn release_destroyed(here: Here, known: &mut Known) {
    if known.state == State::Destroyed && known.live == 0 && known.freed_on == NOWHERE {
        here.book().release(usize::from(known.device), known.charged);
        known.charged = 0;
        known.state = State::Free;
    }
}

/// Gives the unused memory of all pools back to the driver.
pub(super) fn trim_all(here: Here) {
    let mut list = list(here);
    for at in 0..MOST {
        if let Some(known) = list.get(at).filter(|known| known.state == State::Charged) {
            // SAFETY: a pool of this process that was not destroyed.
            unsafe { real::cuMemPoolTrimTo(known.handle, 0) };
            settle(here, &mut list, at);
        }
    }
}

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

/// The device whose pool an allocation on `stream` uses: the stream's, not the thread's.
fn device_of_stream(stream: Stream) -> Option<Device> {
    let mut current = 0;
    if stream > LAST_DEFAULT_STREAM {
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
fn pool_of_stream(here: Here, stream: Stream) -> Option<(Pool, u8)> {
    let device = device_of_stream(stream)?;
    let mut pool = 0;
    // SAFETY: the driver writes one handle.
    let status = unsafe { real::cuDeviceGetMemPool(&mut pool, device) };
    (status == SUCCESS).then(|| (pool, line_of(here, device)))
}

/// The line of a pool that was not made by a hooked call: the default pool of some device.
fn line_of_pool(here: Here, pool: Pool) -> u8 {
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

/// Whether work on `stream` is being recorded: then it allocates nothing now.
fn is_captured(here: Here, stream: Stream, per_thread: bool) -> bool {
    if !here.state.captures.load(Ordering::Relaxed) {
        return false;
    }
    let mut status = 0;
    let asked = if per_thread {
        // SAFETY: the driver checks the stream and writes one integer.
        unsafe { real::cuStreamIsCapturing_ptsz(stream, &mut status) }
    } else {
        // SAFETY: the driver checks the stream and writes one integer.
        unsafe { real::cuStreamIsCapturing(stream, &mut status) }
    };
    asked == SUCCESS && status != 0
}

/// One stream-ordered allocation, as its hook describes it.
struct Request {
    /// `None`: the current pool of the stream's device.
    pool: Option<Pool>,
    bytes: u64,
    stream: Stream,
    per_thread: bool,
}

/// # Safety
/// `pointer` is null or readable after `call` succeeded.
unsafe fn allocate(request: &Request, pointer: *const u64, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return OUT_OF_MEMORY };
    if is_captured(here, request.stream, request.per_thread) {
        return call();
    }
    let found = match request.pool {
        Some(pool) => match known(here, pool) {
            Some((at, known)) => Some((at, known.device)),
            // No pool of the driver's: it takes no place, and the driver says what is wrong.
            None if attribute(pool, RESERVED).is_none() => return call(),
            None => {
                let line = line_of_pool(here, pool);
                place(here, pool, line, State::Charged).map(|at| (at, line))
            }
        },
        None => {
            let Some((pool, line)) = pool_of_stream(here, request.stream) else { return call() };
            place(here, pool, line, State::Charged).map(|at| (at, line))
        }
    };
    let Some((at, device)) = found else { return OUT_OF_MEMORY };
    let Some(known) = list(here).get(at).copied() else { return OUT_OF_MEMORY };
    if known.state == State::Unpaid {
        return call();
    }
    let growth = charged(request.bytes).checked_next_multiple_of(CHUNK).unwrap_or(u64::MAX);
    let charge = Charge::take(here, device, growth);
    if charge.is_none() && !has_room(known.handle, charged(request.bytes)) {
        return OUT_OF_MEMORY;
    }
    let status = call();
    // SAFETY: as our caller says.
    let key = unsafe { read(pointer) }.filter(|_| status == SUCCESS);
    if let Some(key) = key {
        enter(here, key, charged(request.bytes), at, device);
    }
    settle_one(here, at);
    if charge.is_none()
        && let Some(key) = key
        && here.book().used(usize::from(device)) > here.book().limit(usize::from(device))
    {
        return undo(here, key, at, request);
    }
    status
}

/// Whether `bytes` fit into what the pool has reserved and does not use.
fn has_room(pool: Pool, bytes: u64) -> bool {
    let (reserved, used) = (attribute(pool, RESERVED), attribute(pool, USED));
    matches!((reserved, used), (Some(reserved), Some(used)) if reserved.saturating_sub(used) >= bytes)
}

/// Takes an allocation back for which the pool grew although its free room seemed to suffice: it was in pieces.
#[cold]
fn undo(here: Here, key: u64, at: usize, request: &Request) -> Status {
    free_on(here, key, queue(request.stream, request.per_thread), || {
        // SAFETY: the driver has just given the pointer on this stream, and the caller has not seen it.
        unsafe { real::cuMemFreeAsync(key, request.stream) }
    });
    context::relaxed(|| {
        // SAFETY: the driver checks the stream.
        unsafe { real::cuStreamSynchronize(request.stream) };
    });
    if let Some(known) = list(here).get(at) {
        // SAFETY: the allocation above keeps the pool in use.
        unsafe { real::cuMemPoolTrimTo(known.handle, 0) };
    }
    settle_one(here, at);
    OUT_OF_MEMORY
}

fn enter(here: Here, key: u64, size: u64, at: usize, device: u8) {
    if let Some(known) = list(here).get_mut(at) {
        known.live += 1;
    }
    let entry = Entry { key, size, extra: at as u64, kind: Kind::Async, device, context: 0 };
    if let Ok(Some(old)) = here.state.table.put(entry) {
        leave(here, &old, ANYWHERE); // freed inside a graph
    }
}

/// Counts an allocation of a pool out, which is freed on `stream`.
fn leave(here: Here, entry: &Entry, stream: Stream) {
    let mut list = list(here);
    let Ok(at) = usize::try_from(entry.extra) else { return };
    let Some(known) = list.get_mut(at) else { return };
    known.live = known.live.saturating_sub(1);
    known.freed_on = if [NOWHERE, stream].contains(&known.freed_on) { stream } else { ANYWHERE };
    settle(here, &mut list, at);
}

/// Frees stream-ordered memory with `call`, on no stream of the caller's.
pub(super) fn free(here: Here, pointer: u64, call: impl FnOnce() -> Status) -> Status {
    free_on(here, pointer, ANYWHERE, call)
}

fn free_on(here: Here, pointer: u64, stream: Stream, call: impl FnOnce() -> Status) -> Status {
    let entry = here.state.table.take(Kind::Async, pointer);
    let status = call();
    match entry {
        Some(entry) if status == SUCCESS => leave(here, &entry, stream),
        // Still there; a failed put leaves the pool one live allocation too many.
        Some(entry) => drop(here.state.table.put(entry)),
        None => {}
    }
    status
}

fn free_async(pointer: u64, stream: Stream, per_thread: bool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    if is_captured(here, stream, per_thread) {
        return call();
    }
    if here.state.table.get(Kind::Async, pointer).is_some() {
        free_on(here, pointer, queue(stream, per_thread), call)
    } else {
        linear::free(Kind::Linear, pointer, call)
    }
}

fn destroy(pool: Pool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    let found = known(here, pool);
    if let Some((at, _)) = found {
        settle_one(here, at); // the last figure that the driver gives
    }
    let status = call();
    let Some((at, _)) = found.filter(|_| status == SUCCESS) else { return status };
    if let Some(known) = list(here).get_mut(at) {
        known.state = State::Destroyed;
        release_destroyed(here, known);
    }
    status
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

    macro_rules! allocators {
        ($($name:ident, $per_thread:literal;)*) => { $(
            pub unsafe extern "C" fn $name(pointer: *mut u64, bytes: usize, stream: Stream) -> Status {
                let request = Request { pool: None, bytes: bytes as u64, stream, per_thread: $per_thread };
                // SAFETY: our caller's arguments, unchanged.
                let call = || unsafe { real::$name(pointer, bytes, stream) };
                // SAFETY: the driver has written the pointer when it succeeded.
                unsafe { allocate(&request, pointer, call) }
            }
        )* };
    }
    allocators! {
        cuMemAllocAsync, false;
        cuMemAllocAsync_ptsz, true;
    }

    macro_rules! pool_allocators {
        ($($name:ident, $per_thread:literal;)*) => { $(
            pub unsafe extern "C" fn $name(pointer: *mut u64, bytes: usize, pool: Pool, stream: Stream) -> Status {
                let request = Request { pool: Some(pool), bytes: bytes as u64, stream, per_thread: $per_thread };
                // SAFETY: our caller's arguments, unchanged.
                let call = || unsafe { real::$name(pointer, bytes, pool, stream) };
                // SAFETY: the driver has written the pointer when it succeeded.
                unsafe { allocate(&request, pointer, call) }
            }
        )* };
    }
    pool_allocators! {
        cuMemAllocFromPoolAsync, false;
        cuMemAllocFromPoolAsync_ptsz, true;
    }

    pub unsafe extern "C" fn cuMemFreeAsync(pointer: u64, stream: Stream) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        free_async(pointer, stream, false, || unsafe { real::cuMemFreeAsync(pointer, stream) })
    }

    pub unsafe extern "C" fn cuMemFreeAsync_ptsz(pointer: u64, stream: Stream) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        free_async(pointer, stream, true, || unsafe { real::cuMemFreeAsync_ptsz(pointer, stream) })
    }

    pub unsafe extern "C" fn cuMemPoolCreate(pool: *mut Pool, properties: *const c_void) -> Status {
        let at =
            |offset| if properties.is_null() { properties } else { properties.wrapping_byte_add(offset) };
        // SAFETY: null, or the allocation type in our caller's CUmemPoolProps.
        let memory = unsafe { read(at(0).cast::<i32>()) }.unwrap_or(0);
        // SAFETY: null, or the location type behind it.
        let kind = unsafe { read(at(8).cast::<i32>()) }.unwrap_or(ON_DEVICE);
        // SAFETY: null, or the location id beside it.
        let device = unsafe { read(at(12).cast::<Device>()) }.unwrap_or(0);
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::cuMemPoolCreate(pool, properties) };
        if status == SUCCESS
            && let Some(here) = here()
            // SAFETY: written by the driver, which succeeded.
            && let Some(pool) = unsafe { read(pool) }
        {
            let (line, state) = if kind == ON_DEVICE {
                (line_of(here, device), State::Charged)
            } else if memory == MANAGED {
                // Wherever it prefers to be, its pages can move to the GPU.
                (context::current(here).map_or(UNLISTED, |current| current.device), State::Charged)
            } else {
                (UNLISTED, State::Unpaid)
            };
            // No place left: allocations from it will be refused.
            let _ = place(here, pool, line, state);
        }
        status
    }

    pub unsafe extern "C" fn cuMemPoolImportFromShareableHandle(
        pool: *mut Pool,
        handle: *mut c_void,
        kind: i32,
        flags: u64,
    ) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::cuMemPoolImportFromShareableHandle(pool, handle, kind, flags) };
        if status == SUCCESS
            && let Some(here) = here()
            // SAFETY: written by the driver, which succeeded.
            && let Some(pool) = unsafe { read(pool) }
        {
            let _ = place(here, pool, UNLISTED, State::Unpaid);
        }
        status
    }

    pub unsafe extern "C" fn cuMemPoolDestroy(pool: Pool) -> Status {
        // SAFETY: our caller's argument, unchanged.
        destroy(pool, || unsafe { real::cuMemPoolDestroy(pool) })
    }

    pub unsafe extern "C" fn cuMemPoolTrimTo(pool: Pool, bytes: usize) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::cuMemPoolTrimTo(pool, bytes) };
        resettle(pool);
        status
    }

    pub unsafe extern "C" fn cuMemPoolSetAttribute(pool: Pool, attribute: i32, value: *mut c_void) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::cuMemPoolSetAttribute(pool, attribute, value) };
        resettle(pool);
        status
    }

    /// Settles a pool after a call that may have shrunk it.
    fn resettle(pool: Pool) {
        if let Some(here) = here()
            && let Some((at, _)) = known(here, pool)
        {
            settle_one(here, at);
        }
    }
}
