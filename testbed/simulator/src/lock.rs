//! Locks between processes that may be killed at any instruction.
//!
//! A lock word names its holder's slot and that slot's generation. A waiter takes the lock from a holder
//! whose byte lock is gone. This is safe because the guarded data is always consistent: sums are computed and
//! never stored.

use std::sync::atomic::{AtomicU64, Ordering};

/// The holder of a lock word, packed as generation (upper 32 bits) and slot + 1 (lower 32 bits); never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Index of the process's slot in the state.
    pub slot: u32,
    /// Generation of the slot when the process claimed it.
    pub generation: u32,
}

impl Owner {
    fn word(self) -> u64 {
        (u64::from(self.generation) << 32) | (u64::from(self.slot) + 1)
    }

    fn of(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        let slot = u32::from_le_bytes([a, b, c, d]).saturating_sub(1);
        Self { slot, generation: u32::from_le_bytes([e, f, g, h]) }
    }
}

/// Holds a lock word until dropped.
pub struct Guard<'word> {
    word: &'word AtomicU64,
    mine: u64,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // This fails only if a waiter considered this process dead and took the word.
        let _ = self.word.compare_exchange(self.mine, 0, Ordering::Release, Ordering::Relaxed);
    }
}

/// Takes `word` for `me`, waiting as long as another process holds it. `dead` returns whether the process of
/// another owner is gone.
pub fn take<'word>(word: &'word AtomicU64, me: Owner, dead: impl Fn(Owner) -> bool) -> Guard<'word> {
    let mine = me.word();
    let mut turns = 0_u32;
    loop {
        match word.compare_exchange_weak(0, mine, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return Guard { word, mine },
            Err(0) => {}
            Err(held) => {
                turns += 1;
                if turns < 64 {
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
                }
                let steal = turns.is_multiple_of(256) && held != mine && dead(Owner::of(held));
                if steal && word.compare_exchange(held, mine, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return Guard { word, mine };
                }
            }
        }
    }
}
