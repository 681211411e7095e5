//! System calls that neither nix nor the standard library has.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, c_int, c_long, c_uint, c_ulong};
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

use crate::journal::NOTIFICATION_WORDS;

/// Size in bytes of `struct seccomp_notif` as this code reads it.
const NOTIFICATION: usize = 80;
/// SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP, of kernel 6.6.
const SYNC_WAKE_UP: c_ulong = 1;
/// SECCOMP_IOCTL_NOTIF_SET_FLAGS.
const SET_FLAGS: c_ulong = 0x4008_2104;
/// SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, of kernel 5.19.
const WAIT_KILLABLE: c_ulong = 1 << 5;
/// PIDFD_THREAD, of kernel 6.9.
const PIDFD_THREAD: c_uint = libc::O_EXCL as c_uint;

fn owned(answer: c_long) -> Result<OwnedFd, Errno> {
    let number = RawFd::try_from(Errno::result(answer)?).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel has just made this descriptor for us, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Installs a filter with a listener on this thread and its descendants.
///
/// # Errors
/// EBUSY if there is already a filter with a listener, EACCES without CAP_SYS_ADMIN, EINVAL before kernel
/// 5.19.
pub fn install_with_listener(program: &mut [libc::sock_filter]) -> Result<OwnedFd, Errno> {
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW | WAIT_KILLABLE;
    owned(install(program, flags))
}

/// Installs a filter without a listener on this thread and its descendants.
///
/// # Errors
/// EACCES without CAP_SYS_ADMIN.
pub fn install_without_listener(program: &mut [libc::sock_filter]) -> Result<(), Errno> {
    Errno::result(install(program, libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW)).map(drop)
}

fn install(program: &mut [libc::sock_filter], flags: c_ulong) -> c_long {
    if cfg!(not(target_arch = "x86_64")) {
        Errno::ENOSYS.set(); // the filter's system call numbers do not apply to this architecture
        return -1;
    }
    let Ok(len) = u16::try_from(program.len()) else { return -1 };
    let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    // SAFETY: the program and its instructions outlive the call; the kernel copies them.
    unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) }
}

/// Whether the kernel can report calls as the supervisor needs, on an architecture whose system call numbers
/// are known.
pub fn can_listen() -> bool {
    if cfg!(not(target_arch = "x86_64")) {
        return false;
    }
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | WAIT_KILLABLE;
    let nothing: *const libc::sock_fprog = std::ptr::null();
    // SAFETY: the kernel checks the flags, and then fails for want of a program.
    let asked = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, nothing) };
    // EBUSY means that a filter with a listener exists already; installing another one reports that.
    matches!(Errno::result(asked), Err(Errno::EFAULT | Errno::EBUSY))
}

/// Whether a notification fits into the journal.
pub fn notification_fits() -> bool {
    // SAFETY: zeros are a valid value of this structure of integers.
    let mut sizes: libc::seccomp_notif_sizes = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes the structure, which outlives the call.
    let asked = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, &raw mut sizes) };
    let size = usize::from(sizes.seccomp_notif);
    asked == 0 && (NOTIFICATION..=NOTIFICATION_WORDS * 8).contains(&size)
}

/// Makes the kernel run the supervisor as soon as a call is reported. Kernels before 6.6 cannot.
pub fn set_synchronous(listener: BorrowedFd) {
    // SAFETY: two integers, and no memory.
    let _ = unsafe { libc::ioctl(listener.as_raw_fd(), SET_FLAGS, SYNC_WAKE_UP) };
}

/// Receives the next notification into `to`, which is zeroed first.
///
/// # Errors
/// ENOENT and EINTR are normal: the call is gone, or a signal arrived.
pub fn receive(listener: BorrowedFd, to: &mut [u64; NOTIFICATION_WORDS]) -> Result<(), Errno> {
    to.fill(0);
    // SAFETY: the kernel writes a notification, which fits, as `notification_fits` has checked.
    let done = unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, to.as_mut_ptr()) };
    Errno::result(done).map(drop)
}

