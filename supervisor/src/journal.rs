//! The call in progress, in memory that outlives the worker: a new worker continues the call that the last
//! one received.
//!
//! The new worker undoes an allocation and repeats it, so the program gets exactly one object however far the
//! dead worker came. It repeats a call that frees; an object that is not found then was freed.

use std::sync::atomic::{AtomicU32, Ordering};

/// Room for the kernel's notification (`struct seccomp_notif`, 80 bytes today) in words of 8 bytes.
pub const NOTIFICATION_WORDS: usize = 32;

/// The journal's entry. All zeros is a valid one.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Entry {
    /// The kernel writes the notification here when the worker receives it. Its first word is the id, 0 for
    /// none.
    pub notification: [u64; NOTIFICATION_WORDS],
    step: AtomicU32,
    client: AtomicU32,
    handle: AtomicU32,
    /// How many workers the program's memory has delayed during this call.
    delays: AtomicU32,
    /// How many workers have ended during this call.
    restarts: AtomicU32,
}

const IDLE: u32 = 0;
const ALLOCATING: u32 = 1;
const RELEASING: u32 = 2;

/// How much of the call in progress RM may have performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: the call was received, or let through.
    Received,
    /// It may have made an object.
    Allocating {
        /// The object's client.
        client: u32,
        /// Its handle.
        handle: u32,
    },
    /// It may have freed an object.
    Releasing,
}

/// The journal of one worker.
#[derive(Debug)]
pub struct Journal<'m> {
    entry: &'m mut Entry,
}

impl<'m> Journal<'m> {
    /// Opens the journal in this entry.
    pub fn open(entry: &'m mut Entry) -> Self {
        Self { entry }
    }

    /// Returns the buffer into which the kernel writes the next notification.
    pub fn notification(&mut self) -> &mut [u64; NOTIFICATION_WORDS] {
        &mut self.entry.notification
    }

    /// Returns how far the call in progress has come.
    pub fn step(&self) -> Step {
        match self.entry.step.load(Ordering::Acquire) {
            ALLOCATING => Step::Allocating {
                client: self.entry.client.load(Ordering::Relaxed),
                handle: self.entry.handle.load(Ordering::Relaxed),
            },
            RELEASING => Step::Releasing,
            _ => Step::Received,
        }
    }

    /// Records the step before RM is called.
    pub fn begin(&self, step: Step) {
        let number = match step {
            Step::Received => IDLE,
            Step::Allocating { client, handle } => {
                self.entry.client.store(client, Ordering::Relaxed);
                self.entry.handle.store(handle, Ordering::Relaxed);
                ALLOCATING
            }
            Step::Releasing => RELEASING,
        };
        self.entry.step.store(number, Ordering::Release);
    }

    /// Counts one more worker that the program's memory delayed during this call, and returns the count.
    pub fn count_delay(&self) -> u32 {
        self.entry.delays.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Counts one more worker that ended during this call, and returns the count.
    pub fn count_restart(&self) -> u32 {
        self.entry.restarts.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Records that the call was answered.
    pub fn finish(&mut self) {
        self.begin(Step::Received);
        self.entry.delays.store(0, Ordering::Relaxed);
        self.entry.restarts.store(0, Ordering::Relaxed);
        self.entry.notification[0] = 0;
    }
}
