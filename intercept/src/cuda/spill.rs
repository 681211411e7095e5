//! Host memory in place of device memory, for a container whose share of the device is full and that was
//! granted host memory.
//!
//! It is managed memory that stays on the host: the device reads and writes it over the bus. The driver gives
//! the program an ordinary pointer, and never moves the pages to the device while this advice is set. A
//! program's own advice and prefetches, which would move them, are not passed on while a process holds such
//! memory: they change no result.

use super::charge::Charge;
use super::context::Current;
use super::size::charged;
use super::{Here, OUT_OF_MEMORY, SUCCESS, Status, here, real};
use crate::table::{Entry, Kind};

/// `CU_MEM_ATTACH_GLOBAL`.
const GLOBAL: u32 = 1;
/// `CU_MEM_ADVISE_SET_PREFERRED_LOCATION` and `CU_MEM_ADVISE_SET_ACCESSED_BY`.
const PREFERRED_LOCATION: i32 = 3;
const ACCESSED_BY: i32 = 5;
/// Upper bound of `CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT` and of cuMemAllocPitch's rounding.
const PITCH: usize = 512;
/// `CU_DEVICE_CPU`.
const HOST: i32 = -1;

/// Allocates `bytes` of host memory for the device of `current`, and writes their address to `pointer`.
///
/// # Safety
/// `pointer` is null, or a place for an address.
#[cold]
pub(super) unsafe fn allocate(here: Here, current: Current, bytes: u64, pointer: *mut u64) -> Status {
    let refused = || {
        here.book().count_refusal();
        OUT_OF_MEMORY
    };
    let line = here.book().host_line().and_then(|line| u8::try_from(line).ok());
    let Some(line) = line.filter(|_| !pointer.is_null()) else { return refused() };
    let (Ok(size), Some(charge)) = (usize::try_from(bytes), Charge::take_once(here, line, bytes)) else {
        return refused();
    };
    let mut address = 0;
    // SAFETY: the driver writes an address.
    if unsafe { real::cuMemAllocManaged(&mut address, size, GLOBAL) } != SUCCESS {
        return refused();
    }
    if !stays_with_the_host(address, size) {
        // SAFETY: the driver has just allocated it.
        let _ = unsafe { real::cuMemFree_v2(address) };
        return refused();
    }
    let Current { context, device, .. } = current;
    charge.keep_for(Entry { key: address, size: bytes, extra: 0, kind: Kind::Spilled, device, context });
    // SAFETY: the caller guarantees this, and it is not null.
    unsafe { pointer.write_unaligned(address) };
    SUCCESS
}

/// Advises the driver to keep the range on the host. A GPU or system that cannot do so reports an error here.
fn stays_with_the_host(address: u64, size: usize) -> bool {
    let mut device = 0;
    // SAFETY: the driver writes a device.
    if unsafe { real::cuCtxGetDevice(&mut device) } != SUCCESS {
        return false;
    }
    // SAFETY: the range was just allocated.
    let advise = |advice, device| unsafe { real::cuMemAdvise(address, size, advice, device) } == SUCCESS;
    advise(PREFERRED_LOCATION, HOST) && advise(ACCESSED_BY, device)
}

/// Like [`allocate`], for `height` rows of `width` bytes, with the largest pitch that GPUs require.
///
/// # Safety
/// Same as [`allocate`]; `pitch` is null, or a place for a length.
#[cold]
pub(super) unsafe fn allocate_pitched(
    here: Here,
    current: Current,
    (width, height): (usize, usize),
    pointer: *mut u64,
    pitch: *mut usize,
) -> Status {
    let row = width.checked_next_multiple_of(PITCH).filter(|_| !pitch.is_null());
    let bytes = row.and_then(|row| row.checked_mul(height)).unwrap_or(usize::MAX);
    // SAFETY: the caller guarantees this.
    let status = unsafe { allocate(here, current, charged(bytes as u64), pointer) };
    if status == SUCCESS
        && let Some(row) = row
    {
        // SAFETY: the caller guarantees this, and it is not null.
        unsafe { pitch.write_unaligned(row) };
    }
    status
}

/// Whether `pointer` is memory of this kind.
pub(super) fn holds(here: Here, pointer: u64) -> bool {
    here.book().host_line().is_some() && here.state.table.get(Kind::Spilled, pointer).is_some()
}

/// Passes advice about managed memory on, unless this process holds memory that must stay on the host.
pub(super) fn advise(call: impl FnOnce() -> Status) -> Status {
    let holds = |here: Here| here.state.table.sum(|entry| entry.kind == Kind::Spilled) > 0;
    match here() {
        Some(here) if here.book().host_line().is_some() && holds(here) => SUCCESS,
        _ => call(),
    }
}
