//! This process's slot in the usage file, and the slots of dead processes.
//!
//! A slot belongs to the holder of the record lock on its byte. A claim takes these steps: byte lock,
//! counters to zero, identity, state, bit. A reclaim takes these steps, under the dead slot's byte lock:
//! state, bit, counters. A process that closed all its descriptors has lost its lock but not its memory, so a
//! free byte alone does not prove a death. If nothing else can be known, a free byte counts as proof. A
//! process that was wrongly considered dead finds its bit or its generation changed, and moves to another
//! slot.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use gpushare_region::{SLOT_FREE, SLOT_LIVE, SLOTS, UsageFile, lock_byte};

use crate::book::{Book, Held};
use crate::driver::mapped;
use crate::identity::Who;
use crate::sys::{self, ByteLock, Fd};

/// The known state of a slot's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// It holds its lock, or nothing can be known about it.
    Lives,
    /// It holds no lock and still runs: it closed its descriptors, or the kernel is ending it.
    Unlocked,
    /// It has ended, and the kernel has closed its device files.
    Ended,
}

impl Book {
    /// This process's slot, if it still counts.
    pub(crate) fn own_slot(&self, usage: &UsageFile) -> Option<usize> {
        let slot = self.slot.load(Relaxed).checked_sub(1)? as usize;
        // Read the bit first: a process that sets it again has incremented the generation before.
        let own = usage.is_live(slot)
            && usage.owners.get(slot)?.generation.load(Relaxed) == self.generation.load(Relaxed);
        own.then_some(slot)
    }

    /// Claims a free slot and enters all memory that this process holds. `None`: all slots are taken, or
    /// there is no usage file to lock. The caller holds the lock of `held` and has found that this process
    /// has no slot.
    #[cold]
    pub(crate) fn claim_slot(&self, usage: &UsageFile, held: &Held) -> Option<usize> {
        self.slot.store(0, Relaxed);
        for slot in (0..SLOTS).filter(|slot| usage.is_live(*slot)) {
            let same = |who: &Who| (who.pid, who.start_time) == (self.me.pid, self.me.start_time);
            if owner(usage, slot).is_some_and(|who| same(&who) && who.has_ended(&self.me) == Some(true)) {
                self.reclaim(usage, slot); // this process before an exec; no other process can detect this
            }
        }
        let slot = self.claim_free(usage, held).or_else(|| {
            self.sweep(usage);
            self.claim_free(usage, held)
        });
        if slot.is_none() {
            usage.header.no_slot.fetch_add(1, Relaxed);
        }
        slot
    }

    fn claim_free(&self, usage: &UsageFile, held: &Held) -> Option<usize> {
        let _claim = self.claim.lock();
        let fd = self.descriptor()?;
        let free = (0..SLOTS).filter(|slot| !usage.is_live(*slot));
        for slot in free {
            if sys::lock_byte(fd, lock_byte(slot)) != Ok(true) {
                continue;
            }
            if usage.is_live(slot) {
                sys::unlock_byte(fd, lock_byte(slot)); // another process claimed it since we checked
                continue;
            }
            self.enter(usage, slot, held);
            self.slot.store(u32::try_from(slot + 1).ok()?, Relaxed);
            return Some(slot);
        }
        None
    }

    /// Takes `slot` for this process. The caller holds its byte lock.
    fn enter(&self, usage: &UsageFile, slot: usize, held: &Held) {
        clear(usage, slot);
        let parts = held.bytes.into_iter().zip(held.context_bytes).zip(held.managed_bytes);
        for (lines, ((bytes, context_bytes), managed_bytes)) in usage.lines.iter().zip(parts) {
            let Some(line) = lines.get(slot) else { return };
            line.bytes.store(bytes, Relaxed);
            line.context_bytes.store(context_bytes, Relaxed);
            line.managed_bytes.store(managed_bytes, Relaxed);
        }
        let Some(owner) = usage.owners.get(slot) else { return };
        owner.pid.store(self.me.pid, Relaxed);
        owner.start_time.store(self.me.start_time, Relaxed);
        owner.pid_namespace.store(self.me.namespace, Relaxed);
        owner.image.store(self.me.image, Relaxed);
        let (limits, driver) = (self.limits.map_or(0, |limits| core::ptr::from_ref(limits).addr()), mapped());
        for (word, address) in owner.mapped.iter().zip([limits, driver.start, driver.end]) {
            word.store(address as u64, Relaxed);
        }
        self.generation.store(owner.generation.fetch_add(1, Relaxed).wrapping_add(1), Relaxed);
        owner.state.store(SLOT_LIVE, SeqCst);
        if let Some(word) = usage.header.live.get(slot / 64) {
            word.fetch_or(1 << (slot % 64), SeqCst);
        }
    }

    /// Reclaims the slots of dead processes. True: some process is about to end and still counts.
    pub(crate) fn sweep(&self, usage: &UsageFile) -> bool {
        self.hold_own_byte(usage);
        let own = self.own_slot(usage);
        let mut dying = false;
        for slot in (0..SLOTS).filter(|slot| Some(*slot) != own && usage.is_live(*slot)) {
            match self.life(usage, slot) {
                Life::Lives => {}
                Life::Unlocked => dying = true,
                Life::Ended => self.reclaim(usage, slot),
            }
        }
        dying
    }

