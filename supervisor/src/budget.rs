//! The budget of a lease: its limit on each GPU, and the bytes that each of its supervisors has charged so
//! far.
//!
//! It lives in memory that all supervisors of the lease map. Each writes only its own slot, so one that dies
//! at any point corrupts no other's figure. A slot outlives its supervisor.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use crate::books::{Gpu, MOST_GPUS};
use crate::plan::{Plan, SharedPlan};

/// Most supervisors of a lease at a time: one per container.
pub const MOST_SLOTS: usize = 64;

/// One GPU of the lease. All zeros means no GPU.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Line {
    uuid: [AtomicU32; 4],
    /// Bytes that the lease may use.
    limit: AtomicU64,
}

/// The bytes that one supervisor has charged on each GPU, and the allocations that bypassed it.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Slot {
    charged: [AtomicU64; MOST_GPUS],
    /// How often RM counted memory that the supervisor did not allocate.
    races: AtomicU64,
    /// How many processes were killed for it.
    ended: AtomicU64,
}

/// Allocations that bypassed the supervisors of a lease since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// How often RM counted memory that the supervisor did not allocate: a program changed a call after it
    /// was let through.
    pub races: u64,
    /// How many processes were killed for it because the lease exceeded its limit.
    pub ended: u64,
}

/// Version of the page's layout. Raise it with every change to the layout. A running lease may have a page of
/// an earlier version.
const VERSION: u64 = 3;
/// First word of a page: "gpushare" combined with the layout version.
const LAYOUT: u64 = u64::from_ne_bytes(*b"gpushare") ^ VERSION;

/// The shared memory.
#[derive(Debug)]
#[repr(C)]
pub struct Page {
    layout: AtomicU64,
    lease: AtomicI64,
    /// 1 while the lease's programs are paused.
    paused: AtomicU64,
    lines: [Line; MOST_GPUS],
    /// How the lease shares each GPU's time; empty if its supervisors do not enforce sharing.
    plans: [SharedPlan; MOST_GPUS],
    slots: [Slot; MOST_SLOTS],
}

impl Page {
    /// Creates a page in this process's own memory.
    pub fn new() -> Box<Self> {
        let slots = std::array::from_fn(|_| Slot::default());
        let (layout, lease) = (AtomicU64::new(LAYOUT), AtomicI64::default());
        let paused = AtomicU64::default();
        Box::new(Self { layout, lease, paused, lines: Default::default(), plans: Default::default(), slots })
    }

    /// Returns the page as bytes, to be written to a file. No other process may change it meanwhile.
    #[allow(unsafe_code)]
    pub fn as_bytes(&self) -> &[u8] {
        let start: *const u8 = std::ptr::from_ref(self).cast();
        // SAFETY: the page has no padding, and lives as long as the slice.
        unsafe { std::slice::from_raw_parts(start, size_of::<Self>()) }
    }

    /// Returns the allocations that bypassed the supervisors.
    pub fn passed(&self) -> Passed {
        let sum = |of: fn(&Slot) -> &AtomicU64| {
            let all = self.slots.iter().map(|slot| of(slot).load(Ordering::Relaxed));
            all.fold(0, u64::saturating_add)
        };
        Passed { races: sum(|slot| &slot.races), ended: sum(|slot| &slot.ended) }
    }

    /// Returns the bytes that all supervisors have charged, per GPU.
    pub fn charged(&self) -> Vec<u64> {
        let all = |gpu: Gpu| self.slots.iter().map(move |slot| slot.charged[gpu].load(Ordering::SeqCst));
        (0..MOST_GPUS).map(|gpu| all(gpu).fold(0, u64::saturating_add)).collect()
    }

    /// Returns the bytes that line `gpu` grants.
    pub fn granted(&self, gpu: Gpu) -> u64 {
        self.lines[gpu].limit.load(Ordering::Acquire)
    }

    /// Returns the id of the lease.
    pub fn lease(&self) -> i64 {
        self.lease.load(Ordering::Relaxed)
    }

