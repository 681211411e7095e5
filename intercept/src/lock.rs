//! The region lock: one futex word {holder, waiters, generation} that all processes of the container share.
//! It only keeps refusals fair; no sum depends on it. No process waits for it longer than the caller
//! specifies. A dead holder loses it to the next process that checks.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use gpushare_region::UsageFile;

use crate::book::Book;
use crate::sys;

const HOLDER: u32 = 0x1ff;
const WAITERS: u32 = 0x200;
const GENERATION: u32 = 0x400;
const SPINS: u32 = 100;
/// Longest wait before the holder is checked again, in nanoseconds.
const LOOK: u64 = 1_000_000;

/// The region lock, held until drop.
pub struct RegionLock<'a> {
    word: &'a AtomicU32,
    held: u32,
}

impl Drop for RegionLock<'_> {
    fn drop(&mut self) {
        let mut word = self.word.load(Relaxed);
        // A changed holder or generation means that another process considered this one dead. There is then
        // nothing to release.
        while word & !WAITERS == self.held {
            let free = (self.held & !HOLDER).wrapping_add(GENERATION);
            match self.word.compare_exchange_weak(word, free, Release, Relaxed) {
                Ok(_) if word & WAITERS != 0 => return sys::futex_wake(self.word, true),
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }
}

impl Book {
    /// Takes the lock; `None` if a living holder still has it at `deadline`, in monotonic nanoseconds.
    pub(crate) fn lock<'a>(&self, usage: &'a UsageFile, deadline: u64) -> Option<RegionLock<'a>> {
        let me = self.slot.load(Relaxed) & HOLDER;
        let word = &usage.header.lock;
        for _ in 0..SPINS {
            if let Some(lock) = take_free(word, me) {
                return Some(lock);
            }
            core::hint::spin_loop();
        }
        loop {
            let seen = word.fetch_or(WAITERS, AcqRel) | WAITERS;
            let left = deadline.saturating_sub(sys::now());
            if seen & HOLDER != 0 {
                // Never rely on a wake: the process that should send it may be dead.
                sys::futex_wait(word, seen, left.min(LOOK) / 1_000, true);
            }
            let lock = take_free(word, me).or_else(|| self.steal(usage, seen, me));
            if lock.is_some() || left == 0 {
                return lock;
            }
        }
    }

    /// Takes the lock from the holder in `seen`, if that holder is dead and the word has not changed.
    fn steal<'a>(&self, usage: &'a UsageFile, seen: u32, me: u32) -> Option<RegionLock<'a>> {
        let holder = (seen & HOLDER).checked_sub(1)?;
        if holder + 1 == me || !self.holder_has_ended(usage, holder as usize) {
            return None;
        }
        let held = (seen & !(HOLDER | WAITERS)).wrapping_add(GENERATION) | me;
        let word = &usage.header.lock;
        word.compare_exchange(seen, held | WAITERS, Acquire, Relaxed).ok()?;
        usage.header.stolen.fetch_add(1, Relaxed);
        Some(RegionLock { word, held })
    }
}

fn take_free(word: &AtomicU32, me: u32) -> Option<RegionLock<'_>> {
    let seen = word.load(Relaxed);
    if seen & HOLDER != 0 {
        return None;
    }
    word.compare_exchange(seen, seen | me, Acquire, Relaxed).ok()?;
    Some(RegionLock { word, held: (seen | me) & !WAITERS })
}
