//! Arrays and mipmapped arrays. Their size is computed, since the driver reports it only for some of them.

use core::ffi::c_void;

use super::linear::{allocate, free};
use super::size::{Shape, charged};
use super::{Status, read, real};
use crate::table::Kind;

/// `CUDA_ARRAY_DESCRIPTOR`, with 32-bit lengths `u32` and with 64-bit lengths `u64`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Flat<L> {
    width: L,
    height: L,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`, in the same two widths.
#[derive(Clone, Copy)]
#[repr(C)]
struct Solid<L> {
    width: L,
    height: L,
    depth: L,
    format: u32,
    channels: u32,
    flags: u32,
}

/// # Safety
/// `pointer` is null or points to a `CUDA_ARRAY_DESCRIPTOR` with lengths of type `L`.
unsafe fn flat<L: Copy + Into<u64>>(pointer: *const c_void) -> Shape {
    // SAFETY: the caller guarantees this.
    let Some(flat) = (unsafe { read(pointer.cast::<Flat<L>>()) }) else { return Shape::default() };
    let Flat { width, height, format, channels } = flat;
    Shape { width: width.into(), height: height.into(), format, channels, ..Shape::default() }
}

/// # Safety
/// `pointer` is null or points to a `CUDA_ARRAY3D_DESCRIPTOR` with lengths of type `L`.
unsafe fn solid<L: Copy + Into<u64>>(pointer: *const c_void) -> Shape {
    // SAFETY: the caller guarantees this.
    let Some(solid) = (unsafe { read(pointer.cast::<Solid<L>>()) }) else { return Shape::default() };
    let Solid { width, height, depth, format, channels, flags } = solid;
    Shape { width: width.into(), height: height.into(), depth: depth.into(), format, channels, flags }
}

/// Creates an array with `call`. `describe` reads the description at `shape`.
///
/// # Safety
/// `shape` is null or valid for `describe`. `array` is null, or readable after `call` succeeded.
unsafe fn make(
    array: *const usize,
    shape: *const c_void,
    describe: unsafe fn(*const c_void) -> Shape,
    call: impl FnOnce() -> Status,
) -> Status {
    // SAFETY: the caller guarantees this.
    let bytes = unsafe { describe(shape) }.bytes();
    // SAFETY: the caller guarantees this.
    unsafe { allocate(Kind::Array, charged(bytes), array, call) }
}

hooks! { |call|
    cuArrayCreate(array: *mut usize, shape: *const c_void) =>
        // SAFETY: the description that this function takes, and what the driver writes when it succeeds.
        unsafe { make(array, shape, flat::<u32>, call) };
    cuArrayCreate_v2(array: *mut usize, shape: *const c_void) =>
        // SAFETY: as above.
        unsafe { make(array, shape, flat::<u64>, call) };
    cuArray3DCreate(array: *mut usize, shape: *const c_void) =>
        // SAFETY: as above.
        unsafe { make(array, shape, solid::<u32>, call) };
    cuArray3DCreate_v2(array: *mut usize, shape: *const c_void) =>
        // SAFETY: as above.
        unsafe { make(array, shape, solid::<u64>, call) };
    cuArrayDestroy(array: usize) => free(Kind::Array, array as u64, call);
    cuMipmappedArrayCreate(array: *mut usize, shape: *const c_void, levels: u32) => {
        // SAFETY: our caller passes the description that this function takes.
        let bytes = unsafe { solid::<u64>(shape) }.mipmap_bytes(levels);
        // SAFETY: written by the driver when it succeeded.
        unsafe { allocate(Kind::Mipmap, charged(bytes), array, call) }
    };
    cuMipmappedArrayDestroy(array: usize) => free(Kind::Mipmap, array as u64, call);
}
