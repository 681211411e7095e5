//! System calls of arm64 Linux (include/uapi/asm-generic/unistd.h). The parts of structures that we use have
//! the same layout as on x86_64.

use core::arch::asm;

pub const FCNTL: usize = 25;
pub const OPENAT: usize = 56;
pub const CLOSE: usize = 57;
pub const READ: usize = 63;
pub const WRITE: usize = 64;
pub const READLINKAT: usize = 78;
pub const FSTAT: usize = 80;
pub const FUTEX: usize = 98;
pub const CLOCK_GETTIME: usize = 113;
pub const GETPID: usize = 172;
pub const GETTID: usize = 178;
pub const MUNMAP: usize = 215;
pub const MMAP: usize = 222;
pub const MADVISE: usize = 233;

/// # Safety
/// `number` and the arguments form a system call that only touches memory that the caller owns.
pub unsafe fn call(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the calling convention of the kernel, which keeps all other registers.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    result
}

#[inline(always)]
pub fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reads a register, which holds the address of the thread's control block (ELF for the Arm 64-bit
    // Architecture, thread-local storage).
    unsafe { asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem, pure)) };
    pointer
}

pub fn ticks() -> u64 {
    let ticks: u64;
    // SAFETY: reads a counter that Linux lets programs read.
    unsafe { asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nostack, preserves_flags, nomem)) };
    ticks
}

/// Ten milliseconds of the counter; a register holds its frequency.
pub fn ten_milliseconds() -> u64 {
    let frequency: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, cntfrq_el0", out(reg) frequency, options(nostack, preserves_flags, nomem, pure)) };
    frequency / 100
}
