//! Reads and writes through the caller's pointers. Any of them may be null, and a caller's structure may be
//! unaligned.

/// What lies at `pointer`; `None` when the caller gave none.
///
/// # Safety
/// `pointer` is null or readable.
pub(crate) unsafe fn read<T: Copy>(pointer: *const T) -> Option<T> {
    // SAFETY: not null, so readable.
    (!pointer.is_null()).then(|| unsafe { pointer.read_unaligned() })
}

/// The number that lies at `pointer`, whatever its width; `None` when the caller gave none.
///
/// # Safety
/// `pointer` is null or readable.
pub(crate) unsafe fn read_number<N: Copy + TryInto<u64>>(pointer: *const N) -> Option<u64> {
    // SAFETY: as our caller says.
    unsafe { read(pointer) }.and_then(|number| number.try_into().ok())
}

/// Replaces what lies at `pointer`, if the caller gave one.
///
/// # Safety
/// `pointer` is null or writable.
pub(crate) unsafe fn write<T>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: not null, so writable.
        unsafe { pointer.write_unaligned(value) }
    }
}