    /// Sets the id of the lease.
    pub fn set_lease(&self, lease: i64) {
        self.lease.store(lease, Ordering::Relaxed);
    }

    /// Whether the lease's programs are paused: none of their channels runs.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire) != 0
    }

    /// Pauses or resumes the lease's programs.
    pub fn pause(&self, is_paused: bool) {
        self.paused.store(is_paused.into(), Ordering::Release);
    }

    /// Returns how the lease shares the time of line `gpu`, or `None` if no supervisor enforces sharing.
    pub fn plan(&self, gpu: Gpu) -> Option<Plan> {
        self.plans[gpu].read()
    }

    /// Sets how the lease shares the time of line `gpu`.
    pub fn set_plan(&self, gpu: Gpu, plan: Option<&Plan>) {
        self.plans[gpu].write(plan);
    }

    /// Returns the UUID of line `gpu`, if the lease has a GPU there.
    pub fn uuid(&self, gpu: Gpu) -> Option<[u8; 16]> {
        let line = self.lines.get(gpu).filter(|line| line.limit.load(Ordering::Acquire) > 0)?;
        let mut uuid = [0; 16];
        for (bytes, word) in uuid.chunks_exact_mut(4).zip(&line.uuid) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        Some(uuid)
    }

    /// Revokes all grants.
    pub fn revoke(&self) {
        self.lines.iter().for_each(|line| line.limit.store(0, Ordering::Release));
    }

    /// Whether the page has the layout version of this build.
    pub fn is_known(&self) -> bool {
        self.layout.load(Ordering::Relaxed) == LAYOUT
    }

    /// Whether a slot has no charges.
    pub fn is_clean(&self, slot: usize) -> bool {
        self.slots[slot].charged.iter().all(|charged| charged.load(Ordering::SeqCst) == 0)
    }

    /// Grants `bytes` of the GPU with this UUID as line `gpu`. If more is already in use, further allocations
    /// fail.
    pub fn grant(&self, gpu: Gpu, uuid: &[u8; 16], bytes: u64) {
        let line = &self.lines[gpu];
        for (word, part) in line.uuid.iter().zip(uuid.chunks_exact(4)) {
            let part = part.first_chunk().map_or(0, |part| u32::from_ne_bytes(*part));
            word.store(part, Ordering::Relaxed);
        }
        line.limit.store(bytes, Ordering::Release);
    }
}

/// The budget as one supervisor sees it.
pub struct Budget<'p> {
    page: &'p Page,
    slot: usize,
    publish: Box<dyn Fn(Gpu, u64) + Send>,
}

impl<'p> Budget<'p> {
    /// Opens the budget for the supervisor that owns slot `slot`, below [`MOST_SLOTS`].
    pub fn new(page: &'p Page, slot: usize) -> Self {
        Self { page, slot, publish: Box::new(|_, _| ()) }
    }

    /// Calls `publish` after each change with the bytes that all supervisors have charged on a GPU.
    #[must_use]
    pub fn published_by(self, publish: impl Fn(Gpu, u64) + Send + 'static) -> Self {
        Self { publish: Box::new(publish), ..self }
    }

    fn publish(&self, gpu: Gpu) {
        // If two supervisors publish at once, the last one must publish the sum of both.
        let mut charged = self.charged(gpu);
        loop {
            (self.publish)(gpu, charged);
            let now = self.charged(gpu);
            if now == charged {
                return;
            }
            charged = now;
        }
    }

    /// Returns the index of the GPU with this UUID, if the lease has it.
    pub fn gpu(&self, uuid: &[u8; 16]) -> Option<Gpu> {
        (0..MOST_GPUS).find(|gpu| self.page.uuid(*gpu).as_ref() == Some(uuid))
    }

    /// Lists the GPUs of the lease.
    pub fn gpus(&self) -> impl Iterator<Item = Gpu> + use<> {
        let granted: Vec<Gpu> = (0..MOST_GPUS).filter(|gpu| self.limit(*gpu) > 0).collect();
        granted.into_iter()
    }

