//! A lock for the threads of this process. Its word is zero when it is free, so a page that the kernel wiped
//! at fork contains free locks.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use crate::sys;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Longest sleep in microseconds. The thread that frees the lock checks for sleepers with a plain load. The
/// processor may do this load before others see the lock free, so a sleeper can be missed. It then wakes up
/// by itself.
const NAP: u64 = 200;

/// Data that one thread at a time may access.
#[repr(C)]
pub struct Mutex<T> {
    word: AtomicU32,
    sleepers: AtomicU32,
    data: UnsafeCell<T>,
}

// SAFETY: the data is reached only through a guard, and one guard exists at a time.
unsafe impl<T: Send> Sync for Mutex<T> {}

impl<T> Mutex<T> {
    /// A free lock.
    pub const fn new(data: T) -> Self {
        Self { word: AtomicU32::new(FREE), sleepers: AtomicU32::new(0), data: UnsafeCell::new(data) }
    }

    /// Waits for the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        if !self.try_take() {
            self.wait();
        }
        Guard { mutex: self }
    }

    fn try_take(&self) -> bool {
        self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn wait(&self) {
        loop {
            for _ in 0..100 {
                if self.word.load(Ordering::Relaxed) == FREE && self.try_take() {
                    return;
                }
                core::hint::spin_loop();
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            sys::futex_wait(&self.word, HELD, NAP, false);
            self.sleepers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The lock, held until drop.
pub struct Guard<'a, T> {
    mutex: &'a Mutex<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the guard holds the lock.
        unsafe { &*self.mutex.data.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard holds the lock.
        unsafe { &mut *self.mutex.data.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.mutex.word.store(FREE, Ordering::Release);
        if self.mutex.sleepers.load(Ordering::Relaxed) != 0 {
            sys::futex_wake(&self.mutex.word, false);
        }
    }
}
