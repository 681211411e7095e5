//! System calls of x86_64 Linux (arch/x86/entry/syscalls/syscall_64.tbl).

use core::arch::asm;

pub const READ: usize = 0;
pub const WRITE: usize = 1;
pub const CLOSE: usize = 3;
pub const FSTAT: usize = 5;
pub const MMAP: usize = 9;
pub const MUNMAP: usize = 11;
pub const MADVISE: usize = 28;
pub const GETPID: usize = 39;
pub const FCNTL: usize = 72;
pub const GETTID: usize = 186;
pub const FUTEX: usize = 202;
pub const CLOCK_GETTIME: usize = 228;
pub const OPENAT: usize = 257;
pub const READLINKAT: usize = 267;

/// # Safety
/// `number` and the arguments form a system call that only touches memory that the caller owns.
pub unsafe fn call(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the calling convention of the kernel; rcx and r11 are the registers that it overwrites.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

#[inline(always)]
pub fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reads one word. Each thread's control block begins with its own address (ELF handling for
    // thread-local storage, x86-64).
    unsafe { asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, preserves_flags, readonly, pure)) };
    pointer
}

pub fn ticks() -> u64 {
    // SAFETY: rdtsc reads a counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// About ten milliseconds: processors count 2 to 5 ticks in a nanosecond.
pub fn ten_milliseconds() -> u64 {
    1 << 25
}
