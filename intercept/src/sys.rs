//! System calls, made without a C library. The interception libraries must not depend on one
//! (interception.md, 14.1: a libc reference can require a newer glibc than the image has). A raw call also
//! leaves the program's `errno` alone.

use core::ffi::CStr;

#[cfg(all(target_arch = "aarch64", target_os = "linux"))]
mod aarch64;
#[cfg(miri)]
mod miri;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod x86_64;

#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_os = "linux")))]
compile_error!("the interception libraries are written for x86_64 and arm64 Linux");

#[cfg(all(target_arch = "aarch64", not(miri)))]
use aarch64 as machine;
#[cfg(miri)]
use miri as machine;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use x86_64 as machine;

use machine::{
    CLOCK_GETTIME, CLOSE, FCNTL, FSTAT, FUTEX, GETPID, GETTID, MADVISE, MMAP, MUNMAP, OPENAT, READ,
    READLINKAT, WRITE, call,
};

const AT_FDCWD: isize = -100;
const EINTR: isize = -4;

/// A kernel error number, positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub isize);

fn check(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno(-result))
}

/// An open descriptor that is closed on drop.
///
/// Closing *any* descriptor of the usage file drops the record locks of the whole process, so the descriptor
/// of that file is never closed: see [`Fd::leak`].
#[derive(Debug)]
pub struct Fd(i32);

impl Fd {
    /// Opens `path` with close-on-exec, for reading, or for reading and writing.
    pub fn open(path: &CStr, writable: bool) -> Result<Self, Errno> {
        const O_RDWR: usize = 2;
        const O_CLOEXEC: usize = 0o2_000_000;
        let flags = O_CLOEXEC | if writable { O_RDWR } else { 0 };
        let arguments = [AT_FDCWD.cast_unsigned(), path.as_ptr().expose_provenance(), flags, 0, 0, 0];
        // SAFETY: the path is a C string that outlives the call.
        let result = unsafe { call(OPENAT, arguments) };
        check(result).map(|fd| Self(i32::try_from(fd).unwrap_or(-1)))
    }

    /// The bare number of a descriptor that is never closed.
    pub fn leak(self) -> i32 {
        let number = self.0;
        core::mem::forget(self);
        number
    }

    /// The bare number.
    pub const fn number(&self) -> i32 {
        self.0
    }

    /// Reads at most `buffer` from the current position.
    pub fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        let arguments = [raw(self.0), buffer.as_mut_ptr().expose_provenance(), buffer.len(), 0, 0, 0];
        // SAFETY: the kernel writes at most `buffer.len()` bytes into it.
        check(unsafe { call(READ, arguments) })
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours.
        let _ = unsafe { call(CLOSE, [raw(self.0), 0, 0, 0, 0, 0]) };
    }
}

fn raw(fd: i32) -> usize {
    // A negative number is an error to the kernel in either width.
    usize::try_from(fd).unwrap_or(usize::MAX)
}

/// Writes a line to standard error. Ignores a failure.
pub fn say(line: &[u8]) {
    const STDERR: usize = 2;
    let arguments = [STDERR, line.as_ptr().expose_provenance(), line.len(), 0, 0, 0];
    // SAFETY: the kernel reads `line.len()` bytes of it.
    let _ = unsafe { call(WRITE, arguments) };
}

/// The fields of `fstat`'s result that we use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// Device of the file system.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Identity and size of an open file.
pub fn file_id(fd: i32) -> Result<FileId, Errno> {
    // struct stat has 144 bytes on x86_64 and 128 on arm64: st_dev, st_ino, …, st_size at 48
    let mut stat = [0u64; 18];
    // SAFETY: the kernel writes one struct stat, which `stat` holds.
    check(unsafe { call(FSTAT, [raw(fd), stat.as_mut_ptr().expose_provenance(), 0, 0, 0, 0]) })?;
    Ok(FileId { device: stat[0], inode: stat[1], size: stat[6] })
}

/// Maps the first `length` bytes of `fd`, shared with every other mapping of the file.
pub fn map_file(fd: i32, length: usize, writable: bool) -> Result<usize, Errno> {
    const SHARED: usize = 1;
    let protection = 1 | if writable { 2 } else { 0 };
    // SAFETY: the kernel picks a free range; nothing is replaced.
    check(unsafe { call(MMAP, [0, length, protection, SHARED, raw(fd), 0]) })
}

/// Maps `length` zero bytes of private memory.
pub fn map_private(length: usize) -> Result<usize, Errno> {
    const PRIVATE_ANONYMOUS: usize = 0x22;
    // SAFETY: the kernel picks a free range; nothing is replaced.
    check(unsafe { call(MMAP, [0, length, 3, PRIVATE_ANONYMOUS, usize::MAX, 0]) })
}

/// Unmaps memory that [`map_private`] returned.
///
/// # Safety
/// Nothing refers to the range any more.
pub unsafe fn unmap(address: usize, length: usize) {
    // SAFETY: the caller guarantees that the range is unused.
    let _ = unsafe { call(MUNMAP, [address, length, 0, 0, 0, 0]) };
}

/// Tells the kernel to give a forked child zeros at `address`. False on kernels before 4.14.
pub fn wipe_on_fork(address: usize, length: usize) -> bool {
    const MADV_WIPEONFORK: usize = 18;
    // SAFETY: the advice changes nothing in this process.
    unsafe { call(MADVISE, [address, length, MADV_WIPEONFORK, 0, 0, 0]) == 0 }
}

