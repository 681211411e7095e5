//! The budget of a lease: what it may hold on each GPU, and what each of its supervisors has charged so far.
//!
//! It stands in memory that all supervisors of the lease map. Each writes its own slot alone, so that one
//! that dies in the middle of anything leaves no other's figure wrong. A slot outlives its supervisor.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use crate::books::{Gpu, MOST_GPUS};
use crate::plan::{Plan, SharedPlan};

/// Most supervisors of a lease at a time: its containers.
pub const MOST_SLOTS: usize = 64;

/// One GPU of the lease. Zeros are no GPU.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Line {
    uuid: [AtomicU32; 4],
    /// Bytes that the lease may hold.
    limit: AtomicU64,
}

/// What one supervisor has charged, in bytes of each GPU, and what went past it.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Slot {
    charged: [AtomicU64; MOST_GPUS],
    /// How often RM counted memory that was never performed.
    races: AtomicU64,
    /// How many processes were ended for it.
    ended: AtomicU64,
}

/// What went past the supervisors of a lease since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// How often RM counted memory that was never performed: a call was changed while it was let through.
    pub races: u64,
    /// How many processes were ended for it, since the lease was above its limit then.
    pub ended: u64,
}

/// Number of the page's layout: raised with every change to it. The page of a lease that stands may be an
/// earlier version's.
const VERSION: u64 = 3;
/// What a page begins with: "gpushare" with the number of its layout.
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
    /// How the lease shares each GPU's time; none where its supervisors do not hold that.
    plans: [SharedPlan; MOST_GPUS],
    slots: [Slot; MOST_SLOTS],
}

impl Page {
    /// A page in this process's own memory.
    pub fn new() -> Box<Self> {
        let slots = std::array::from_fn(|_| Slot::default());
        let (layout, lease) = (AtomicU64::new(LAYOUT), AtomicI64::default());
        let paused = AtomicU64::default();
        Box::new(Self { layout, lease, paused, lines: Default::default(), plans: Default::default(), slots })
    }

    /// The page as bytes, for a file. Nobody else may change it meanwhile.
    #[allow(unsafe_code)]
    pub fn as_bytes(&self) -> &[u8] {
        let start: *const u8 = std::ptr::from_ref(self).cast();
        // SAFETY: the page has no padding, and lives as long as the slice.
        unsafe { std::slice::from_raw_parts(start, size_of::<Self>()) }
    }

    /// What went past the supervisors.
    pub fn passed(&self) -> Passed {
        let sum = |of: fn(&Slot) -> &AtomicU64| {
            let all = self.slots.iter().map(|slot| of(slot).load(Ordering::Relaxed));
            all.fold(0, u64::saturating_add)
        };
        Passed { races: sum(|slot| &slot.races), ended: sum(|slot| &slot.ended) }
    }

    /// What all supervisors have charged, in bytes of each GPU.
    pub fn charged(&self) -> Vec<u64> {
        let all = |gpu: Gpu| self.slots.iter().map(move |slot| slot.charged[gpu].load(Ordering::SeqCst));
        (0..MOST_GPUS).map(|gpu| all(gpu).fold(0, u64::saturating_add)).collect()
    }

    /// Bytes that line `gpu` grants.
    pub fn granted(&self, gpu: Gpu) -> u64 {
        self.lines[gpu].limit.load(Ordering::Acquire)
    }

    /// Which lease it is of.
    pub fn lease(&self) -> i64 {
        self.lease.load(Ordering::Relaxed)
    }

    /// Says which lease it is of.
    pub fn set_lease(&self, lease: i64) {
        self.lease.store(lease, Ordering::Relaxed);
    }