    /// Returns the bytes that the lease may use on a GPU.
    pub fn limit(&self, gpu: Gpu) -> u64 {
        self.page.lines[gpu].limit.load(Ordering::Acquire)
    }

    /// Returns the bytes that all supervisors have charged on a GPU.
    pub fn charged(&self, gpu: Gpu) -> u64 {
        let slots = self.page.slots.iter().map(|slot| slot.charged[gpu].load(Ordering::SeqCst));
        slots.fold(0, u64::saturating_add)
    }

    /// Charges `bytes` more on a GPU if they fit below the limit. Two supervisors that charge at once may
    /// each see the other's attempt and back off, so each retries a few times.
    pub fn raise(&self, gpu: Gpu, bytes: u64) -> bool {
        const TRIES: usize = 8;
        let own = &self.page.slots[self.slot].charged[gpu];
        let before = own.load(Ordering::Relaxed);
        for attempt in 1..=TRIES {
            // A request that cannot fit must not disturb other supervisors.
            if self.charged(gpu).saturating_add(bytes) > self.limit(gpu) {
                return false;
            }
            own.store(before.saturating_add(bytes), Ordering::SeqCst);
            if self.charged(gpu) <= self.limit(gpu) {
                self.publish(gpu);
                return true;
            }
            // Another supervisor's attempt was in the way, or appeared meanwhile.
            own.store(before, Ordering::SeqCst);
            self.publish(gpu);
            for _ in 0..attempt * (self.slot + 1) * 16 {
                std::hint::spin_loop();
            }
        }
        false
    }

    /// Returns the bytes that this supervisor has charged on a GPU.
    pub fn own(&self, gpu: Gpu) -> u64 {
        self.page.slots[self.slot].charged[gpu].load(Ordering::SeqCst)
    }

    /// Records that a call bypassed this supervisor, and how many processes were killed for it.
    pub fn note_race(&self, ended: u64) {
        let slot = &self.page.slots[self.slot];
        let _ = slot.races.fetch_add(1, Ordering::Relaxed);
        let _ = slot.ended.fetch_add(ended, Ordering::Relaxed);
    }

    /// Sets this supervisor's charge on a GPU, even above the limit, because the memory is already in use.
    pub fn set(&self, gpu: Gpu, bytes: u64) {
        self.page.slots[self.slot].charged[gpu].store(bytes, Ordering::SeqCst);
        self.publish(gpu);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supervisors_of_a_lease_share_its_limit() {
        let page = Page::new();
        page.grant(0, &[7; 16], 100);
        let (one, two) = (Budget::new(&page, 0), Budget::new(&page, 1));
        assert_eq!((one.gpu(&[7; 16]), one.gpu(&[0; 16]), one.gpu(&[8; 16])), (Some(0), None, None));
        assert!(one.raise(0, 60));
        assert!(!two.raise(0, 41));
        assert!(two.raise(0, 40));
        assert!(!one.raise(0, 1));
        one.set(0, 0);
        assert!(one.raise(0, 60));
        page.grant(0, &[7; 16], 50);
        assert!(!one.raise(0, 1), "a limit below what is in use allows nothing more");
        assert_eq!(one.charged(0), 100);
        assert_eq!(page.passed(), Passed::default());
        one.note_race(2);
        two.note_race(0);
        assert_eq!(page.passed(), Passed { races: 2, ended: 2 });
    }

    #[test]
    fn those_that_charge_at_once_never_pass_the_limit() {
        let page = Page::new();
        page.grant(0, &[7; 16], 1000);
        std::thread::scope(|scope| {
            for slot in 0..8 {
                let budget = Budget::new(&page, slot);
                scope.spawn(move || (0..500).filter(|_| budget.raise(0, 1)).count());
            }
        });
        let last = Budget::new(&page, 8);
        assert!(last.charged(0) <= 1000);
        while last.raise(0, 1) {}
        assert_eq!(last.charged(0), 1000);
    }
}
