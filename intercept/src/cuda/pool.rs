//! Stream-ordered memory: a pool is charged for the driver's reserve, not for the memory that is live in it.
//!
//! Before an allocation the largest possible growth of the pool is charged. If that does not fit, nothing is
//! charged provided that the pool has enough room that is already paid for. After the allocation the pool is
//! settled to the driver's own figure. Freed memory returns when the pool shrinks, so pools are also settled
//! at frees, trims and synchronisations.

pub(super) mod memory;
mod owner;

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering};

use super::context;
use super::queue::{self, Queue, Ran};
use super::{
    Device, Here, Pool, SUCCESS, Status, Stream, UNLISTED, after_writing, here, line_of, read, real,
};
use crate::mutex::{Guard, Mutex};
use crate::table::Kind;

/// How many pools of one process can be tracked. An allocation from a further pool is refused.
const MOST: usize = 1024;
const RESERVED: i32 = 5; // CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
const USED: i32 = 7; // CU_MEMPOOL_ATTR_USED_MEM_CURRENT
const ON_DEVICE: i32 = 1; // CU_MEM_LOCATION_TYPE_DEVICE
const MANAGED: i32 = 2; // CU_MEM_ALLOCATION_TYPE_MANAGED
/// `CUDA_ERROR_INVALID_VALUE` and `CUDA_ERROR_INVALID_HANDLE`: the driver's answers for a pool that has
/// ended.
const GONE: [Status; 2] = [1, 400];

/// The pools that this process has allocated from or created.
#[repr(C)]
pub(super) struct Pools {
    list: Mutex<[Known; MOST]>,
    /// Places of the list ever used.
    used: AtomicU32,
    choices: Choices,
    /// Locked by the one thread that allocates from the pools' free room without a charge.
    room: Mutex<()>,
}

/// Counts the calls that change which pool `cuMemAllocAsync` uses for a device: by choosing another one, or
/// by destroying the chosen one, after which the device's default pool is used.
#[repr(C)]
struct Choices {
    begun: AtomicU32,
    ended: AtomicU32,
}

impl Choices {
    /// Changes the chosen pool with `call`. A thread that ends during the call leaves the counts unequal:
    /// then every allocation queries the driver, which is slow but correct.
    fn change(&self, call: impl FnOnce() -> Status) -> Status {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let status = call();
        self.ended.fetch_add(1, Ordering::SeqCst);
        status
    }

    /// The number of changes that have ended. Read it before looking up a pool.
    fn made(&self) -> u32 {
        self.ended.load(Ordering::SeqCst)
    }

