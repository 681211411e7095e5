//! Linear, pitched and managed memory: charged against the device of the current context.

use super::charge::{self, Charge};
use super::context::{Current, current};
use super::size::{charged, pitched};
use super::{Device, Here, OUT_OF_MEMORY, SUCCESS, Status, Stream, here, pool, read_number, real, spill};
use crate::table::{Entry, Kind};

/// Allocates with `call`, which takes at most `bytes` (already rounded) and writes the object's name to
/// `key`.
///
/// # Safety
/// `key` is null, or readable after `call` succeeded.
pub(super) unsafe fn allocate<N: Copy + TryInto<u64>>(
    kind: Kind,
    bytes: u64,
    key: *const N,
    call: impl FnOnce() -> Status,
) -> Status {
    // SAFETY: the caller guarantees this.
    unsafe { allocate_or(kind, Charge::take_uncounted, bytes, key, call, refuse) }
}

/// Like [`allocate`], with the charge from `take`. If the bytes do not fit into the share, `otherwise`
/// answers.
///
/// # Safety
/// Same as [`allocate`].
unsafe fn allocate_or<N: Copy + TryInto<u64>>(
    kind: Kind,
    take: impl FnOnce(Here, u8, u64) -> Option<Charge>,
    bytes: u64,
    key: *const N,
    call: impl FnOnce() -> Status,
    otherwise: impl FnOnce(Here, Current) -> Status,
) -> Status {
    let Some(here) = here() else { return OUT_OF_MEMORY };
    let Some(current) = current(here) else { return call() };
    let Some(charge) = take(here, current.device, bytes) else {
        return otherwise(here, current);
    };
    let status = call();
    if status != SUCCESS {
        return status;
    }
    let Current { context, device, .. } = current;
    // SAFETY: the caller guarantees this.
    match unsafe { read_number(key) } {
        Some(key) => charge.keep_for(Entry { key, size: bytes, extra: 0, kind, device, context }),
        None => charge.keep(),
    }
    status
}

fn refuse(here: Here, _current: Current) -> Status {
    here.book().count_refusal();
    OUT_OF_MEMORY
}

/// Frees the object of `kind` and `key` with `call`, then releases its charge.
pub(super) fn free(kind: Kind, key: u64, call: impl FnOnce() -> Status) -> Status {
    match here() {
        Some(here) => free_here(here, kind, key, call),
        None => call(),
    }
}

fn free_here(here: Here, kind: Kind, key: u64, call: impl FnOnce() -> Status) -> Status {
    charge::free(here, kind, key, call, |entry| charge::release(here, entry))
}

fn free_pointer(pointer: u64, call: impl FnOnce() -> Status) -> Status {
    match here() {
        Some(here) if spill::holds(here, pointer) => free_here(here, Kind::Spilled, pointer, call),
        Some(here) if !pool::is_unused(here) && here.state.table.get(Kind::Async, pointer).is_some() => {
            pool::memory::free(here, pointer, call)
        }
        Some(here) => free_here(here, Kind::Linear, pointer, call),
        None => call(),
    }
}

/// Like [`allocate_or`], for `height` rows of `width` bytes. The driver chooses the pitch and writes it to
/// `pitch`.
///
/// # Safety
/// `pointer` and `pitch` are each null, or readable after `call` or `otherwise` succeeded.
unsafe fn allocate_pitched<P: Copy + TryInto<u64>, N: Copy + TryInto<u64>>(
    pointer: *const P,
    pitch: *const N,
    width: u64,
    height: u64,
    call: impl FnOnce() -> Status,
    otherwise: impl FnOnce(Here, Current) -> Status,
) -> Status {
    let bound = charged(pitched(width, height));
    // SAFETY: the caller guarantees this.
    let status =
        unsafe { allocate_or(Kind::Linear, Charge::take_uncounted, bound, pointer, call, otherwise) };
    if status == SUCCESS
        && let Some(here) = here()
        // SAFETY: the caller guarantees this.
        && let Some(pointer) = unsafe { read_number(pointer) }
        // SAFETY: the caller guarantees this.
        && let Some(pitch) = unsafe { read_number(pitch) }
    {
        settle_pitch(here, pointer, pitch, height);
    }
    status
}