/// Whether the program still waits for the answer to notification `id`.
pub fn is_valid(listener: BorrowedFd, id: u64) -> bool {
    // SAFETY: the kernel reads 8 bytes.
    let done =
        unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &raw const id) };
    done == 0
}

/// Answers notification `id`: the call returns 0, fails with `errno`, or is made by the kernel.
///
/// # Errors
/// ENOENT if the program no longer waits.
pub fn send(listener: BorrowedFd, id: u64, errno: Option<Errno>, lets_through: bool) -> Result<(), Errno> {
    let error = errno.map_or(0, |errno| -(errno as c_int));
    let flags = if lets_through { libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE } else { 0 };
    let answer = libc::seccomp_notif_resp { id, val: 0, error, flags: u32::try_from(flags).unwrap_or(0) };
    // SAFETY: the kernel reads the structure, which outlives the call.
    let done =
        unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const answer) };
    Errno::result(done).map(drop)
}

/// Opens a descriptor of a process.
///
/// # Errors
/// ESRCH if it has ended.
pub fn pidfd_open(pid: u32) -> Result<OwnedFd, Errno> {
    // SAFETY: two integers, and no memory.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// Opens a descriptor of a thread, which refers to it as long as it is open. Before kernel 6.9 this works
/// only for a process's first thread.
///
/// # Errors
/// ESRCH if it has ended, EINVAL before kernel 6.9.
pub fn pidfd_open_thread(tid: u32) -> Result<OwnedFd, Errno> {
    // SAFETY: two integers, and no memory.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, tid, PIDFD_THREAD) })
}

/// Duplicates descriptor `fd` of a thread or process.
///
/// # Errors
/// EBADF if it has none, ESRCH if it has ended.
pub fn pidfd_getfd(process: BorrowedFd, fd: RawFd) -> Result<OwnedFd, Errno> {
    // SAFETY: three integers, and no memory.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })
}

/// Kills a process.
///
/// # Errors
/// ESRCH if it has ended.
pub fn kill(process: BorrowedFd) -> Result<(), Errno> {
    signal(process, libc::SIGKILL)
}

/// Sends SIGTERM to a process.
///
/// # Errors
/// ESRCH if it has ended.
pub fn terminate(process: BorrowedFd) -> Result<(), Errno> {
    signal(process, libc::SIGTERM)
}

/// Whether a process still has its PID: it lives, or has not been reaped.
pub fn has_number(process: BorrowedFd) -> bool {
    signal(process, 0) != Err(Errno::ESRCH)
}

fn signal(process: BorrowedFd, number: c_int) -> Result<(), Errno> {
    let nothing: *const libc::siginfo_t = std::ptr::null();
    // SAFETY: the kernel fills in the signal information itself for a null pointer.
    let done = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), number, nothing, 0) };
    Errno::result(done).map(drop)
}

/// Runs `what`, and kills this process by SIGALRM if that takes longer than `microseconds`.
pub fn within<T>(microseconds: u32, what: impl FnOnce() -> T) -> T {
    set_timer(microseconds);
    let done = what();
    set_timer(0);
    done
}

fn set_timer(microseconds: u32) {
    let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let (seconds, rest) = (microseconds / 1_000_000, microseconds % 1_000_000);
    let value = libc::timeval { tv_sec: seconds.into(), tv_usec: rest.into() };
    let timer = libc::itimerval { it_interval: zero, it_value: value };
    // SAFETY: the kernel reads the structure, which outlives the call, and writes nothing.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
}

