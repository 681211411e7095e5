//! The books of a GPU's memory: the bytes that each process holds. Their sum never exceeds the GPU's memory.

use std::sync::atomic::Ordering;

use crate::physics::UNUSABLE;
use crate::session::Session;
use crate::state::{Gpu, SLOTS};

/// Allocations below this size in bytes are rounded up to [`SMALL`], others to [`LARGE`].
pub const SMALL_LIMIT: u64 = 1 << 20;
/// Unit to which small allocations are rounded up, bytes.
pub const SMALL: u64 = 512;
/// Unit to which all other allocations are rounded up, bytes: the device's page size.
pub const LARGE: u64 = 2 << 20;

/// Returns the bytes that an allocation of `bytes` takes from the GPU; `None` if they exceed 64 bits.
#[must_use]
pub fn rounded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(if bytes < SMALL_LIMIT { SMALL } else { LARGE })
}

impl Gpu {
    /// Returns the memory that CUDA reports, in bytes: the part that programs can allocate, and a remainder
    /// that none can.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.memory.load(Ordering::Relaxed).saturating_add(UNUSABLE)
    }

    /// Returns the sum of the bytes held by the first `slots` slots.
    #[must_use]
    pub fn used(&self, slots: usize) -> u64 {
        self.bytes[..slots.min(SLOTS)].iter().map(|cell| cell.load(Ordering::Acquire)).sum()
    }

    fn try_take(&self, session: &Session, bytes: u64) -> bool {
        let _guard = session.lock(&self.memory_lock);
        let used = self.used(session.state().used_slots());
        let fits = used.checked_add(bytes).is_some_and(|sum| sum <= self.memory.load(Ordering::Relaxed));
        let left = self.left_to_cgroup(session.state(), session.cgroup());
        let fits = fits && left.is_none_or(|(left, _)| bytes <= left);
        if fits {
            self.bytes[session.index()].fetch_add(bytes, Ordering::AcqRel);
        }
        fits
    }

    /// Takes `bytes` for `session`'s process. Returns false if the GPU or the cgroup's limit has less left,
    /// even after reclaiming the memory of dead processes.
    #[must_use]
    pub fn take(&self, session: &Session, bytes: u64) -> bool {
        if self.try_take(session, bytes) {
            return true;
        }
        session.sweep();
        self.try_take(session, bytes)
    }

    /// Releases `bytes` of `session`'s process.
    pub fn give(&self, session: &Session, bytes: u64) {
        let cell = &self.bytes[session.index()];
        let _ =
            cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, |held| Some(held.saturating_sub(bytes)));
    }
}