    /// Whether no change has run since `made` was read: none was in progress then, and none has begun since.
    fn is_still(&self, made: u32) -> bool {
        self.begun.load(Ordering::SeqCst) == made
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum State {
    Free = 0,
    Charged,
    /// Its memory is not device memory, or another process is charged for it.
    Unpaid,
    /// Destroyed while allocations were live or frees were pending. The driver then no longer reports how
    /// much it still holds for the pool. All of it stays charged until the last allocation is freed and that
    /// free has run.
    Destroyed,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Known {
    handle: Pool,
    charged: u64,
    /// Live allocations, including those that the driver is just making.
    live: u64,
    /// The queue in which frees may not have run yet.
    freed_on: Queue,
    device: u8,
    is_managed: bool,
    state: State,
}

type List<'a> = Guard<'a, [Known; MOST]>;

pub(super) fn is_unused(here: Here) -> bool {
    here.state.pools.used.load(Ordering::Relaxed) == 0
}

fn list(here: Here) -> List<'static> {
    here.state.pools.list.lock()
}

/// How many places of the list were ever used.
fn used(here: Here) -> usize {
    (here.state.pools.used.load(Ordering::Relaxed) as usize).min(MOST)
}

fn ask(pool: Pool, attribute: i32) -> Result<u64, Status> {
    let mut value = 0u64;
    // SAFETY: both attributes that we ask for are 64-bit numbers.
    let status =
        unsafe { real::cuMemPoolGetAttribute(pool, attribute, core::ptr::from_mut(&mut value).cast()) };
    if status == SUCCESS { Ok(value) } else { Err(status) }
}

impl Known {
    fn is(&self, pool: Pool) -> bool {
        self.handle == pool && matches!(self.state, State::Charged | State::Unpaid)
    }

    /// Sets the charge of the pool to `bytes`.
    fn charge(&mut self, here: Here, bytes: u64) {
        here.book().settle(self.device.into(), self.charged, bytes);
        if self.is_managed {
            here.book().settle_managed(self.device.into(), self.charged, bytes);
        }
        self.charged = bytes;
    }

    /// Adds `bytes` that are already charged to the pool's charge.
    fn add_charged(&mut self, here: Here, bytes: u64) {
        self.charged = self.charged.saturating_add(bytes);
        if self.is_managed {
            here.book().settle_managed(self.device.into(), 0, bytes);
        }
    }

    /// Charges the pool for the driver's reserve. Returns whether the driver knows the pool: between the
    /// driver's part of a destruction and our record, the state does not show this yet.
    fn settle(&mut self, here: Here) -> bool {
        if self.state != State::Charged {
            return self.state != State::Destroyed;
        }
        match ask(self.handle, RESERVED) {
            Ok(reserved) => {
                self.charge(here, reserved);
                true
            }
            Err(status) => !GONE.contains(&status),
        }
    }

    /// Frees the place of a destroyed pool without live allocations or pending frees.
    fn release_destroyed(&mut self, here: Here) {
        if self.state == State::Destroyed && self.live == 0 && self.freed_on.is_nowhere() {
            self.charge(here, 0);
            self.state = State::Free;
        }
    }
}

/// The place of `pool` in the list. A new pool is entered and charged for its existing reserve; `None`: no
/// place is left.
fn place(here: Here, pool: Pool, device: u8, state: State) -> Option<usize> {
    let mut list = list(here);
    let places = list.get_mut(..used(here))?;
    if let Some(at) = places.iter().position(|known| known.is(pool)) {
        return Some(at);
    }
    let free = places.iter().position(|known| known.state == State::Free);
    let at = free.unwrap_or(places.len());
    let freed_on = Queue::default();
    let new = list.get_mut(at)?;
    *new = Known { handle: pool, charged: 0, live: 0, freed_on, device, is_managed: false, state };
    new.settle(here);
    here.state.pools.used.fetch_max(u32::try_from(at + 1).ok()?, Ordering::Relaxed);
    Some(at)
}

fn known(here: Here, pool: Pool) -> Option<(usize, Known)> {
    let list = list(here);
    let mut places = list.iter().take(used(here)).enumerate();
    places.find(|(_, known)| known.is(pool)).map(|(at, known)| (at, *known))
}

/// Settles the pool in place `at`. Queries the driver under the lock, so that an older figure cannot replace
/// a newer one.
///
/// Returns whether the driver knows the pool.
fn settle_one(here: Here, at: usize) -> bool {
    list(here).get_mut(at).is_some_and(|known| known.settle(here))
}

pub(super) fn settle_all(here: Here) {
    if !is_unused(here) {
        list(here).iter_mut().take(used(here)).for_each(|known| _ = known.settle(here));
    }
}

/// Records that the frees in these queues have run.
pub(super) fn ran(here: Here, work: Ran) {
    if is_unused(here) {
        return;
    }
    for known in list(here).iter_mut().take(used(here)).filter(|known| work.covers(known.freed_on)) {
        known.freed_on = Queue::default();
        known.release_destroyed(here);
    }
}

pub(super) fn forget(here: Here, stream: Stream) {
    let mut list = list(here);
    list.iter_mut().take(used(here)).for_each(|known| known.freed_on = known.freed_on.without(stream));
}

/// The device has no context left. Its pools' memory is gone, and the driver reports 0 for the pools that
/// remain.
pub(super) fn line_ended(here: Here, line: u8) {
    let mut list = list(here);
    for (at, known) in list.iter_mut().enumerate().take(used(here)) {
        if known.device != line || !matches!(known.state, State::Charged | State::Destroyed) {
            continue;
        }
        known.settle(here);
        let gone = match known.state {
            State::Charged => ask(known.handle, RESERVED).is_err_and(|status| GONE.contains(&status)),
            _ => true,
        };
        if !gone && known.charged > 0 {
            continue; // the driver reports that the pool still holds memory
        }
        here.state.table.remove_all(|entry| entry.kind == Kind::Async && entry.extra == at as u64, |_| {});
        (known.live, known.freed_on) = (0, Queue::default());
        if gone {
            known.charge(here, 0);
            known.state = State::Free;
        }
    }
}

/// Asks the driver which frees of destroyed pools have run.
pub(super) fn ask_driver(here: Here) {
    queue::ask_driver(here, used(here), |at, found| {
        let list = list(here);
        let waits = |known: &&Known| known.state == State::Destroyed && known.live == 0;
        if let Some(known) = list.get(at).filter(waits) {
            found(known.freed_on);
        }
    });
}

/// Returns the unused memory of all pools to the driver.
pub(super) fn trim_all(here: Here) {
    let _alone = here.state.pools.room.lock(); // so that room which another thread counts on is not trimmed
    for known in list(here).iter_mut().take(used(here)).filter(|known| known.state == State::Charged) {
        // SAFETY: a pool of this process that was not destroyed.
        unsafe { real::cuMemPoolTrimTo(known.handle, 0) };
        known.settle(here);
    }
}

fn destroy(pool: Pool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    let found = known(here, pool);
    if let Some((at, _)) = found {
        settle_one(here, at); // the driver's last figure
    }
    let status = call();
    let Some((at, _)) = found.filter(|_| status == SUCCESS) else { return status };
    if let Some(known) = list(here).get_mut(at) {
        known.state = State::Destroyed;
        known.release_destroyed(here);
    }
    status
}

/// Settles a pool after `call`, which may have shrunk it.
fn resettle(pool: Pool, call: impl FnOnce() -> Status) -> Status {
    let status = call();
    if let Some(here) = here()
        && let Some((at, _)) = known(here, pool)
    {
        settle_one(here, at);
    }
    status
}

/// Changes with `call` which pool `cuMemAllocAsync` uses.
fn choose(call: impl FnOnce() -> Status) -> Status {
    match here() {
        Some(here) => here.state.pools.choices.change(call),
        None => call(),
    }
}

/// Enters a pool that the program has created. `memory`, `kind` and `device` are the type of its allocations
/// and their location.
fn made(here: Here, pool: Pool, memory: i32, kind: i32, device: Device) {
    let (line, state) = if kind == ON_DEVICE {
        (line_of(here, device), State::Charged)
    } else if memory == MANAGED {
        // Regardless of the preferred location, its pages can move to the GPU.
        (context::current(here).map_or(UNLISTED, |current| current.device), State::Charged)
    } else {
        (UNLISTED, State::Unpaid)
    };
    // No place left: allocations from it will be refused.
    let Some(at) = place(here, pool, line, state) else { return };
    if let Some(known) = list(here).get_mut(at) {
        known.is_managed = memory == MANAGED;
    }
}

hooks! { |call|
    cuMemPoolCreate(pool: *mut Pool, properties: *const c_void) => {
        // SAFETY: null, or our caller's CUmemPoolProps: allocation type, handle types, location type and id.
        let properties = unsafe { read(properties.cast::<[i32; 4]>()) };
        let [memory, _, kind, device] = properties.unwrap_or([0, 0, ON_DEVICE, 0]);
        // SAFETY: written by the driver when it succeeded.
        unsafe { after_writing(pool, call, |here, pool| made(here, pool, memory, kind, device)) }
    };
    cuMemPoolImportFromShareableHandle(pool: *mut Pool, handle: *mut c_void, kind: i32, flags: u64) => {
        let enter = |here, pool| _ = place(here, pool, UNLISTED, State::Unpaid);
        // SAFETY: written by the driver when it succeeded.
        unsafe { after_writing(pool, call, enter) }
    };
    cuMemPoolDestroy(pool: Pool) => choose(|| destroy(pool, call));
    cuMemPoolTrimTo(pool: Pool, bytes: usize) => resettle(pool, call);
    cuMemPoolSetAttribute(pool: Pool, attribute: i32, value: *mut c_void) => resettle(pool, call);
    cuDeviceSetMemPool(device: Device, pool: Pool) => choose(call);
    cuMemSetMemPool(location: *mut c_void, kind: i32, pool: Pool) => choose(call);
}
