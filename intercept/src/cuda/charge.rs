//! Charges: taken before the driver allocates, and kept only if the driver did allocate.

use gpushare_region::ContextCost;

use super::queue::Holders;
use super::{Cuda, Here, SUCCESS, Status};
use crate::table::{Entry, Kind};

/// How often to retry after a limit was raised: other processes of the container may take the memory first.
const TRIES: usize = 64;

/// Bytes charged on one device; released on drop.
#[must_use = "dropping a charge gives it back"]
pub(super) struct Charge {
    here: Here,
    device: u8,
    bytes: u64,
    is_managed: bool,
}

/// Value of a linear entry's `extra` for managed memory.
const MANAGED: u64 = 1;

impl Charge {
    /// Charges `bytes`; `None`: they do not fit, even after this process has released its unused memory.
    pub(super) fn take(here: Here, device: u8, bytes: u64) -> Option<Self> {
        let charge = Self::take_uncounted(here, device, bytes);
        if charge.is_none() {
            here.book().count_refusal();
        }
        charge
    }

    /// Like [`Charge::take`], but does not count a refusal, because a fallback may work.
    pub(super) fn take_uncounted(here: Here, device: u8, bytes: u64) -> Option<Self> {
        let charge = Self::take_once(here, device, bytes);
        let may_fit = || bytes <= here.book().size(device.into()) && Cuda::give_back_unused(here);
        let charge =
            if charge.is_none() && may_fit() { Self::take_once(here, device, bytes) } else { charge };
        let charge = charge.or_else(|| Self::take_more(here, device, bytes));
        // If host memory can stand in, do not wait.
        let waits = || here.book().host_line().is_none() && here.book().wait_for_figure(device.into(), bytes);
        charge.or_else(|| waits().then(|| Self::take_once(here, device, bytes))?)
    }

    /// Charges managed memory, like [`Charge::take_uncounted`] for other memory.
    pub(super) fn take_managed(here: Here, device: u8, bytes: u64) -> Option<Self> {
        let mut charge = Self::take_uncounted(here, device, bytes)?;
        let book = here.book();
        charge.is_managed = true;
        book.settle_managed(device.into(), 0, bytes);
        // A supervisor does not count managed memory, so after a concurrent allocation each process has to
        // check again.
        let fits = !book.is_supervised(device.into()) || !book.is_over_limit(device.into());
        fits.then_some(charge)
    }

    /// Charges the cost of a process's first context: the most that was seen, or all that is left if a bare
    /// context fits. `None`: it does not fit.
    pub(super) fn for_context(here: Here, device: u8) -> Option<Self> {
        let book = here.book();
        let ContextCost { bare, most } = book.context_cost(device.into());
        if book.is_supervised(device.into()) {
            // RM decides whether it fits. But a limit that may grow does not grow by itself, and RM does not
            // count managed memory.
            let is_short = book.room(device.into()) < bare;
            if is_short && !book.ask_for_more(device.into(), bare) && book.managed(device.into()) > 0 {
                let charge = Self::take_once(here, device, bare); // this looks for dead processes
                if charge.is_none() {
                    book.count_refusal();
                }
                return charge;
            }
            book.add(device.into(), bare);
            return Some(Self { here, device, bytes: bare, is_managed: false });
        }
        let charge = Self::take_once(here, device, most).or_else(|| {
            let room = book.room(device.into()).min(most);
            (room >= bare).then(|| Self::take_once(here, device, room))?
        });
        // Do not wait for a figure here: contexts on other GPUs would wait, too.
        let charge = charge.or_else(|| Self::take_more(here, device, bare));
        if charge.is_none() {
            book.count_refusal();
        }
        charge
    }

    /// The number of bytes charged.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Like [`Charge::take_once`], after the node has raised a limit that may grow.
    #[cold]
    fn take_more(here: Here, device: u8, bytes: u64) -> Option<Self> {
        let more = || here.book().ask_for_more(device.into(), bytes);
        (0..TRIES).take_while(|_| more()).find_map(|_| Self::take_once(here, device, bytes))
    }

    /// Like [`Charge::take`], without searching for memory to release, and without counting a refusal.
    pub(super) fn take_once(here: Here, device: u8, bytes: u64) -> Option<Self> {
        // `then`, not `then_some`: a charge that is constructed and dropped would be released.
        here.book().reserve(usize::from(device), bytes).then(|| Self {
            here,
            device,
            bytes,
            is_managed: false,
        })
    }

    /// Keeps the charge without an owner, until the process ends or the caller releases the bytes.
    pub(super) fn keep(self) {
        core::mem::forget(self);
    }

    /// Keeps the charge for the object that `entry` describes; the entry's size is the charged amount.
    pub(super) fn keep_for(self, mut entry: Entry) {
        if self.is_managed {
            entry.extra = MANAGED;
        }
        // If there is no memory for the entry, the charge stays until the process ends.
        if let Ok(Some(old)) = self.here.state.table.put(entry) {
            // The driver gave the same name again, so a call that we did not see freed the old object.
            release(self.here, &old);
        }
        self.keep();
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let (book, device) = (self.here.book(), usize::from(self.device));
        book.release(device, self.bytes);
        if self.is_managed {
            book.settle_managed(device, self.bytes, 0);
        }
    }
}

/// Releases the charge for the object of `entry`.
pub(super) fn release(here: Here, entry: &Entry) {
    let device = line(here, entry).into();
    here.book().release(device, entry.size);
    here.book().settle_managed(device, managed(entry), 0);
}

/// Bytes of managed memory in the object of `entry`.
pub(super) fn managed(entry: &Entry) -> u64 {
    if entry.kind == Kind::Linear && entry.extra == MANAGED { entry.size } else { 0 }
}

/// The line of the books on which the object of `entry` is charged.
pub(super) fn line(here: Here, entry: &Entry) -> u8 {
    match entry.kind {
        // If the line is gone, its books are gone too.
        Kind::Spilled => here.book().host_line().and_then(|line| u8::try_from(line).ok()).unwrap_or(u8::MAX),
        _ => entry.device,
    }
}

/// Frees the object of `kind` and `key` with `call`, then passes its entry to `freed`. For an unknown object
/// it only calls the driver.
pub(super) fn free(
    here: Here,
    kind: Kind,
    key: u64,
    call: impl FnOnce() -> Status,
    freed: impl FnOnce(&Entry),
) -> Status {
    // Take the entry first: once freed, the driver may give the same name to another thread.
    let entry = here.state.table.take(kind, key);
    let status = call();
    match entry {
        Some(entry) if status == SUCCESS => freed(&entry),
        // The object still exists. If the entry cannot be put back, its charge stays until the process ends.
        Some(entry) => drop(here.state.table.put(entry)),
        None => {}
    }
    status
}