/// This process's id in its own pid namespace.
pub fn pid() -> u32 {
    // SAFETY: no arguments, no memory.
    let pid = unsafe { call(GETPID, [0; 6]) };
    u32::try_from(pid).unwrap_or(0)
}

/// The calling thread's id in its own pid namespace.
pub fn thread() -> u32 {
    // SAFETY: no arguments, no memory.
    let thread = unsafe { call(GETTID, [0; 6]) };
    u32::try_from(thread).unwrap_or(0)
}

/// Reads the link `path` into `buffer` and returns the bytes read.
pub fn read_link<'a>(path: &CStr, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let [path, target] = [path.as_ptr().expose_provenance(), buffer.as_mut_ptr().expose_provenance()];
    let arguments = [AT_FDCWD.cast_unsigned(), path, target, buffer.len(), 0, 0];
    // SAFETY: the kernel writes at most `buffer.len()` bytes into it.
    let length = check(unsafe { call(READLINKAT, arguments) }).ok()?;
    buffer.get(..length)
}

/// Sleeps while `word` is `value`, at most `microseconds`. May return early.
pub fn futex_wait(word: &core::sync::atomic::AtomicU32, value: u32, microseconds: u64, shared: bool) {
    let timeout = [microseconds / 1_000_000, microseconds % 1_000_000 * 1000];
    let operation = if shared { 0 } else { 128 };
    let word = core::ptr::from_ref(word).expose_provenance();
    let value = value as usize;
    // SAFETY: word and timeout outlive the call.
    let _ = unsafe { call(FUTEX, [word, operation, value, timeout.as_ptr().expose_provenance(), 0, 0]) };
}

/// Wakes all threads that sleep on `word`.
pub fn futex_wake(word: &core::sync::atomic::AtomicU32, shared: bool) {
    let operation = 1 | if shared { 0 } else { 128 };
    let word = core::ptr::from_ref(word).expose_provenance();
    // SAFETY: the kernel only compares addresses.
    let _ = unsafe { call(FUTEX, [word, operation, i32::MAX as usize, 0, 0, 0]) };
}

/// Sleeps for `microseconds`.
pub fn sleep(microseconds: u64) {
    futex_wait(&core::sync::atomic::AtomicU32::new(0), 0, microseconds, false);
}

/// The state of one record-lock byte, as another process sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteLock {
    /// Another process holds it. The value is its pid in our pid namespace; 0 if it has none there.
    Held(u32),
    /// No other process holds it.
    Free,
    /// The kernel returns no answer for this descriptor.
    Unknown,
}

/// `struct flock`.
#[repr(C)]
struct Flock {
    kind: i16,
    whence: i16,
    start: u64,
    length: u64,
    pid: i32,
}

const WRITE_LOCK: i16 = 1;
const UNLOCK: i16 = 2;

fn record_lock(fd: i32, command: usize, kind: i16, byte: u64) -> Result<Flock, Errno> {
    let mut lock = Flock { kind, whence: 0, start: byte, length: 1, pid: 0 };
    let arguments = [raw(fd), command, core::ptr::from_mut(&mut lock).expose_provenance(), 0, 0, 0];
    loop {
        // SAFETY: the kernel reads and writes one struct flock.
        let result = unsafe { call(FCNTL, arguments) };
        if result != EINTR {
            return check(result).map(|_| lock);
        }
    }
}

/// Tries to take the record lock of `byte`; false if another process holds it. Never waits.
pub fn lock_byte(fd: i32, byte: u64) -> Result<bool, Errno> {
    const EACCES: Errno = Errno(13);
    const EAGAIN: Errno = Errno(11);
    match record_lock(fd, 6, WRITE_LOCK, byte) {
        Ok(_) => Ok(true),
        Err(EAGAIN | EACCES) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Releases the record lock of `byte`.
pub fn unlock_byte(fd: i32, byte: u64) {
    let _ = record_lock(fd, 6, UNLOCK, byte);
}

/// Tests which process holds the record lock of `byte`.
pub fn test_byte(fd: i32, byte: u64) -> ByteLock {
    match record_lock(fd, 5, WRITE_LOCK, byte) {
        Ok(lock) if lock.kind == UNLOCK => ByteLock::Free,
        Ok(lock) => ByteLock::Held(u32::try_from(lock.pid).unwrap_or(0)),
        Err(_) => ByteLock::Unknown,
    }
}

/// Monotonic time in nanoseconds, the same for all processes of the machine.
pub fn now() -> u64 {
    const CLOCK_MONOTONIC: usize = 1;
    let mut time = [0u64; 2]; // struct timespec: seconds, nanoseconds
    // SAFETY: the kernel writes one struct timespec.
    let _ =
        unsafe { call(CLOCK_GETTIME, [CLOCK_MONOTONIC, time.as_mut_ptr().expose_provenance(), 0, 0, 0, 0]) };
    time[0].wrapping_mul(1_000_000_000).wrapping_add(time[1])
}

/// The thread pointer, which differs from that of every other living thread. It is an address and never 0.
/// Reading it takes one instruction, while the kernel's thread number takes a system call.
#[inline(always)]
pub fn thread_pointer() -> usize {
    machine::thread_pointer()
}

/// Processor ticks. Use them only to check whether some milliseconds have passed.
pub fn ticks() -> u64 {
    machine::ticks()
}

/// The approximate number of ticks in ten milliseconds.
pub fn ten_milliseconds() -> u64 {
    machine::ten_milliseconds()
}
