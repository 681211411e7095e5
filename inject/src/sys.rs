//! The system calls that neither nix nor the standard library has: everything unsafe about living containers.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::libc::{self, c_int, c_long, c_uint};

/// Makes a write beyond RLIMIT_FSIZE fail with an error. Without this call the signal SIGXFSZ ends the
/// process (setrlimit(2)).
pub fn outlive_file_size_limit() {
    // SAFETY: to ignore a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// A descriptor of the process `pid`. It still names this process after its end.
pub(crate) fn pidfd_open(pid: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: two integers, and no memory.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    owned(fd)
}

/// Clones the mount of what `source` names, with all mounts below it. The clone is attached nowhere yet.
pub(crate) fn clone_tree(source: BorrowedFd) -> Result<OwnedFd, Errno> {
    let empty = i64::from(libc::AT_EMPTY_PATH | libc::AT_RECURSIVE);
    let flags = i64::from(libc::OPEN_TREE_CLONE) | i64::from(libc::O_CLOEXEC) | empty;
    // SAFETY: the path is a C string that outlives the call.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, source.as_raw_fd(), c"".as_ptr(), flags) };
    owned(fd)
}

/// Sets mount attributes (`MOUNT_ATTR_*`) on an unattached tree, and makes it private.
pub(crate) fn set_attributes(tree: BorrowedFd, set: u64) -> Result<(), Errno> {
    let attributes =
        libc::mount_attr { attr_set: set, attr_clr: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    let size = size_of::<libc::mount_attr>();
    // SAFETY: the path and the structure outlive the call, and `size` is the structure's.
    let done = unsafe {
        libc::syscall(libc::SYS_mount_setattr, tree.as_raw_fd(), c"".as_ptr(), flags, &attributes, size)
    };
    Errno::result(done).map(drop)
}

/// Attaches `tree` over what `target` names, in this process's mount namespace. No path is looked up.
pub(crate) fn move_mount(tree: RawFd, target: RawFd) -> Result<(), Errno> {
    let empty: *const libc::c_char = c"".as_ptr();
    let flags = libc::MOVE_MOUNT_F_EMPTY_PATH | libc::MOVE_MOUNT_T_EMPTY_PATH;
    // SAFETY: the path outlives the call; numbers that are no descriptors are refused by the kernel.
    let done = unsafe { libc::syscall(libc::SYS_move_mount, tree, empty, target, empty, flags) };
    Errno::result(done).map(drop)
}

/// Joins the mount namespace that the descriptor number `namespace` names.
pub(crate) fn join_mount_namespace(namespace: RawFd) -> Result<(), Errno> {
    // SAFETY: two integers, and no memory.
    Errno::result(unsafe { libc::setns(namespace, libc::CLONE_NEWNS) }).map(drop)
}

/// Detaches the mount at `path`.
pub(crate) fn detach(path: &CStr) -> Result<(), Errno> {
    // SAFETY: the path is a C string that outlives the call.
    Errno::result(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) }).map(drop)
}

/// Ends this process at once; no code of ours or Rust's runs any more.
pub(crate) fn exit(status: c_int) -> ! {
    // SAFETY: nothing is left to be written or closed in order.
    unsafe { libc::_exit(status) }
}

/// Runs one `bpf` command. `attributes` is the part of the kernel's union that the command reads and writes.
pub(crate) fn bpf<T>(command: c_int, attributes: &mut T) -> Result<c_long, Errno> {
    let size = size_of::<T>();
    // SAFETY: the structure outlives the call, and `size` is its own. It points to buffers of the callers,
    // who are all in the module of device programs and keep their buffers until the call returns.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size) };
    Errno::result(done)
}

/// As [`bpf`], for commands that return a descriptor.
pub(crate) fn bpf_fd<T>(command: c_int, attributes: &mut T) -> Result<OwnedFd, Errno> {
    owned(bpf(command, attributes)?)
}

/// Leaves this process only the system calls of `numbers` (x86-64); any other one kills it.
pub(crate) fn allow_only(numbers: &[c_long]) -> Result<(), Errno> {
    const ARCHITECTURE: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64
    let load = |offset| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let end = |answer| statement(libc::BPF_RET | libc::BPF_K, answer);
    let mut program = vec![load(4), jump(ARCHITECTURE, 1, 0), end(libc::SECCOMP_RET_KILL_PROCESS), load(0)];
    for number in numbers {
        let number = u32::try_from(*number).map_err(|_| Errno::EINVAL)?;
        program.extend([jump(number, 0, 1), end(libc::SECCOMP_RET_ALLOW)]);
    }
    program.push(end(libc::SECCOMP_RET_KILL_PROCESS));
    let length = u16::try_from(program.len()).map_err(|_| Errno::EINVAL)?;
    let filter = libc::sock_fprog { len: length, filter: program.as_mut_ptr() };
    // SAFETY: the filter and its instructions outlive the call; the kernel copies them.
    let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) };
    Errno::result(done).map(drop)
}

fn statement(code: c_uint, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: u16::try_from(code).unwrap_or(u16::MAX), jt: 0, jf: 0, k }
}

/// Skips `jt` instructions if the loaded word is `word`, else `jf`.
fn jump(word: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { jt, jf, ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, word) }
}

/// Lets a program that this process starts inherit the descriptor.
pub(crate) fn inherit(fd: impl AsFd) -> Result<(), Errno> {
    nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).map(drop)
}

fn owned(answer: c_long) -> Result<OwnedFd, Errno> {
    let number = Errno::result(answer)?;
    let number = RawFd::try_from(number).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel made the descriptor for this call, so nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
