//! Physical memory and its mappings. The memory is charged to the device in the request until all its handles
//! *and* mappings are gone, since mapped memory outlives its handle. Imported memory is charged to its
//! exporter and stays unknown here, unless this same process exported it.

pub(super) mod multicast;
mod object;
pub(super) mod share;

use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering};

use self::object::{add_reference, drop_reference, object_of_handle, retain};
use super::charge::Charge;
use super::{
    Device, Here, OUT_OF_MEMORY, SUCCESS, Status, Stream, after_success, after_writing, here, line_of, read,
    real,
};
use crate::mutex::Mutex;
use crate::table::{Entry, Kind};

/// Granularity of physical memory.
const GRANULE: u64 = 2 << 20;
/// How far below an address to search for the start of its mapping, in granules.
const REACH: u64 = 1 << 16;
const ON_DEVICE: i32 = 1; // CU_MEM_LOCATION_TYPE_DEVICE

/// The state of this family besides the table.
#[repr(C)]
pub(super) struct Numbers {
    /// Number of the next physical object. A handle cannot identify an object: the driver can reuse it while
    /// the memory is still mapped.
    next: AtomicU64,
    /// Locked while mappings change, so that one thread's unmap cannot mistake another's new mapping for its
    /// own.
    mapping: Mutex<()>,
    exports: share::Exports,
}

/// The object mapped at `address`, which may be anywhere inside the mapping.
fn object_at(here: Here, address: u64) -> Option<u64> {
    let start = address / GRANULE;
    (0..REACH.min(start)).find_map(|below| {
        let at = (start - below) * GRANULE;
        let entry = here.state.table.get(Kind::Mapping, at)?;
        (entry.size > address - at).then_some(entry.extra)
    })
}

/// Runs `call`, which maps or binds `bytes` of `object`, and enters this reference as `key`.
fn refer(here: Here, kind: Kind, key: u64, bytes: u64, object: u64, call: impl FnOnce() -> Status) -> Status {
    add_reference(here, object); // first: another thread may release the handle in the meantime
    let status = call();
    if status != SUCCESS {
        drop_reference(here, object);
        return status;
    }
    let entry = Entry { key, size: bytes, extra: object, kind, device: 0, context: 0 };
    // If there is no memory for the entry, the object stays charged until the process ends.
    if let Ok(Some(old)) = here.state.table.put(entry) {
        drop_reference(here, old.extra);
    }
    status
}

/// Drops the references of `kind` in the `bytes` from `at` on; `key` computes the table's key for an address.
fn drop_range(here: Here, kind: Kind, at: u64, bytes: u64, key: impl Fn(u64) -> u64) {
    let end = at.saturating_add(bytes);
    let mut at = at;
    while at < end {
        at = match here.state.table.take(kind, key(at)) {
            Some(entry) => {
                drop_reference(here, entry.extra);
                at.saturating_add(entry.size.max(1))
            }
            None => at.saturating_add(GRANULE),
        };
    }
}

fn create(
    bytes: u64,
    device: Device,
    call: impl FnOnce() -> Status,
    handle: impl FnOnce() -> Option<u64>,
) -> Status {
    let Some(here) = here() else { return OUT_OF_MEMORY };
    let size = bytes.checked_next_multiple_of(GRANULE).unwrap_or(u64::MAX);
    let device = line_of(here, device);
    let Some(charge) = Charge::take(here, device, size) else { return OUT_OF_MEMORY };
    let status = call();
    if status != SUCCESS {
        return status;
    }
    let Some(handle) = handle() else {
        charge.keep();
        return status;
    };
    let object = here.state.virtual_memory.next.fetch_add(1, Ordering::Relaxed);
    charge.keep_for(Entry { key: object, size, extra: 1, kind: Kind::Physical, device, context: 0 });
    let entry = Entry { key: handle, size: 1, extra: object, kind: Kind::Handle, device, context: 0 };
    // If the handle was known, a call that we did not see released it, and its old object stays charged.
    let _ = here.state.table.put(entry);
    status
}

fn release(handle: u64, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    let table = &here.state.table;
    let left = table.change(Kind::Handle, handle, |entry| {
        entry.size = entry.size.saturating_sub(1);
        *entry
    });
    if left.is_some_and(|entry| entry.size == 0) {
        table.take(Kind::Handle, handle); // before the driver can reuse the handle
    }
    let status = call();
    let Some(entry) = left else { return status };
    if status == SUCCESS {
        drop_reference(here, entry.extra);
        share::reap_object(here, entry.extra);
    } else if table.change(Kind::Handle, handle, |entry| entry.size += 1).is_none() {
        let _ = table.put(Entry { size: 1, ..entry });
    }
    status
}

fn map(address: u64, bytes: u64, handle: u64, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    let _mapping = here.state.virtual_memory.mapping.lock();
    let Some(object) = object_of_handle(here, handle) else { return call() };
    refer(here, Kind::Mapping, address, bytes, object, call)
}

fn unmap(address: u64, bytes: u64, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    let _mapping = here.state.virtual_memory.mapping.lock();
    let status = call();
    if status == SUCCESS {
        drop_range(here, Kind::Mapping, address, bytes, |at| at);
    }
    status
}

/// The layout of `CUarrayMapInfo`. Only the operation and the handle are read.
#[derive(Clone, Copy)]
#[repr(C)]
struct ArrayMapping {
    resource: [u64; 7],
    operation: i32,
    handle_kind: i32,
    handle: u64,
    rest: [u64; 3],
}

const _: () = assert!(size_of::<ArrayMapping>() == 96);

/// Memory mapped to a sparse array stays charged until the process ends: the call that unmaps it does not
/// name the memory.
///
/// # Safety
/// `list` is null or points to `count` mappings.
unsafe fn map_array(list: *const ArrayMapping, count: u32) {
    const MAP: i32 = 1;
    let Some(here) = here().filter(|_| !list.is_null()) else { return };
    for index in 0..count as usize {
        // SAFETY: `index` is below `count`.
        let Some(mapping) = (unsafe { read(list.wrapping_add(index)) }) else { return };
        if mapping.operation == MAP
            && let Some(object) = object_of_handle(here, mapping.handle)
        {
            add_reference(here, object);
        }
    }
}

hooks! { |call|
    cuMemCreate(handle: *mut u64, bytes: usize, properties: *const c_void, flags: u64) =>
        // SAFETY: null, or our caller's CUmemAllocationProp, which has location type and id at 8.
        match unsafe { read(properties.cast::<[i32; 4]>()) } {
            // SAFETY: written by the driver when it succeeded.
            Some([_, _, ON_DEVICE, device]) => create(bytes as u64, device, call, || unsafe { read(handle) }),
            _ => call(),
        };
    cuMemRelease(handle: u64) => release(handle, call);
    cuMemRetainAllocationHandle(handle: *mut u64, address: u64) => {
        let count = |here, handle| retain(here, handle, || object_at(here, address));
        // SAFETY: written by the driver when it succeeded.
        unsafe { after_writing(handle, call, count) }
    };
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) =>
        map(address, bytes as u64, handle, call);
    cuMemUnmap(address: u64, bytes: usize) => unmap(address, bytes as u64, call);
    cuMemMapArrayAsync(list: *mut c_void, count: u32, stream: Stream) =>
        // SAFETY: the driver has accepted the list.
        after_success(call, || unsafe { map_array(list.cast(), count) });
    cuMemMapArrayAsync_ptsz(list: *mut c_void, count: u32, stream: Stream) =>
        // SAFETY: the driver has accepted the list.
        after_success(call, || unsafe { map_array(list.cast(), count) });
}
