//! What this process was started with and Rust's start-up, or this program, changes: the low-level runtime gets it as it was.
//!
//! Rust ignores SIGPIPE and opens /dev/null where a standard descriptor is closed, before `main`. So the kernel is asked
//! still earlier, where the loader's part of the start-up calls what stands in `.init_array` (System V ABI, 5.3).
#![allow(unsafe_code)]

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc::{self, c_int};

static WERE_CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];
static WAS_IGNORED: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];
/// Those that are changed: SIGPIPE by Rust, SIGXFSZ by us.
const SIGNALS: [c_int; 2] = [libc::SIGPIPE, libc::SIGXFSZ];

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = remember;

extern "C" fn remember() {
    for (fd, closed) in (0..).zip(&WERE_CLOSED) {
        // SAFETY: three integers, and no memory.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
        closed.store(flags < 0, Ordering::Relaxed);
    }
    for (signal, ignored) in SIGNALS.into_iter().zip(&WAS_IGNORED) {
        // SAFETY: zeros are a valid value of this structure of integers.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: nothing is set, and the answer goes into a structure of our own.
        let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
        ignored.store(asked == 0 && action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    }
}

/// Puts the signals back, and has the next execve close what was closed.
pub fn restore() {
    for (fd, closed) in (0 as RawFd..).zip(&WERE_CLOSED) {
        if closed.load(Ordering::Relaxed) {
            // SAFETY: three integers, and no memory.
            unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
    for (signal, ignored) in SIGNALS.into_iter().zip(&WAS_IGNORED) {
        let action = if ignored.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: neither action runs code of ours.
        unsafe { libc::signal(signal, action) };
    }
}
