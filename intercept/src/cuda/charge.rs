//! Charges: one is taken before the driver allocates, and kept only if the driver did allocate.

use super::queue::Holders;
use super::{Cuda, Here};
use crate::table::Entry;

/// Bytes charged on one device; given back on drop.
#[must_use = "dropping a charge gives it back"]
pub(super) struct Charge {
    here: Here,
    device: u8,
    bytes: u64,
}

impl Charge {
    /// Charges `bytes`; `None`: they do not fit, even after this process gave back what it holds unused.
    pub(super) fn take(here: Here, device: u8, bytes: u64) -> Option<Self> {
        let charge = Self::take_once(here, device, bytes);
        if charge.is_some() {
            return charge;
        }
        if bytes <= here.book().limit(usize::from(device)) && Cuda::give_back_unused(here) {
            let charge = Self::take_once(here, device, bytes);
            if charge.is_some() {
                return charge;
            }
        }
        here.book().count_refusal();
        None
    }

    /// As [`Charge::take`], without looking for memory to give back, and without counting a refusal.
    pub(super) fn take_once(here: Here, device: u8, bytes: u64) -> Option<Self> {
        // `then`, not `then_some`: a charge that is built is given back.
        here.book().reserve(usize::from(device), bytes).then(|| Self { here, device, bytes })
    }

    /// Keeps the charge without an owner, until the process ends or the caller releases the bytes.
    pub(super) fn keep(self) {
        core::mem::forget(self);
    }

    /// Keeps the charge for the object that `entry` describes; the entry's size is what was charged.
    pub(super) fn keep_for(self, entry: Entry) {
        // No memory for the entry: the charge stays until the process ends.
        if let Ok(Some(old)) = self.here.state.table.put(entry) {
            // The driver gave the same name again, so the old object was freed by a call that we do not see.
            self.here.book().release(usize::from(old.device), old.size);
        }
        self.keep();
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.here.book().release(usize::from(self.device), self.bytes);
    }
}