    fn reclaim(&self, usage: &UsageFile, slot: usize) {
        let _claim = self.claim.lock();
        let Some(fd) = self.descriptor() else { return };
        if sys::lock_byte(fd, lock_byte(slot)) != Ok(true) {
            return; // another process is reclaiming it
        }
        // The slot may have been reclaimed and claimed again before we locked its byte.
        if usage.is_live(slot) && self.life(usage, slot) == Life::Ended {
            if let Some(owner) = usage.owners.get(slot) {
                owner.state.store(SLOT_FREE, SeqCst);
            }
            if let Some(word) = usage.header.live.get(slot / 64) {
                word.fetch_and(!(1 << (slot % 64)), SeqCst);
            }
            clear(usage, slot);
            usage.header.reclaimed.fetch_add(1, Relaxed);
        }
        sys::unlock_byte(fd, lock_byte(slot));
    }

    /// Whether the holder of the region lock, a slot of another process, has died.
    pub(crate) fn holder_has_ended(&self, usage: &UsageFile, slot: usize) -> bool {
        !usage.is_live(slot) || self.life(usage, slot) == Life::Ended
    }

    /// Calls `each` with pid and held bytes of every living process in this pid namespace that holds memory
    /// on `device`.
    pub fn each_living(&self, device: usize, mut each: impl FnMut(u32, u64)) {
        self.living(device, |who, bytes| {
            if who.is_counted_with(&self.me) {
                each(who.pid, bytes);
            }
        });
    }

    /// Like [`Book::each_living`], for the processes of all pid namespaces.
    fn living(&self, device: usize, mut each: impl FnMut(Who, u64)) {
        let Some(usage) = self.usage else { return };
        for slot in (0..SLOTS).filter(|slot| usage.is_live(*slot)) {
            let bytes = usage.line(device, slot).map_or(0, |line| line.bytes.load(SeqCst));
            if bytes > 0 && self.life(usage, slot) != Life::Ended {
                each(owner(usage, slot).unwrap_or_default(), bytes);
            }
        }
    }

    /// Memory that living processes hold on `device`, in bytes. It queries the kernel for each process, so it
    /// is only for callers that are slow anyway.
    pub fn held_by_living(&self, device: usize) -> u64 {
        let mut sum = 0u64;
        self.living(device, |_, bytes| sum = sum.saturating_add(bytes));
        sum
    }

    /// Whether a process of this pid namespace that holds a slot has this pid.
    pub fn is_own_pid(&self, pid: u32) -> bool {
        let Some(usage) = self.usage else { return false };
        let live = (0..SLOTS).filter(|slot| usage.is_live(*slot));
        live.filter_map(|slot| owner(usage, slot)).any(|who| who.pid == pid && who.is_counted_with(&self.me))
    }

    fn life(&self, usage: &UsageFile, slot: usize) -> Life {
        if owner(usage, slot) == Some(self.me) {
            return Life::Lives; // another copy of this library in this process, whose byte we cannot test
        }
        let lock = self.descriptor().map_or(ByteLock::Unknown, |fd| sys::test_byte(fd, lock_byte(slot)));
        if let ByteLock::Held(_) = lock {
            return Life::Lives;
        }
        let Some(owner) = owner(usage, slot) else { return Life::Lives };
        match (owner.has_ended(&self.me), lock) {
            (Some(true), _) | (None, ByteLock::Free) => Life::Ended,
            (Some(false), _) => Life::Unlocked,
            (None, _) => Life::Lives,
        }
    }

    /// The usage file's descriptor, reopened if the program closed it or replaced it with another file.
    fn descriptor(&self) -> Option<i32> {
        let same = |fd| sys::file_id(fd).is_ok_and(|id| self.is_usage(&id));
        let fd = self.fd.load(Relaxed);
        if same(fd) {
            return Some(fd);
        }
        let again = Fd::open(self.usage_path?, true).ok()?.leak();
        if !same(again) {
            return None;
        }
        self.fd.store(again, Relaxed);
        Some(again)
    }

    fn is_usage(&self, id: &sys::FileId) -> bool {
        self.file.is_some_and(|file| file.device == id.device && file.inode == id.inode)
    }

    /// Locks this process's byte again: the program may have closed the descriptor, which drops the lock.
    fn hold_own_byte(&self, usage: &UsageFile) {
        let _claim = self.claim.lock();
        let Some(slot) = self.own_slot(usage) else { return };
        let Some(fd) = self.descriptor() else { return };
        // Taking a lock that this process already holds changes nothing. If another process holds it, that
        // process is reclaiming the slot, and the next charge moves to a new slot.
        if sys::lock_byte(fd, lock_byte(slot)) == Ok(true) && self.own_slot(usage).is_none() {
            sys::unlock_byte(fd, lock_byte(slot)); // reclaimed in the meantime, so any process may take it
        }
    }
}

fn owner(usage: &UsageFile, slot: usize) -> Option<Who> {
    usage.owners.get(slot).map(|owner| Who {
        pid: owner.pid.load(Relaxed),
        start_time: owner.start_time.load(Relaxed),
        namespace: owner.pid_namespace.load(Relaxed),
        image: owner.image.load(Relaxed),
    })
}

fn clear(usage: &UsageFile, slot: usize) {
    for line in usage.lines.iter().filter_map(|lines| lines.get(slot)) {
        line.bytes.store(0, Relaxed);
        line.context_bytes.store(0, Relaxed);
        line.managed_bytes.store(0, Relaxed);
        line.launches.store(0, Relaxed);
        line.gpu_nanoseconds.store(0, Relaxed);
    }
}