    /// Whether the lease's programs are paused: none of their channels runs.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire) != 0
    }

    /// Pauses the lease's programs, or lets them run again.
    pub fn pause(&self, is_paused: bool) {
        self.paused.store(is_paused.into(), Ordering::Release);
    }

    /// How the lease shares the time of line `gpu`; `None` where no supervisor holds that.
    pub fn plan(&self, gpu: Gpu) -> Option<Plan> {
        self.plans[gpu].read()
    }

    /// Says how the lease shares the time of line `gpu`.
    pub fn set_plan(&self, gpu: Gpu, plan: Option<&Plan>) {
        self.plans[gpu].write(plan);
    }

    /// The UUID of line `gpu`, if the lease has one there.
    pub fn uuid(&self, gpu: Gpu) -> Option<[u8; 16]> {
        let line = self.lines.get(gpu).filter(|line| line.limit.load(Ordering::Acquire) > 0)?;
        let mut uuid = [0; 16];
        for (bytes, word) in uuid.chunks_exact_mut(4).zip(&line.uuid) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        Some(uuid)
    }

    /// Grants nothing any more.
    pub fn revoke(&self) {
        self.lines.iter().for_each(|line| line.limit.store(0, Ordering::Release));
    }

    /// Whether it has the layout that is compiled here.
    pub fn is_known(&self) -> bool {
        self.layout.load(Ordering::Relaxed) == LAYOUT
    }

    /// Whether nothing is charged in a slot.
    pub fn is_clean(&self, slot: usize) -> bool {
        self.slots[slot].charged.iter().all(|charged| charged.load(Ordering::SeqCst) == 0)
    }

    /// Grants `bytes` of the GPU with this UUID as line `gpu`. Bytes below what is in use mean that nothing
    /// more is allocated.
    pub fn grant(&self, gpu: Gpu, uuid: &[u8; 16], bytes: u64) {
        let line = &self.lines[gpu];
        for (word, part) in line.uuid.iter().zip(uuid.chunks_exact(4)) {
            let part = part.first_chunk().map_or(0, |part| u32::from_ne_bytes(*part));
            word.store(part, Ordering::Relaxed);
        }
        line.limit.store(bytes, Ordering::Release);
    }
}

/// The budget, as one supervisor sees it.
pub struct Budget<'p> {
    page: &'p Page,
    slot: usize,
    publish: Box<dyn Fn(Gpu, u64) + Send>,
}

impl<'p> Budget<'p> {
    /// The budget of the supervisor that owns slot `slot`, below [`MOST_SLOTS`].
    pub fn new(page: &'p Page, slot: usize) -> Self {
        Self { page, slot, publish: Box::new(|_, _| ()) }
    }

    /// The same, which tells `publish` after each change what all supervisors have charged on a GPU, in
    /// bytes.
    #[must_use]
    pub fn published_by(self, publish: impl Fn(Gpu, u64) + Send + 'static) -> Self {
        Self { publish: Box::new(publish), ..self }
    }

    fn publish(&self, gpu: Gpu) {
        // Of two that publish at once, the last has to tell the sum of both.
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

    /// The GPU with this UUID, if the lease has it.
    pub fn gpu(&self, uuid: &[u8; 16]) -> Option<Gpu> {
        (0..MOST_GPUS).find(|gpu| self.page.uuid(*gpu).as_ref() == Some(uuid))
    }

    /// The GPUs of the lease.
    pub fn gpus(&self) -> impl Iterator<Item = Gpu> + use<> {
        let granted: Vec<Gpu> = (0..MOST_GPUS).filter(|gpu| self.limit(*gpu) > 0).collect();
        granted.into_iter()
    }

    /// Bytes that the lease may hold on a GPU.
    pub fn limit(&self, gpu: Gpu) -> u64 {
        self.page.lines[gpu].limit.load(Ordering::Acquire)
    }

    /// Bytes that all supervisors have charged on a GPU.
    pub fn charged(&self, gpu: Gpu) -> u64 {
        let slots = self.page.slots.iter().map(|slot| slot.charged[gpu].load(Ordering::SeqCst));
        slots.fold(0, u64::saturating_add)
    }

    /// Charges `bytes` more on a GPU, if the limit leaves as many. Two that charge at once may each see the
    /// other's attempt and give way, so each tries again for a while.
    pub fn raise(&self, gpu: Gpu, bytes: u64) -> bool {
        const TRIES: usize = 8;
        let own = &self.page.slots[self.slot].charged[gpu];
        let before = own.load(Ordering::Relaxed);
        for attempt in 1..=TRIES {
            // A request that cannot fit disturbs nobody.
            if self.charged(gpu).saturating_add(bytes) > self.limit(gpu) {
                return false;
            }
            own.store(before.saturating_add(bytes), Ordering::SeqCst);
            if self.charged(gpu) <= self.limit(gpu) {
                self.publish(gpu);
                return true;
            }
            // Somebody's attempt was in the way, or went there meanwhile.
            own.store(before, Ordering::SeqCst);
            self.publish(gpu);
            for _ in 0..attempt * (self.slot + 1) * 16 {
                std::hint::spin_loop();
            }
        }
        false
    }

    /// Bytes that this supervisor has charged on a GPU.
    pub fn own(&self, gpu: Gpu) -> u64 {
        self.page.slots[self.slot].charged[gpu].load(Ordering::SeqCst)
    }

    /// Notes that a call went past this supervisor, for which so many processes were ended.
    pub fn note_race(&self, ended: u64) {
        let slot = &self.page.slots[self.slot];
        let _ = slot.races.fetch_add(1, Ordering::Relaxed);
        let _ = slot.ended.fetch_add(ended, Ordering::Relaxed);
    }

    /// Sets what this supervisor has charged on a GPU, above the limit too: what is in use is in use.
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
