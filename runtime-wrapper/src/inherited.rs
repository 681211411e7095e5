//! Restores the process state that Rust's start-up or the wrapper changes, so that the low-level runtime
//! inherits it as the engine set it.
//!
//! Before `main`, Rust ignores SIGPIPE and opens /dev/null in place of a closed standard descriptor. So a
//! function in `.init_array`, which the loader calls (System V ABI, 5.3), records the state earlier.
#![allow(unsafe_code)]

use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::libc::{self, c_int};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::{getpid, getppid};

static WERE_CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];
static WAS_IGNORED: [AtomicBool; 4] = [const { AtomicBool::new(false) }; 4];
/// The signals that are changed: SIGPIPE by Rust, SIGXFSZ by the wrapper, SIGALRM by a wait for the quota
/// store, SIGCHLD by a wait for a child.
const SIGNALS: [c_int; 4] = [libc::SIGPIPE, libc::SIGXFSZ, libc::SIGALRM, libc::SIGCHLD];

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = remember;

extern "C" fn remember() {
    for (fd, closed) in (0..).zip(&WERE_CLOSED) {
        // SAFETY: the call gets three integers and touches no memory.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
        closed.store(flags < 0, Ordering::Relaxed);
    }
    for (signal, ignored) in SIGNALS.into_iter().zip(&WAS_IGNORED) {
        // SAFETY: zeros are a valid value of this structure of integers.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the call sets nothing and writes its answer into a structure on this stack.
        let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
        ignored.store(asked == 0 && action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    }
}

/// Restores the signals and the descriptors for the program that this process becomes.
pub fn restore() {
    close_again();
    for (signal, ignored) in SIGNALS.into_iter().zip(&WAS_IGNORED) {
        let action = if ignored.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: neither action runs a handler of this program.
        unsafe { libc::signal(signal, action) };
    }
}

/// Lets this process wait for children: if it inherited SIGCHLD as ignored, it would not get their exit
/// status.
pub fn await_children() {
    // SAFETY: the default action runs no handler of this program.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Makes the kernel kill the program of `command` if this process ends first.
pub fn end_with_this_process(command: &mut Command) {
    let this = getpid();
    let bind = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        // This process may have ended before the call.
        if getppid() == this { Ok(()) } else { Err(Errno::ESRCH.into()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(bind) };
}

/// Marks the descriptors that were closed at the start so that the next execve closes them.
pub fn close_again() {
    for (fd, closed) in (0 as RawFd..).zip(&WERE_CLOSED) {
        if closed.load(Ordering::Relaxed) {
            // SAFETY: the call gets three integers and touches no memory.
            unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
}