/// Locks one byte of an open file. The lock belongs to the open file description, and lasts until its last
/// descriptor is closed. `waits`: block until another holder releases it.
///
/// # Errors
/// EAGAIN if another open of the file holds the lock and `waits` is false.
pub(crate) fn lock_byte(file: impl AsFd, at: usize, waits: bool) -> Result<(), Errno> {
    let wanted = byte_lock(at, 1)?;
    let lock = || if waits { FcntlArg::F_OFD_SETLKW(&wanted) } else { FcntlArg::F_OFD_SETLK(&wanted) };
    loop {
        match fcntl(&file, lock()) {
            Err(Errno::EINTR) => {}
            done => return done.map(drop),
        }
    }
}

/// Whether any of a file's first `bytes` bytes is locked with [`lock_byte`].
///
/// # Errors
/// The errors of fcntl(2).
pub(crate) fn has_locks(file: impl AsFd, bytes: usize) -> Result<bool, Errno> {
    let mut asked = byte_lock(0, bytes)?;
    let _ = fcntl(&file, FcntlArg::F_OFD_GETLK(&mut asked))?;
    Ok(c_int::from(asked.l_type) != libc::F_UNLCK)
}

/// Whether another open of the file has locked this byte with [`lock_byte`].
///
/// # Errors
/// The errors of fcntl(2).
pub(crate) fn is_locked(file: impl AsFd, at: usize) -> Result<bool, Errno> {
    let mut asked = byte_lock(at, 1)?;
    let _ = fcntl(&file, FcntlArg::F_OFD_GETLK(&mut asked))?;
    Ok(c_int::from(asked.l_type) != libc::F_UNLCK)
}

fn byte_lock(at: usize, bytes: usize) -> Result<libc::flock, Errno> {
    let short = |number: c_int| libc::c_short::try_from(number).unwrap_or(libc::c_short::MAX);
    Ok(libc::flock {
        l_type: short(libc::F_WRLCK),
        l_whence: short(libc::SEEK_SET),
        l_start: i64::try_from(at).map_err(|_| Errno::EINVAL)?,
        l_len: i64::try_from(bytes).map_err(|_| Errno::EINVAL)?,
        l_pid: 0,
    })
}

/// Forks this process, which has one thread. Returns `None` in the child, and the child's id in the parent.
///
/// # Errors
/// The errors of fork(2).
pub(crate) fn fork() -> Result<Option<Pid>, Errno> {
    // SAFETY: there is no other thread whose locks the child would wait for.
    match unsafe { nix::unistd::fork() }? {
        nix::unistd::ForkResult::Parent { child } => Ok(Some(child)),
        nix::unistd::ForkResult::Child => Ok(None),
    }
}

/// Closes every descriptor but the three standard ones.
pub(crate) fn close_inherited() {
    // SAFETY: nothing of this process has opened a file yet.
    unsafe { libc::syscall(libc::SYS_close_range, 3, c_uint::MAX, 0) };
}

/// File attributes that the kernel knows without the file system.
pub(crate) struct Seen {
    /// Its kind, as st_mode.
    pub mode: u32,
    /// Number of the device, if the file is a device node.
    pub number: u64,
    /// Number of the device that it lies on.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
}

/// Returns attributes of an open file without calling its file system, which may be a program.
///
/// # Errors
/// The errors of statx(2).
pub(crate) fn glance(file: impl AsFd) -> Result<Seen, Errno> {
    // SAFETY: only integers, for which zeros are valid.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the kernel reads an empty string, and writes the structure. Without a mask it does not call the
    // file system, and fills in the attributes that it has.
    let done = unsafe { libc::statx(file.as_fd().as_raw_fd(), c"".as_ptr(), flags, 0, &raw mut found) };
    Errno::result(done)?;
    let device = |major, minor| nix::sys::stat::makedev(u64::from(major), u64::from(minor));
    Ok(Seen {
        mode: u32::from(found.stx_mode),
        number: device(found.stx_rdev_major, found.stx_rdev_minor),
        device: device(found.stx_dev_major, found.stx_dev_minor),
        inode: found.stx_ino,
    })
}

/// Makes the kernel wake this thread at the requested time, and not up to 50 microseconds later.
///
/// # Errors
/// The errors of prctl(2).
pub(crate) fn wake_precisely() -> Result<(), Errno> {
    // SAFETY: only integers.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0) }).map(drop)
}

