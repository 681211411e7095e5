//! Physical memory that leaves the process and may come back to it. An exported descriptor keeps the memory
//! alive while it is open, and importing it in this process adds another handle for the same memory.

use core::ffi::c_void;
use core::sync::atomic::{AtomicUsize, Ordering};

use super::super::{Here, Status, after_writing, real};
use super::object::{add_reference, drop_reference, object_of_handle, retain};
use crate::mutex::Mutex;
use crate::sys::{self, FileId};

/// How many exports are tracked. The memory of further exports stays charged until the process ends.
const MOST: usize = 4096;
const DESCRIPTOR: i32 = 1; // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

/// Descriptors that this process exported.
#[repr(C)]
pub(super) struct Exports {
    list: Mutex<[Export; MOST]>,
    /// Places of the list ever used.
    used: AtomicUsize,
}

/// A descriptor, which holds a reference to the physical object.
#[derive(Clone, Copy)]
#[repr(C)]
struct Export {
    /// 0: this place is free.
    live: u64,
    object: u64,
    descriptor: i32,
    device: u64,
    inode: u64,
}

impl Export {
    /// Whether the descriptor is still open on the exported memory. Another export with the same number is
    /// recognised only if the driver gives each export its own inode.
    fn is_open(&self) -> bool {
        let same = |id: FileId| (id.device, id.inode) == (self.device, self.inode);
        sys::file_id(self.descriptor).is_ok_and(same)
    }
}

/// Counts the descriptor that the driver has made for `handle`.
fn exported(here: Here, handle: u64, descriptor: i32) {
    let exports = &here.state.virtual_memory.exports;
    let Some(object) = object_of_handle(here, handle) else { return };
    add_reference(here, object);
    let Ok(id) = sys::file_id(descriptor) else { return };
    let mut list = exports.list.lock();
    let used = exports.used.load(Ordering::Relaxed);
    let mut places = list.iter().take(used);
    let same = places.position(|export| export.live != 0 && export.descriptor == descriptor);
    let at = same.or_else(|| list.iter().position(|export| export.live == 0));
    let Some((at, place)) = at.and_then(|at| Some((at, list.get_mut(at)?))) else { return };
    exports.used.fetch_max(at + 1, Ordering::Relaxed);
    let new = Export { live: 1, object, descriptor, device: id.device, inode: id.inode };
    let old = core::mem::replace(place, new);
    if old.live != 0 {
        drop_reference(here, old.object); // it was closed, since the driver got its number
    }
}

/// Drops the references of descriptors that the program has closed.
pub(in super::super) fn reap(here: Here) {
    reap_those(here, |_| true);
}

/// Like [`reap`], for one object.
pub(super) fn reap_object(here: Here, object: u64) {
    reap_those(here, |export| export.object == object);
}

fn reap_those(here: Here, wanted: impl Fn(&Export) -> bool) {
    if is_unused(here) {
        return;
    }
    let exports = &here.state.virtual_memory.exports;
    let (mut list, used) = (exports.list.lock(), exports.used.load(Ordering::Relaxed));
    let places = list.iter_mut().take(used);
    for export in places.filter(|export| export.live != 0 && wanted(export) && !export.is_open()) {
        export.live = 0;
        drop_reference(here, export.object);
    }
}

pub(in super::super) fn is_unused(here: Here) -> bool {
    here.state.virtual_memory.exports.used.load(Ordering::Relaxed) == 0
}

/// The object that this process exported as `descriptor`.
fn object_of_descriptor(here: Here, descriptor: i32) -> Option<u64> {
    let exports = &here.state.virtual_memory.exports;
    let (list, used) = (exports.list.lock(), exports.used.load(Ordering::Relaxed));
    let mut live = list.iter().take(used).filter(|export| export.live != 0);
    live.find(|export| export.descriptor == descriptor && export.is_open()).map(|export| export.object)
}

/// Counts the handle that the driver has created from `descriptor`.
fn imported(here: Here, handle: u64, descriptor: i32) {
    if !is_unused(here) {
        retain(here, handle, || object_of_descriptor(here, descriptor));
    }
}

hooks! { |call|
    cuMemExportToShareableHandle(shared: *mut c_void, handle: u64, kind: i32, flags: u64) => {
        if kind != DESCRIPTOR {
            return call();
        }
        let count = |here, descriptor| exported(here, handle, descriptor);
        // SAFETY: written by the driver when it succeeded.
        unsafe { after_writing(shared.cast::<i32>(), call, count) }
    };
    cuMemImportFromShareableHandle(handle: *mut u64, shared: *mut c_void, kind: i32) => {
        // For a descriptor, `shared` is the number itself, not an address.
        let Some(descriptor) = i32::try_from(shared.addr()).ok().filter(|_| kind == DESCRIPTOR) else {
            return call();
        };
        let count = |here, handle| imported(here, handle, descriptor);
        // SAFETY: written by the driver when it succeeded.
        unsafe { after_writing(handle, call, count) }
    };
}
