//! The books of a GPU's memory: what each process holds, never more in sum than the GPU has.

use std::sync::atomic::Ordering;

use crate::session::Session;
use crate::state::{Gpu, SLOTS};

/// Allocations below this size are rounded to [`SMALL`], others to [`LARGE`].
pub const SMALL_LIMIT: u64 = 1 << 20;
/// Rounding of small allocations, bytes.
pub const SMALL: u64 = 512;
/// Rounding of all others, bytes: the device's page.
pub const LARGE: u64 = 2 << 20;

/// What an allocation of `bytes` takes from the GPU; `None` beyond 64 bits.
#[must_use]
pub fn rounded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(if bytes < SMALL_LIMIT { SMALL } else { LARGE })
}

impl Gpu {
    /// Bytes held by the first `slots` slots.
    #[must_use]
    pub fn used(&self, slots: usize) -> u64 {
        self.bytes[..slots.min(SLOTS)].iter().map(|cell| cell.load(Ordering::Acquire)).sum()
    }

    fn try_take(&self, session: &Session, bytes: u64) -> bool {
        let _guard = session.lock(&self.memory_lock);
        let used = self.used(session.state().used_slots());
        let fits = used.checked_add(bytes).is_some_and(|sum| sum <= self.memory.load(Ordering::Relaxed));
        if fits {
            self.bytes[session.index()].fetch_add(bytes, Ordering::AcqRel);
        }
        fits
    }

    /// Takes `bytes` for `session`'s process; false when the GPU has less.
    #[must_use]
    pub fn take(&self, session: &Session, bytes: u64) -> bool {
        if self.try_take(session, bytes) {
            return true;
        }
        session.sweep();
        self.try_take(session, bytes)
    }

    /// Gives `bytes` of `session`'s process back.
    pub fn give(&self, session: &Session, bytes: u64) {
        let cell = &self.bytes[session.index()];
        let _ =
            cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, |held| Some(held.saturating_sub(bytes)));
    }
}