/// Returns random bits from the kernel, or the stack's address if the kernel has none yet.
pub fn random() -> u64 {
    let mut bits = 0u64;
    // SAFETY: the kernel writes at most 8 bytes.
    let done = unsafe { libc::getrandom((&raw mut bits).cast(), size_of::<u64>(), libc::GRND_NONBLOCK) };
    if done == 8 { bits } else { (&raw const bits).addr() as u64 }
}

/// Unblocks all signals and resets them to their default actions, whatever this process inherited.
pub fn reset_signals() {
    for signal in 1..=31 {
        // SAFETY: the default action runs no code of ours. SIGKILL and SIGSTOP cannot be changed, which is
        // fine.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // This process does not wait for its children, so let the kernel reap them.
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    // SAFETY: zeros are a valid set of signals, an empty one.
    let none: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel reads the set, which outlives the call.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) };
}

/// Reads another process's memory.
///
/// # Errors
/// EFAULT if not all of it is there.
pub fn read_memory(tid: u32, address: u64, to: &mut [u8]) -> Result<(), Errno> {
    let there = [RemoteIoVec { base: usize::try_from(address).map_err(|_| Errno::EFAULT)?, len: to.len() }];
    let len = to.len();
    let done = process_vm_readv(pid(tid), &mut [IoSliceMut::new(to)], &there)?;
    if done == len { Ok(()) } else { Err(Errno::EFAULT) }
}

/// Writes another process's memory, in parts.
///
/// # Errors
/// EFAULT if not all of it is there.
pub fn write_memory(tid: u32, parts: &[(u64, &[u8])]) -> Result<(), Errno> {
    let here: Vec<IoSlice> = parts.iter().map(|(_, bytes)| IoSlice::new(bytes)).collect();
    let place = |(address, bytes): &(u64, &[u8])| {
        usize::try_from(*address).map(|base| RemoteIoVec { base, len: bytes.len() })
    };
    let there = parts.iter().map(place).collect::<Result<Vec<_>, _>>().map_err(|_| Errno::EFAULT)?;
    let wanted: usize = there.iter().map(|part| part.len).sum();
    let done = process_vm_writev(pid(tid), &here, &there)?;
    if done == wanted { Ok(()) } else { Err(Errno::EFAULT) }
}

fn pid(tid: u32) -> Pid {
    Pid::from_raw(tid.cast_signed())
}

/// Makes RM's call `number` with this structure, which already contains the addresses of `pointed`.
///
/// # Errors
/// The error from the driver.
pub(crate) fn manager_call(file: BorrowedFd, number: u8, structure: &mut [u8]) -> Result<(), Errno> {
    /// _IOWR('F', 0, 0).
    const COMMAND: c_ulong = 0xc000_4600;
    let size = c_ulong::try_from(structure.len()).map_err(|_| Errno::EINVAL)?;
    let command = COMMAND | size << 16 | c_ulong::from(number);
    // SAFETY: the driver reads and writes as many bytes as the command says, and the buffers that the
    // addresses lead to. The caller owns these buffers. They outlive the call and have the sizes that this
    // driver's era gives them.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), command, structure.as_mut_ptr()) };
    Errno::result(done).map(drop)
}

/// Maps a file of `T`s for reading and writing, shared with all others that map it. `T` must be valid for any
/// bytes.
///
/// # Errors
/// The errors of mmap(2).
pub(crate) fn map<T>(file: impl AsFd, offset: i64, count: usize) -> Result<*mut T, Errno> {
    let len = size_of::<T>() * count;
    let (protection, file) = (libc::PROT_READ | libc::PROT_WRITE, file.as_fd().as_raw_fd());
    // SAFETY: the kernel chooses the address, so the mapping touches no other memory of this process.
    let address =
        unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, file, offset) };
    if address == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(address.cast()) }
}