/// Settles a pitched allocation, for which the driver has chosen the pitch.
fn settle_pitch(here: Here, pointer: u64, pitch: u64, height: u64) {
    let real = charged(pitch.saturating_mul(height));
    let exchange = |entry: &mut Entry| (entry.device, core::mem::replace(&mut entry.size, real));
    if let Some((device, bound)) = here.state.table.change(Kind::Linear, pointer, exchange) {
        here.book().settle(usize::from(device), bound, real);
    }
}

hooks! { |call|
    cuMemAlloc(pointer: *mut u32, bytes: u32) =>
        // SAFETY: written by the driver when it succeeded.
        unsafe { allocate(Kind::Linear, charged(bytes.into()), pointer, call) };
    cuMemAlloc_v2(pointer: *mut u64, bytes: usize) => {
        let bytes = charged(bytes as u64);
        // SAFETY: our caller's place for an address.
        let spill = |here: Here, current: Current| unsafe { spill::allocate(here, current, bytes, pointer) };
        // SAFETY: written by the driver or by us when it succeeded.
        unsafe { allocate_or(Kind::Linear, Charge::take_uncounted, bytes, pointer, call, spill) }
    };
    cuMemAllocManaged(pointer: *mut u64, bytes: usize, flags: u32) => {
        let bytes = charged(bytes as u64);
        let spill = |here: Here, current: Current| match flags {
            // To all streams or to the host: spilled memory is open to both.
            // SAFETY: our caller's place for an address.
            1 | 2 => unsafe { spill::allocate(here, current, bytes, pointer) },
            _ => refuse(here, current),
        };
        // SAFETY: written by the driver or by us when it succeeded.
        unsafe { allocate_or(Kind::Linear, Charge::take_managed, bytes, pointer, call, spill) }
    };
    cuMemAllocPitch(pointer: *mut u32, pitch: *mut u32, width: u32, height: u32, element: u32) =>
        // SAFETY: written by the driver when it succeeded.
        unsafe { allocate_pitched(pointer, pitch, width.into(), height.into(), call, refuse) };
    cuMemAllocPitch_v2(pointer: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) => {
        let spill = |here: Here, current: Current| {
            // SAFETY: our caller's places for an address and a pitch.
            unsafe { spill::allocate_pitched(here, current, (width, height), pointer, pitch) }
        };
        // SAFETY: written by the driver or by us when it succeeded.
        unsafe { allocate_pitched(pointer, pitch, width as u64, height as u64, call, spill) }
    };
    cuMemAdvise(address: u64, bytes: usize, advice: i32, device: Device) => spill::advise(call);
    cuMemAdvise_v2(address: u64, bytes: usize, advice: i32, location: u64) => spill::advise(call);
    cuMemPrefetchAsync(address: u64, bytes: usize, device: Device, stream: Stream) => spill::advise(call);
    cuMemPrefetchAsync_ptsz(address: u64, bytes: usize, device: Device, stream: Stream) => spill::advise(call);
    cuMemPrefetchAsync_v2(address: u64, bytes: usize, location: u64, flags: u32, stream: Stream) => spill::advise(call);
    cuMemPrefetchAsync_v2_ptsz(address: u64, bytes: usize, location: u64, flags: u32, stream: Stream) => spill::advise(call);
    cuMemDiscardAndPrefetchBatchAsync(addresses: *mut u64, sizes: *mut usize, count: usize, locations: *mut u64, indexes: *mut usize, location_count: usize, flags: u64, stream: Stream) => spill::advise(call);
    cuMemDiscardAndPrefetchBatchAsync_ptsz(addresses: *mut u64, sizes: *mut usize, count: usize, locations: *mut u64, indexes: *mut usize, location_count: usize, flags: u64, stream: Stream) => spill::advise(call);
    cuMemPrefetchBatchAsync(addresses: *mut u64, sizes: *mut usize, count: usize, locations: *mut u64, indexes: *mut usize, location_count: usize, flags: u64, stream: Stream) => spill::advise(call);
    cuMemPrefetchBatchAsync_ptsz(addresses: *mut u64, sizes: *mut usize, count: usize, locations: *mut u64, indexes: *mut usize, location_count: usize, flags: u64, stream: Stream) => spill::advise(call);
    cuMemFree(pointer: u32) => free_pointer(pointer.into(), call);
    cuMemFree_v2(pointer: u64) => free_pointer(pointer, call);
}
