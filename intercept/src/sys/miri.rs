//! System calls under miri, which runs no assembly. They go through the C library, to the extent that the
//! unit tests need them. No file exists.

use core::ffi::{c_int, c_long, c_void};

pub use super::x86_64::{
    CLOCK_GETTIME, CLOSE, FCNTL, FSTAT, FUTEX, GETPID, GETTID, MADVISE, MMAP, MUNMAP, OPENAT, READ,
    READLINKAT, WRITE, ten_milliseconds, ticks,
};

const ENOSYS: isize = -38;

/// # Safety
/// Same as the real one.
pub unsafe fn call(number: usize, [a, b, c, d, ..]: [usize; 6]) -> isize {
    let address: *mut c_void = core::ptr::with_exposed_provenance_mut(a);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    match number {
        // SAFETY: no arguments, no memory.
        GETPID => unsafe { libc::getpid() as isize },
        // SAFETY: a new range of the C library's choice.
        MMAP => unsafe { libc::mmap(address, b, protection, flags, -1, 0) }.expose_provenance().cast_signed(),
        // SAFETY: the caller guarantees this.
        MUNMAP => unsafe { libc::munmap(address, b) as isize },
        FUTEX => {
            let timeout: *const c_void = core::ptr::with_exposed_provenance(d);
            let [operation, value] = [b, c].map(|word| c_int::try_from(word).unwrap_or(0));
            // SAFETY: the caller guarantees this.
            unsafe { libc::syscall(libc::SYS_futex, address, operation, value, timeout) as c_long as isize }
        }
        _ => ENOSYS,
    }
}

/// An address that is different in each living thread.
pub fn thread_pointer() -> usize {
    std::thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| core::ptr::from_ref(here).addr())
}
