//! External memory: the importer is charged the size in the description. Buffers mapped from it are parts of
//! it. They are not entered, so freeing one goes to the driver like any unknown pointer. Memory of another
//! process that is opened through an IPC handle is charged to its exporter and needs no hook.

use core::ffi::c_void;

use super::linear::{allocate, free};
use super::size::charged;
use super::{Status, read, real};
use crate::table::Kind;

/// Offset of `size` in `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`: after the type and a union of two pointers.
const SIZE_AT: usize = 24;

hooks! { |call|
    cuImportExternalMemory(memory: *mut usize, description: *const c_void) => {
        let at = if description.is_null() { description } else { description.wrapping_byte_add(SIZE_AT) };
        // SAFETY: null, or the size field of our caller's description.
        let bytes = unsafe { read(at.cast::<u64>()) }.unwrap_or(0);
        // SAFETY: written by the driver when it succeeded.
        unsafe { allocate(Kind::External, charged(bytes), memory, call) }
    };
    cuDestroyExternalMemory(memory: usize) => free(Kind::External, memory as u64, call);
}
