//! The container's books: the limits, and the sum of the memory that all processes hold. Memory is reserved
//! before the driver allocates it, and released after the driver has freed it.
//!
//! A reservation adds to this process's own line and then sums all lines. Among racing reservations, the last
//! one sees all others, so the granted sum cannot exceed the limit, and a stopped process blocks no other.
//! Reservations near the limit may refuse each other. A refused reservation is therefore retried under the
//! region lock, after dead slots have been reclaimed.

use core::ffi::CStr;
use core::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use gpushare_region::{DeviceLine, LIMITS_LEN, LimitsFile, MAX_DEVICES, SLOTS, USAGE_LEN, UsageFile};

use crate::identity::Who;
use crate::mutex::Mutex;
use crate::sys::{self, Fd, FileId};

/// How long an allocation may wait for a dying process and for the region lock, in nanoseconds. Together with
/// the time of one check and with late timers this makes ten milliseconds.
const PATIENCE: u64 = 9_000_000;
/// Longest sleep between two checks, in nanoseconds.
const NAP: u64 = 1_000_000;
/// How long an allocation may wait for the node to raise a limit that may grow, in nanoseconds. If the meter
/// runs, it answers within a few milliseconds, but it may have to notice the container first.
const LENIENCE: u64 = 300_000_000;

const ANOTHER_VERSION: &[u8] =
    b"gpushare: the limits of this container are of another version than its libraries, so it gets no \
GPU memory: start it anew\n";

/// The books as one process sees them. All zero bytes are the books of a container with no grant.
#[derive(Default)]
#[repr(C)]
pub struct Book {
    pub(crate) limits: Option<&'static LimitsFile>,
    pub(crate) usage: Option<&'static UsageFile>,
    pub(crate) usage_path: Option<&'static CStr>,
    /// The usage file's descriptor. Never closed: that would drop this process's record locks.
    pub(crate) fd: AtomicI32,
    pub(crate) file: Option<FileId>,
    pub(crate) me: Who,
    /// This process's slot + 1; 0: it has none.
    pub(crate) slot: AtomicU32,
    /// Generation of the slot when this process claimed it.
    pub(crate) generation: AtomicU64,
    /// Locked while this process claims or reclaims a slot: record locks do not exclude its own threads.
    /// Taken after `held`.
    pub(crate) claim: Mutex<()>,
    held: Mutex<Held>,
    /// The last sum seen, by device. Only a hint whether there is room.
    last_sum: [AtomicU64; MAX_DEVICES],
    /// The bytes charged for contexts when an allocation last waited for a figure, by device.
    pub(crate) waited_for: [AtomicU64; MAX_DEVICES],
    last_sweep: AtomicU64,
}

/// Memory that this process holds, by device, independent of its slot. A process that was wrongly considered
/// dead refills its new slot from it.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Held {
    pub(crate) bytes: [u64; MAX_DEVICES],
    pub(crate) context_bytes: [u64; MAX_DEVICES],
    pub(crate) managed_bytes: [u64; MAX_DEVICES],
}

/// Selects one of the figures of [`Held`] and of a line.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    All,
    Contexts,
    Managed,
}

impl Part {
    fn of(self, line: &DeviceLine) -> &AtomicU64 {
        match self {
            Self::All => &line.bytes,
            Self::Contexts => &line.context_bytes,
            Self::Managed => &line.managed_bytes,
        }
    }
}

