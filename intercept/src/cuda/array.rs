//! Arrays and mipmapped arrays. Their size is computed, since the driver tells it only for some of them.

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
    // SAFETY: as our caller says.
    let Some(flat) = (unsafe { read(pointer.cast::<Flat<L>>()) }) else { return Shape::default() };
    let Flat { width, height, format, channels } = flat;
    Shape { width: width.into(), height: height.into(), format, channels, ..Shape::default() }
}

/// # Safety
/// `pointer` is null or points to a `CUDA_ARRAY3D_DESCRIPTOR` with lengths of type `L`.
unsafe fn solid<L: Copy + Into<u64>>(pointer: *const c_void) -> Shape {
    // SAFETY: as our caller says.
    let Some(solid) = (unsafe { read(pointer.cast::<Solid<L>>()) }) else { return Shape::default() };
    let Solid { width, height, depth, format, channels, flags } = solid;
    Shape { width: width.into(), height: height.into(), depth: depth.into(), format, channels, flags }
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

    macro_rules! makers {
        ($($name:ident, $shape:ident :: $length:ty;)*) => { $(
            pub unsafe extern "C" fn $name(array: *mut usize, shape: *const c_void) -> Status {
                // SAFETY: our caller passes the description that this function takes.
                let bytes = unsafe { $shape::<$length>(shape) }.bytes();
                // SAFETY: our caller's arguments, unchanged.
                let call = || unsafe { real::$name(array, shape) };
                // SAFETY: written by the driver when it succeeded.
                allocate(Kind::Array, charged(bytes), call, || unsafe { read(array) }.map(|array| array as u64))
            }
        )* };
    }

    makers! {
        cuArrayCreate, flat::u32;
        cuArrayCreate_v2, flat::u64;
        cuArray3DCreate, solid::u32;
        cuArray3DCreate_v2, solid::u64;
    }

    pub unsafe extern "C" fn cuArrayDestroy(array: usize) -> Status {
        // SAFETY: our caller's argument, unchanged.
        free(Kind::Array, array as u64, || unsafe { real::cuArrayDestroy(array) })
    }

    pub unsafe extern "C" fn cuMipmappedArrayCreate(
        array: *mut usize,
        shape: *const c_void,
        levels: u32,
    ) -> Status {
        // SAFETY: our caller passes the description that this function takes.
        let bytes = unsafe { solid::<u64>(shape) }.mipmap_bytes(levels);
        // SAFETY: our caller's arguments, unchanged.
        let call = || unsafe { real::cuMipmappedArrayCreate(array, shape, levels) };
        // SAFETY: written by the driver when it succeeded.
        allocate(Kind::Mipmap, charged(bytes), call, || unsafe { read(array) }.map(|array| array as u64))
    }

    pub unsafe extern "C" fn cuMipmappedArrayDestroy(array: usize) -> Status {
        // SAFETY: our caller's argument, unchanged.
        free(Kind::Mipmap, array as u64, || unsafe { real::cuMipmappedArrayDestroy(array) })
    }
}
