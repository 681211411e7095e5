//! The CUDA driver as the container sees it: the hooks, and the state that they share.
//!
//! A hook is thin: it finds this process's state, asks the books, calls the real function with the caller's
//! own arguments and settles. Calls that the books cannot answer (no context, a null pointer, an unknown
//! handle) go to the driver.

mod array;
mod capture;
mod charge;
mod context;
mod context_limit;
mod entry;
mod external;
mod functions;
mod gate;
mod graph;
mod holders;
pub mod hooks;
mod launch;
mod launch_entry;
mod lifetime;
mod linear;
mod mps;
mod pending;
mod pool;
mod query;
mod queue;
pub mod size;
mod spill;
mod stream;
mod stream_handle;
mod timing;
mod virtual_memory;

use core::sync::atomic::{AtomicU8, Ordering};

use gpushare_region::path;

use crate::pointer::{read, read_number, write};
use crate::process::{Home, Process, Zeroed};
use crate::table::Table;
use functions::{Context, Device, Graph, OUT_OF_MEMORY, Pool, SUCCESS, Stream, real};
pub use functions::{DRIVER, HOOKED, NAMES, Status};

/// Line of the limits file for a GPU that is not in it: its limit is 0 bytes.
const UNLISTED: u8 = u8::MAX;
/// How many devices have their line cached. The driver numbers devices from 0.
const KNOWN_DEVICES: usize = 64;

static HOME: Home<Cuda> = Home::new(path::LIMITS, path::USAGE);

/// The state that this library keeps per process, besides the books.
#[repr(C)]
pub struct Cuda {
    /// Line of the limits file + 1, by device number; 0: not looked up yet.
    lines: [AtomicU8; KNOWN_DEVICES],
    contexts: context::Contexts,
    table: Table,
    pools: pool::Pools,
    graphs: graph::Graphs,
    frees: pending::Frees,
    notes: queue::Notes,
    launches: launch::Launches,
    captures: capture::Captures,
    virtual_memory: virtual_memory::Numbers,
}

// SAFETY: numbers, atomics, and locks that are free when zero.
unsafe impl Zeroed for Cuda {}

type Here = &'static Process<Cuda>;

fn here() -> Option<Here> {
    HOME.get()
}

/// Runs `then` if `call` succeeds, and returns the status of `call`.
fn after_success(call: impl FnOnce() -> Status, then: impl FnOnce()) -> Status {
    let status = call();
    if status == SUCCESS {
        then();
    }
    status
}

/// Like [`after_success`]; passes the value that `call` has written to `place`.
///
/// # Safety
/// `place` is null, or readable after `call` succeeded.
unsafe fn after_writing<T: Copy>(
    place: *const T,
    call: impl FnOnce() -> Status,
    then: impl FnOnce(Here, T),
) -> Status {
    after_success(call, || {
        if let Some(here) = here()
            // SAFETY: the caller guarantees this.
            && let Some(written) = unsafe { read(place) }
        {
            then(here, written);
        }
    })
}

/// Looks up the real functions. Called once, when the library is loaded and before any of its hooks.
pub fn load() {
    DRIVER.fill(path::DRIVER_CUDA, &NAMES);
}

/// The line of the limits file for `device`, or [`UNLISTED`].
fn line_of(here: Here, device: Device) -> u8 {
    let cached = usize::try_from(device).ok().and_then(|device| here.state.lines.get(device));
    if let Some(line) = cached.and_then(|line| line.load(Ordering::Relaxed).checked_sub(1)) {
        return line;
    }
    let Some(uuid) = uuid_of(device) else { return UNLISTED };
    let line = here.book().device(&uuid).and_then(|line| u8::try_from(line).ok());
    if let (Some(line), Some(cached)) = (line, cached) {
        cached.store(line + 1, Ordering::Relaxed);
    }
    line.unwrap_or(UNLISTED)
}

/// The device's UUID. Only the second form returns the UUID of a MIG instance, and only drivers from 470 on
/// have it (cuda.h, CUDA 11.4).
fn uuid_of(device: Device) -> Option<[u8; 16]> {
    let mut uuid = [0; 16];
    // SAFETY: the driver writes 16 bytes.
    let mut status = unsafe { real::cuDeviceGetUuid_v2(&mut uuid, device) };
    if status != SUCCESS {
        // SAFETY: the driver writes 16 bytes.
        status = unsafe { real::cuDeviceGetUuid(&mut uuid, device) };
    }
    (status == SUCCESS).then_some(uuid)
}

/// Calls `each` for every device the driver shows, with its line.
fn each_device(here: Here, mut each: impl FnMut(Device, u8)) {
    let mut count = 0;
    // SAFETY: the driver writes one integer.
    if unsafe { real::cuDeviceGetCount(&mut count) } != SUCCESS {
        return;
    }
    for ordinal in 0..count {
        let mut device = 0;
        // SAFETY: the driver writes one integer.
        if unsafe { real::cuDeviceGet(&mut device, ordinal) } == SUCCESS {
            each(device, line_of(here, device));
        }
    }
}
