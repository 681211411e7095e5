//! Real processes, and memory that they share.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Memory that forked processes share.
pub struct Shared(pub &'static [AtomicU64]);

impl Shared {
    pub fn new(words: usize) -> Self {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), words * 8, protection, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        // SAFETY: `words` zeroed words, never unmapped.
        Self(unsafe { std::slice::from_raw_parts(address.cast(), words) })
    }

    pub fn get(&self, at: usize) -> u64 {
        self.0[at].load(SeqCst)
    }

    pub fn add(&self, at: usize) {
        self.0[at].fetch_add(1, SeqCst);
    }
}

/// Runs `child` in a forked process. It must not allocate: other threads of the test may have held the heap's
/// lock.
pub fn fork(child: impl FnOnce()) -> libc::pid_t {
    // SAFETY: the child calls only functions that need no lock, and ends with _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: a failed test must not leave children behind.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        child();
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    pid
}

pub fn kill(pid: libc::pid_t, signal: i32) {
    // SAFETY: a child of ours that has not been reaped.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

pub fn wait(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: a child of ours.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    status
}

pub fn pause() {
    // SAFETY: waits for a signal.
    unsafe { libc::pause() };
}

pub fn until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited for {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

pub fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}
