//! Access to device memory, which is memory of this process. No other module of this crate dereferences an
//! address.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::alu::Alu;
use crate::error::Fault;

/// Addresses that an access may have. Below is the null page, which no allocation has; above is nothing that
/// user space can map.
const LOWEST: u64 = 4096;
const HIGHEST: u64 = 1 << 56;

/// The pointer to `address`, if an access aligned to `align` bytes may go there.
#[inline]
fn pointer<T>(address: u64, align: u8) -> Result<*mut T, Fault> {
    if address & u64::from(align - 1) != 0 {
        return Err(Fault::MisalignedAddress(address));
    }
    match usize::try_from(address) {
        Ok(place) if (LOWEST..HIGHEST).contains(&address) => Ok(std::ptr::with_exposed_provenance_mut(place)),
        _ => Err(Fault::IllegalAddress(address)),
    }
}

/// Reads 1, 2, 4 or 8 bytes.
///
/// # Safety
/// The bytes at `address` are mapped and readable, unless the address is refused.
#[inline]
pub(crate) unsafe fn load(address: u64, size: u8, align: u8) -> Result<u64, Fault> {
    /// # Safety
    /// As for `load`.
    #[inline]
    unsafe fn read<T: Into<u64>>(address: u64, align: u8) -> Result<u64, Fault> {
        let pointer = pointer::<T>(address, align)?;
        // SAFETY: the caller vouches that the bytes are mapped; alignment is not assumed.
        Ok(unsafe { pointer.read_unaligned() }.into())
    }
    match size {
        // SAFETY: the caller's contract, passed on.
        1 => unsafe { read::<u8>(address, align) },
        // SAFETY: the caller's contract, passed on.
        2 => unsafe { read::<u16>(address, align) },
        // SAFETY: the caller's contract, passed on.
        4 => unsafe { read::<u32>(address, align) },
        // SAFETY: the caller's contract, passed on.
        _ => unsafe { read::<u64>(address, align) },
    }
}

/// Writes the low 1, 2, 4 or 8 bytes of `value`.
///
/// # Safety
/// The bytes at `address` are mapped and writable, unless the address is refused.
#[inline]
pub(crate) unsafe fn store(address: u64, size: u8, align: u8, value: u64) -> Result<(), Fault> {
    /// # Safety
    /// As for `store`.
    #[inline]
    unsafe fn write<T>(address: u64, align: u8, value: T) -> Result<(), Fault> {
        let pointer = pointer::<T>(address, align)?;
        // SAFETY: the caller vouches that the bytes are mapped; alignment is not assumed.
        unsafe { pointer.write_unaligned(value) };
        Ok(())
    }
    use crate::alu::scalar::Scalar;
    match size {
        // SAFETY: the caller's contract, passed on.
        1 => unsafe { write(address, align, u8::of(value)) },
        // SAFETY: the caller's contract, passed on.
        2 => unsafe { write(address, align, u16::of(value)) },
        // SAFETY: the caller's contract, passed on.
        4 => unsafe { write(address, align, u32::of(value)) },
        // SAFETY: the caller's contract, passed on.
        _ => unsafe { write(address, align, value) },
    }
}

/// Replaces the 2, 4 or 8 bytes at `address` by `f(old, b, c)` in one step, and returns the old value. All
/// threads and processes that use the same memory see one order.
///
/// # Safety
/// The bytes at `address` are mapped and writable, unless the address is refused.
pub(crate) unsafe fn update(address: u64, size: u8, f: Alu, b: u64, c: u64) -> Result<u64, Fault> {
    use crate::alu::scalar::Scalar;
    macro_rules! update {
        ($atomic:ty, $int:ty) => {{
            let pointer = pointer::<$int>(address, size)?;
            // SAFETY: the caller vouches that the bytes are mapped; `pointer` checked the alignment.
            let cell = unsafe { <$atomic>::from_ptr(pointer) };
            let next = |old: $int| Some(<$int>::of(f(u64::from(old), b, c)));
            cell.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).map_or_else(u64::from, u64::from)
        }};
    }
    Ok(match size {
        2 => update!(AtomicU16, u16),
        4 => update!(AtomicU32, u32),
        _ => update!(AtomicU64, u64),
    })
}

/// Copies `bytes` bytes; the two places may overlap.
///
/// # Safety
/// `from` is readable and `to` writable over `bytes` bytes.
pub(crate) unsafe fn copy(to: u64, from: u64, bytes: usize) -> Result<(), Fault> {
    let (to, from) = (pointer::<u8>(to, 1)?, pointer::<u8>(from, 1)?);
    // SAFETY: the caller vouches for both places; `copy` allows an overlap.
    unsafe { from.copy_to(to, bytes) };
    Ok(())
}

/// The bytes from `address` to the first zero, at most 64 KiB.
///
/// # Safety
/// The bytes up to the zero are mapped and readable.
pub(crate) unsafe fn text(address: u64) -> Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    for at in address..address.saturating_add(1 << 16) {
        // SAFETY: no zero was met before `at`, so the caller's contract covers it.
        let byte = unsafe { load(at, 1, 1) }?.to_le_bytes()[0];
        if byte == 0 {
            break;
        }
        bytes.push(byte);
    }
    Ok(bytes)
}
