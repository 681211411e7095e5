//! Reads and writes through the caller's pointers. Any of them may be null, and a caller's structure may be
//! unaligned.

/// The value at `pointer`; `None` if the caller passed null.
///
/// # Safety
/// `pointer` is null or readable.
pub(crate) unsafe fn read<T: Copy>(pointer: *const T) -> Option<T> {
    // SAFETY: not null, so readable.
    (!pointer.is_null()).then(|| unsafe { pointer.read_unaligned() })
}

/// The number at `pointer`, of any width; `None` if the caller passed null.
///
/// # Safety
/// `pointer` is null or readable.
pub(crate) unsafe fn read_number<N: Copy + TryInto<u64>>(pointer: *const N) -> Option<u64> {
    // SAFETY: the caller guarantees this.
    unsafe { read(pointer) }.and_then(|number| number.try_into().ok())
}

/// Replaces the value at `pointer`, unless the caller passed null.
///
/// # Safety
/// `pointer` is null or writable.
pub(crate) unsafe fn write<T>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: not null, so writable.
        unsafe { pointer.write_unaligned(value) }
    }
}