impl Held {
    fn part(&mut self, part: Part) -> &mut [u64; MAX_DEVICES] {
        match part {
            Part::All => &mut self.bytes,
            Part::Contexts => &mut self.context_bytes,
            Part::Managed => &mut self.managed_bytes,
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl Book {
    /// Opens the two files. A file that is missing, too short or foreign grants nothing.
    pub fn open(limits: &CStr, usage: &'static CStr) -> Self {
        let mut book = Self { usage_path: Some(usage), me: Who::this_process(), ..Self::default() };
        book.limits = map_limits(limits).filter(|file| {
            if file.is_of_another_version() {
                sys::say(ANOTHER_VERSION);
            }
            file.is_known()
        });
        if let Some((fd, file, usage)) = map_usage(usage) {
            book.usage = Some(usage);
            book.file = Some(file);
            book.fd = AtomicI32::new(fd);
        }
        book
    }

    /// The line of the limits file for the GPU `uuid`; `None` if it is not granted.
    pub fn device(&self, uuid: &[u8; 16]) -> Option<usize> {
        self.limits.and_then(|file| file.device(uuid))
    }

    /// The line that accounts for host memory, as if it were a device's; `None`: nothing may spill.
    pub fn host_line(&self) -> Option<usize> {
        self.limits.and_then(|file| file.host_line())
    }

    /// The memory limit on `device` in bytes; 0 if nothing is granted.
    pub fn limit(&self, device: usize) -> u64 {
        self.limits.map_or(0, |file| file.memory(device))
    }

    /// The size of `device` that the container sees, in bytes: the maximum to which its limit may grow.
    pub fn size(&self, device: usize) -> u64 {
        self.limits.map_or(0, |file| file.most_memory(device))
    }

    /// The memory that the container could hold on `device` now, in bytes: its limit plus the growth that the
    /// node has room for.
    pub fn within_reach(&self, device: usize) -> u64 {
        let (Some(file), Some(usage)) = (self.limits, self.usage) else { return 0 };
        let room = file.measured.get(device).map_or(0, |line| line.room_mebibytes.load(Relaxed));
        let growth = file.most_memory(device).saturating_sub(file.memory(device)).min(u64::from(room) << 20);
        self.limit_by_figure(usage, device).saturating_add(growth)
    }

    /// Asks the node to raise the limit of `device`, if it may grow, so that `bytes` more fit, and waits for
    /// the answer. True: the limit is now high enough.
    #[cold]
    pub fn ask_for_more(&self, device: usize, bytes: u64) -> bool {
        let (Some(limits), Some(usage)) = (self.limits, self.usage) else { return false };
        let (Some(wish), Some(line)) = (usage.header.wishes.get(device), limits.measured.get(device)) else {
            return false;
        };
        let most = limits.most_memory(device);
        if most <= limits.memory(device) {
            return false; // it does not grow
        }
        let deadline = sys::now().saturating_add(LENIENCE);
        loop {
            let wanted = self.used_by_figure(usage, device).saturating_add(bytes);
            if limits.memory(device) >= wanted {
                return true;
            }
            if wanted > most {
                return false;
            }
            wish.bytes.store(wanted, SeqCst);
            let number = wish.number.fetch_add(1, SeqCst).wrapping_add(1);
            // Numbers wrap and are compared by their low halves.
            #[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
            let number = number as u32;
            let is_open = || (1..u32::MAX / 2).contains(&number.wrapping_sub(line.answered.load(SeqCst)));
            while is_open() && limits.memory(device) < wanted {
                let left = deadline.saturating_sub(sys::now());
                if left == 0 {
                    return false;
                }
                sys::sleep(left.min(NAP).div_ceil(1_000));
            }
            // Another wish of the container may have overwritten this one before it was read.
            let was_read = wish.bytes.load(SeqCst) == wanted;
            if limits.memory(device) < wanted && was_read || sys::now() >= deadline {
                return limits.memory(device) >= wanted;
            }
        }
    }

    /// Memory that all processes of the container hold on `device`, in bytes.
    pub fn used(&self, device: usize) -> u64 {
        self.usage.map_or(0, |usage| sum(usage, device, None))
    }

    /// Like [`used`](Self::used), without the memory of processes that ended some milliseconds ago.
    pub fn used_by_living(&self, device: usize) -> u64 {
        let Some(usage) = self.usage else { return 0 };
        let alone = self.is_alone(usage);
        if let Some(slot) = self.own_slot(usage).filter(|_| alone) {
            return usage.line(device, slot).map_or(0, |line| line.bytes.load(Relaxed));
        }
        if self.slot.load(Relaxed) != 0 {
            self.keep_slot(usage);
        }
        let now = sys::ticks();
        // A query checks for dead processes again after ten milliseconds.
        if !alone && now.wrapping_sub(self.last_sweep.load(Relaxed)) > sys::ten_milliseconds() {
            self.last_sweep.store(now, Relaxed);
            self.sweep(usage);
        }
        self.used(device)
    }

    /// Whether no other process's slot counts.
    fn is_alone(&self, usage: &UsageFile) -> bool {
        let own = self.slot.load(Relaxed).checked_sub(1).map(|slot| slot as usize);
        let words = usage.header.live.iter().enumerate();
        words.fold(0, |others, (index, word)| others | word.load(Relaxed) & !bit_in(index, own)) == 0
    }

    /// Reserves `bytes` on `device`; false: they do not fit. After true, the caller must later call
    /// [`release`](Self::release).
    pub fn reserve(&self, device: usize, bytes: u64) -> bool {
        let Some(usage) = self.usage else { return false };
        let limit = self.limit(device);
        if bytes > limit || self.slot.load(Relaxed) == 0 && !self.keep_slot(usage) {
            return false;
        }
        let last = self.last_sum.get(device).map_or(u64::MAX, |sum| sum.load(Relaxed));
        let granted = if self.is_far_from(limit, device, last.saturating_add(bytes)) {
            self.add_within(usage, device, bytes, || self.limit(device))
        } else {
            self.try_reserve(usage, device, bytes)
        };
        granted || self.reserve_slowly(usage, device, bytes)
    }

    /// Adds `bytes` that the driver has already allocated, regardless of the limit.
    pub fn add(&self, device: usize, bytes: u64) {
        self.change(device, Part::All, |held| held.saturating_add(bytes));
    }

    /// Releases `bytes` after the driver has freed them, but never more than this process holds.
    pub fn release(&self, device: usize, bytes: u64) {
        self.change(device, Part::All, |held| held.saturating_sub(bytes));
    }

    /// Replaces a charge of `old` bytes with one of `new` bytes, regardless of the limit.
    pub fn settle(&self, device: usize, old: u64, new: u64) {
        if new > old {
            self.add(device, new - old);
        } else {
            self.release(device, old - new);
        }
    }

    /// Records that `bytes` more of this process's memory belong to contexts.
    pub fn note_context(&self, device: usize, bytes: u64) {
        self.change(device, Part::Contexts, |held| held.saturating_add(bytes));
    }

    /// Records that `bytes` less of this process's memory belong to contexts.
    pub fn forget_context(&self, device: usize, bytes: u64) {
        self.change(device, Part::Contexts, |held| held.saturating_sub(bytes));
    }

    /// Records that `new` instead of `old` bytes of this process's memory are managed.
    pub fn settle_managed(&self, device: usize, old: u64, new: u64) {
        if old != new {
            self.change(device, Part::Managed, |held| held.saturating_sub(old).saturating_add(new));
        }
    }

    /// Counts a refusal.
    pub fn count_refusal(&self) {
        if let Some(usage) = self.usage {
            usage.header.refused.fetch_add(1, Relaxed);
        }
    }

    /// Counts a driver function whose name suggests that it allocates or launches and that has no hook.
    pub fn count_unhooked(&self) {
        if let Some(usage) = self.usage {
            usage.header.unhooked.fetch_add(1, Relaxed);
        }
    }

    /// Adds launches and GPU time on `device` to this process's line. Settling may make the added time
    /// negative.
    pub fn count_compute(&self, device: usize, launches: u64, nanoseconds: i64) {
        let Some(usage) = self.usage else { return };
        let Some(line) = self.own_slot(usage).and_then(|slot| usage.line(device, slot)) else { return };
        line.launches.fetch_add(launches, Relaxed);
        let add = |time: u64| Some(time.saturating_add_signed(nanoseconds));
        let _ = line.gpu_nanoseconds.fetch_update(Relaxed, Relaxed, add);
    }

    /// Changes this process's memory on `device`, and its line, in one step. Returns the new value.
    fn change(&self, device: usize, part: Part, act: impl FnOnce(u64) -> u64) -> u64 {
        let Some(usage) = self.usage else { return 0 };
        let mut held = self.held.lock();
        let Some(place) = held.part(part).get_mut(device) else { return 0 };
        let old = *place;
        let new = act(old);
        *place = new;
        let line = self.own_slot(usage).and_then(|slot| usage.line(device, slot)).map(|line| part.of(line));
        match line {
            // Only this process writes its line, so a plain store is enough to lower it. Raising it takes an
            // exchange: the other lines must not be read before it.
            Some(line) if new <= old => line.store(new, Release),
            Some(line) if line.compare_exchange(old, new, SeqCst, Relaxed).is_ok() => {}
            _ => self.change_slowly(usage, &held, device, part, old, new),
        }
        new
    }

    /// Handles a line that does not match this process's memory: the slot was never claimed, or was taken
    /// away, or another process wrote to it.
    #[cold]
    fn change_slowly(&self, usage: &UsageFile, held: &Held, device: usize, part: Part, old: u64, new: u64) {
        let Some(slot) = self.own_slot(usage) else {
            // Only an addition claims a first slot. Any change that notices a lost slot replaces it.
            if new > old || self.slot.load(Relaxed) != 0 {
                self.claim_slot(usage, held);
            }
            return;
        };
        if let Some(line) = usage.line(device, slot) {
            part.of(line).store(new, SeqCst);
        }
    }

    /// Whether this process has a slot that counts; claims one if not.
    fn keep_slot(&self, usage: &UsageFile) -> bool {
        self.own_slot(usage).is_some() || {
            let held = self.held.lock();
            // Another thread may have been faster.
            self.own_slot(usage).or_else(|| self.claim_slot(usage, &held)).is_some()
        }
    }

    /// Sums before it adds, so that a request that cannot fit disturbs no other process. Uses the host's
    /// figure for contexts.
    fn try_reserve(&self, usage: &UsageFile, device: usize, bytes: u64) -> bool {
        let limit = || self.limit_by_figure(usage, device);
        sum(usage, device, None).saturating_add(bytes) <= limit()
            && self.add_within(usage, device, bytes, limit)
    }

    fn add_within(&self, usage: &UsageFile, device: usize, bytes: u64, limit: impl Fn() -> u64) -> bool {
        let own = self.change(device, Part::All, |held| held.saturating_add(bytes));
        let slot = self.own_slot(usage);
        let sum = sum(usage, device, slot).saturating_add(own);
        if let Some(last) = self.last_sum.get(device) {
            last.store(sum, Relaxed);
        }
        // Read the limit after raising the line: the host lowers a limit first and then reads the memory in
        // use. Without a slot of this process, others do not see the addition.
        if sum <= limit() && slot.is_some() && self.own_slot(usage) == slot {
            return true;
        }
        self.release(device, bytes);
        false
    }

    #[cold]
    fn reserve_slowly(&self, usage: &UsageFile, device: usize, bytes: u64) -> bool {
        let deadline = sys::now().saturating_add(PATIENCE);
        loop {
            // `None` if the holder is stopped. The sums below are correct without the lock, but racing
            // processes may then refuse each other.
            let lock = self.lock(usage, deadline);
            let dying = self.sweep(usage);
            for _ in 0..4 {
                if self.try_reserve(usage, device, bytes) {
                    return true;
                }
                (0..50).for_each(|_| core::hint::spin_loop());
            }
            drop(lock);
            let left = deadline.saturating_sub(sys::now());
            if !dying || left == 0 {
                return false;
            }
            sys::sleep(left.min(NAP).div_ceil(1_000));
        }
    }
}

/// Slots that are summed at once. Slots are claimed from the first on, so live ones are neighbours.
const GROUP: usize = 8;
/// The bits of [`GROUP`] neighbouring slots.
const ALL: u64 = (1 << GROUP) - 1;
/// A sum of [`SLOTS`] lines below this does not overflow.
const MUCH: u64 = u64::MAX / SLOTS as u64;

/// Memory that all live slots hold on `device`, except the slot `but`.
#[inline]
fn sum(usage: &UsageFile, device: usize, but: Option<usize>) -> u64 {
    let Some(lines) = usage.lines.get(device) else { return 0 };
    let (mut total, mut largest) = (0u64, 0);
    let words = usage.header.live.iter().enumerate();
    for ((index, word), lines) in words.zip(lines.chunks_exact(64)) {
        let bits = word.load(SeqCst) & !bit_in(index, but);
        if bits != 0 {
            let (sum, any) = sum_of(lines, bits);
            total = total.wrapping_add(sum);
            largest |= any;
        }
    }
    if largest > MUCH { u64::MAX } else { total }
}

/// The sum over those of 64 `lines` whose bit is set in `bits`, and the OR of the summed numbers.
#[inline]
fn sum_of(lines: &[DeviceLine], mut bits: u64) -> (u64, u64) {
    let (mut total, mut any) = (0u64, 0);
    let mut add = |line: &DeviceLine| {
        let bytes = line.bytes.load(SeqCst);
        total = total.wrapping_add(bytes);
        any |= bytes;
    };
    while bits != 0 {
        let first = bits.trailing_zeros() as usize;
        let group = lines.get(first..).and_then(|lines| lines.first_chunk::<GROUP>());
        if let Some(group) = group.filter(|_| bits >> first & ALL == ALL) {
            group.iter().for_each(&mut add);
            bits &= !(ALL << first);
        } else {
            lines.get(first).into_iter().for_each(&mut add);
            bits &= bits - 1;
        }
    }
    (total, any)
}

/// The sum of `part` on `device` over all live slots, in bytes.
pub(crate) fn sum_of_part(usage: &UsageFile, device: usize, part: Part) -> u64 {
    let live = (0..SLOTS).filter(|slot| usage.is_live(*slot));
    let lines = live.filter_map(|slot| usage.line(device, slot));
    lines.fold(0, |sum, line| sum.saturating_add(part.of(line).load(Relaxed)))
}

/// The bit of `slot` in word `index` of the live slots.
fn bit_in(index: usize, slot: Option<usize>) -> u64 {
    slot.filter(|slot| slot / 64 == index).map_or(0, |slot| 1 << (slot % 64))
}

fn map_limits(path: &CStr) -> Option<&'static LimitsFile> {
    let fd = Fd::open(path, false).ok()?;
    if sys::file_id(fd.number()).ok()?.size < LIMITS_LEN as u64 {
        return None;
    }
    let address = sys::map_file(fd.number(), LIMITS_LEN, false).ok()?;
    // SAFETY: a mapping of at least LIMITS_LEN bytes that is never unmapped; every field is atomic.
    Some(unsafe { &*core::ptr::with_exposed_provenance(address) })
}

fn map_usage(path: &CStr) -> Option<(i32, FileId, &'static UsageFile)> {
    let fd = Fd::open(path, true).ok()?;
    // From here on the descriptor must not be closed: another library in this process may hold a lock on the
    // file.
    let fd = fd.leak();
    let file = sys::file_id(fd).ok()?;
    if file.size < USAGE_LEN as u64 {
        return None;
    }
    let address = sys::map_file(fd, USAGE_LEN, true).ok()?;
    // SAFETY: a mapping of at least USAGE_LEN bytes that is never unmapped; every field is atomic.
    let usage: &'static UsageFile = unsafe { &*core::ptr::with_exposed_provenance(address) };
    usage.is_known().then_some((fd, file, usage))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_that_of_the_live_slots_but_one() {
        // SAFETY: every field is an atomic number.
        let usage: Box<UsageFile> = unsafe { Box::new_zeroed().assume_init() };
        for (slot, line) in usage.lines[2].iter().enumerate() {
            line.bytes.store(1 << (slot % 50), Relaxed);
        }
        let all = |but| (0..256).filter(move |slot| Some(*slot) != but);
        for words in [
            [0; 4],
            [u64::MAX; 4],
            [1, 1 << 63, 0, u64::MAX],
            [0xf0f0, u64::MAX << 7, u64::MAX >> 9, 0x5555_5555_5555_5555],
        ] {
            usage.header.live.iter().zip(words).for_each(|(word, bits)| word.store(bits, Relaxed));
            for but in [None, Some(0), Some(63), Some(64), Some(200), Some(255)] {
                let live = all(but).filter(|slot| words[slot / 64] >> (slot % 64) & 1 == 1);
                let want = live.map(|slot| 1u64 << (slot % 50)).sum::<u64>();
                assert_eq!(sum(&usage, 2, but), want, "{words:x?} but {but:?}");
            }
        }
        usage.lines[2][3].bytes.store(u64::MAX, Relaxed);
        usage.header.live.iter().zip([0b1100, 0, 0, 0]).for_each(|(word, bits)| word.store(bits, Relaxed));
        assert_eq!((sum(&usage, 2, None), sum(&usage, 2, Some(2))), (u64::MAX, u64::MAX));
        assert_eq!(sum(&usage, 2, Some(3)), 4);
    }
}
