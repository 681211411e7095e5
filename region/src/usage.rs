//! The `usage` file: the resources that the container's processes use. It has a fixed slot per process, which
//! never moves. Readers compute the sum over the live slots; it is not stored. A process owns its slot while
//! it holds a POSIX record lock on the slot's [`lock_byte`]. The tenant can write every byte, so
//! [`read_usage`] trusts none.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::MAX_DEVICES;

const MAGIC: [u8; 8] = *b"GPUSHUSE";
/// Words of a device that libraries of earlier versions use.
const RESERVED: usize = 544;
/// Layout version of the file; a library rejects any other.
pub const USAGE_VERSION: u32 = 2;
/// How many processes of one container can hold device memory at a time.
pub const SLOTS: usize = 256;
/// Size of the file in bytes. The host writes the header and leaves the rest as a hole.
pub const USAGE_LEN: usize = size_of::<UsageFile>();
/// Size of the header in bytes.
pub const USAGE_HEADER_LEN: usize = size_of::<UsageHeader>();
/// `Identity::state` of a slot in use.
pub const SLOT_LIVE: u32 = 1;
/// `Identity::state` of a free slot; its counters are ignored.
pub const SLOT_FREE: u32 = 0;
/// The holder part of the lock word when the lock is free.
pub const NO_HOLDER: u32 = 0;

/// The mapped file.
#[repr(C, align(64))]
pub struct UsageFile {
    /// Magic number, layout version and size, and data that all processes share.
    pub header: UsageHeader,
    /// The owner of each slot.
    pub owners: [Identity; SLOTS],
    /// The usage of each slot, by device and then by slot: a sum over slots reads neighbouring lines.
    pub lines: [[DeviceLine; SLOTS]; MAX_DEVICES],
    /// Used by libraries of earlier versions.
    reserved: [[AtomicU64; RESERVED]; MAX_DEVICES],
}

/// First page of the file. Fields that are written together have cache lines of their own.
#[repr(C, align(64))]
pub struct UsageHeader {
    magic: [AtomicU32; 2],
    version: AtomicU32,
    size: AtomicU32,
    slots: AtomicU32,
    devices: AtomicU32,
    first_line: [AtomicU64; 5],
    /// The slow path's futex: holder (slot + 1, 9 bits), waiters (bit 9), generation (22 bits).
    pub lock: AtomicU32,
    lock_line: [AtomicU32; 15],
    /// One bit per slot in use.
    pub live: [AtomicU64; SLOTS / 64],
    live_line: [AtomicU64; 4],
    /// Allocations refused because of the limit.
    pub refused: AtomicU64,
    /// Processes that found no free slot.
    pub no_slot: AtomicU64,
    /// Requested driver functions that look like allocations or launches and are not intercepted.
    pub unhooked: AtomicU64,
    /// Times the lock was taken from a dead holder.
    pub stolen: AtomicU64,
    /// Slots of dead processes that were reclaimed.
    pub reclaimed: AtomicU64,
    counter_line: [AtomicU64; 3],
    /// One byte per slot, which is only locked, never read.
    lock_bytes: [AtomicU64; SLOTS / 8],
    /// The compute share of each device.
    pub buckets: [Bucket; MAX_DEVICES],
    /// The memory limits that the container would like on each device.
    pub wishes: [Wish; MAX_DEVICES],
    /// The time at which an allocation first waited for the meter, as monotonic time in nanoseconds; 0: none
    /// has waited.
    pub first_wait: AtomicU64,
    reserved: [AtomicU64; 287],
}

/// A request for a higher memory limit. The meter reads it, and answers with its number
/// ([`Measured::answered`](crate::Measured)). The number stands before the bytes and is written after them: a
/// reader that runs during a write may combine new bytes with the earlier number, and reads again later.
#[derive(Default)]
#[repr(C)]
pub struct Wish {
    /// Number of requests so far; only the low 32 bits count.
    pub number: AtomicU64,
    /// The requested limit, in bytes.
    pub bytes: AtomicU64,
}

/// The compute share that all processes of the container use together.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Bucket {
    /// GPU time left in nanoseconds, as a two's complement number: debt is negative.
    pub nanoseconds: AtomicU64,
    /// Monotonic time of the last refill in nanoseconds.
    pub refilled: AtomicU64,
    before: [AtomicU64; 3],
    /// How long launches were delayed, in nanoseconds, summed over all threads.
    pub throttled: AtomicU64,
    after: [AtomicU64; 2],
}

/// The owner of a slot.
#[repr(C, align(64))]
pub struct Identity {
    /// [`SLOT_LIVE`] or [`SLOT_FREE`].
    pub state: AtomicU32,
    /// The process id, in the pid namespace `pid_namespace`. It is only a label: the host never signals it
    /// and never looks it up.
    pub pid: AtomicU32,
    /// Start time in clock ticks after boot, field 22 of `/proc/PID/stat`; 0 when it could not be read.
    pub start_time: AtomicU64,
    /// Inode of the owner's pid namespace; 0 when it could not be read.
    pub pid_namespace: AtomicU64,
    /// Start address of the owner's stack, which changes with `exec`. Only processes of the container compare
    /// it.
    pub image: AtomicU64,
    /// Number of times the slot has been claimed.
    pub generation: AtomicU64,
    /// Address at which the owner has mapped `limits`, and start and end of the driver's library; 0: unknown.
    pub mapped: [AtomicU64; 3],
}

/// The usage of one process on one device.
#[repr(C, align(64))]
pub struct DeviceLine {
    /// Charged device memory in bytes.
    pub bytes: AtomicU64,
    /// Part of `bytes` that is charged for contexts, not for allocations.
    pub context_bytes: AtomicU64,
    /// Kernel launches.
    pub launches: AtomicU64,
    /// GPU time used, in nanoseconds.
    pub gpu_nanoseconds: AtomicU64,
    /// Part of `bytes` that is managed memory, whose pages the driver's resource manager does not count.
    pub managed_bytes: AtomicU64,
    reserved: [AtomicU64; 3],
}

const LOCK_BYTES: usize = core::mem::offset_of!(UsageHeader, lock_bytes);
const OWNERS: usize = core::mem::offset_of!(UsageFile, owners);
const LINES: usize = core::mem::offset_of!(UsageFile, lines);

const _: () = assert!(USAGE_HEADER_LEN == 4096);
const _: () = assert!(size_of::<Bucket>() == 64);
const _: () = assert!(size_of::<Identity>() == 64);
const _: () = assert!(size_of::<DeviceLine>() == 64);
const _: () = assert!(USAGE_LEN == 4096 + SLOTS * 64 * (1 + MAX_DEVICES) + 4352 * MAX_DEVICES);
const _: () = assert!(core::mem::offset_of!(Bucket, throttled) == 40);
const _: () = assert!(core::mem::offset_of!(UsageHeader, lock) == 64);
const _: () = assert!(core::mem::offset_of!(UsageHeader, live) == 128);
const _: () = assert!(core::mem::offset_of!(UsageHeader, refused) == 192);
const _: () = assert!(LOCK_BYTES == 256);
const _: () = assert!(core::mem::offset_of!(UsageHeader, buckets) == 512);

#[expect(clippy::cast_possible_truncation, reason = "a constant of 352256")]
const FILE_SIZE: u32 = USAGE_LEN as u32;
#[expect(clippy::cast_possible_truncation, reason = "a constant of 256")]
const SLOTS_WORD: u32 = SLOTS as u32;
#[expect(clippy::cast_possible_truncation, reason = "a constant of 16")]
const DEVICES_WORD: u32 = MAX_DEVICES as u32;

/// Offset in the file of the byte whose record lock marks `slot` as owned. The host can query the owner's pid
/// from the kernel (`F_GETLK`).
pub const fn lock_byte(slot: usize) -> u64 {
    (LOCK_BYTES + slot) as u64
}

/// The first page of an empty usage file.
pub fn empty_usage_header() -> [u8; USAGE_HEADER_LEN] {
    let mut page = [0; USAGE_HEADER_LEN];
    for (at, bytes) in [
        (0, &MAGIC[..]),
        (8, &USAGE_VERSION.to_ne_bytes()),
        (12, &FILE_SIZE.to_ne_bytes()),
        (16, &SLOTS_WORD.to_ne_bytes()),
        (20, &DEVICES_WORD.to_ne_bytes()),
    ] {
        if let Some(place) = page.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }
    page
}

impl UsageFile {
    /// Whether this is a usage file with the layout compiled here.
    pub fn is_known(&self) -> bool {
        use core::sync::atomic::Ordering::Relaxed;
        let header = &self.header;
        let [a, b] = [0, 1].map(|word: usize| header.magic[word].load(Relaxed).to_ne_bytes());
        a == MAGIC[..4]
            && b == MAGIC[4..]
            && header.version.load(Relaxed) == USAGE_VERSION
            && header.size.load(Relaxed) == FILE_SIZE
    }

    /// The line of `slot` on `device`.
    pub fn line(&self, device: usize, slot: usize) -> Option<&DeviceLine> {
        self.lines.get(device)?.get(slot)
    }

    /// Whether `slot` is in use.
    pub fn is_live(&self, slot: usize) -> bool {
        let word = self.header.live.get(slot / 64);
        word.is_some_and(|word| word.load(core::sync::atomic::Ordering::SeqCst) >> (slot % 64) & 1 == 1)
    }
}

/// A usage file that cannot be read: it is too short, or its header is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damaged;

impl core::fmt::Display for Damaged {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("usage file damaged by the container")
    }
}

impl core::error::Error for Damaged {}

/// The usage of a container, or of one of its processes, on one device. All sums saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Charged device memory in bytes.
    pub bytes: u64,
    /// Part of `bytes` that is charged for contexts.
    pub context_bytes: u64,
    /// Kernel launches.
    pub launches: u64,
    /// GPU time used, in nanoseconds.
    pub gpu_nanoseconds: u64,
}

/// The usage that a container reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// By line of the limits file.
    pub devices: [DeviceUsage; MAX_DEVICES],
    /// Processes that hold a slot. [`read_usage`] includes dead ones whose slots were not reclaimed yet.
    pub processes: u32,
    /// Allocations refused because of the limit.
    pub refused: u64,
    /// Processes that found no free slot.
    pub no_slot: u64,
    /// Requested driver functions that look like allocations or launches and are not intercepted.
    pub unhooked: u64,
    /// Times the lock was taken from a dead holder.
    pub stolen: u64,
    /// Slots of dead processes that were reclaimed.
    pub reclaimed: u64,
}

/// The usage that one process of a container reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Its slot, 0 to 255; `F_GETLK` on the slot's [`lock_byte`] names the real owner.
    pub slot: usize,
    /// The process id in the container: for display only.
    pub pid: u32,
    /// Start time in clock ticks after boot; 0: unknown.
    pub start_time: u64,
    /// Inode of its pid namespace; 0: unknown.
    pub pid_namespace: u64,
    /// See [`Identity::mapped`].
    pub mapped: [u64; 3],
    /// By line of the limits file.
    pub devices: [DeviceUsage; MAX_DEVICES],
}

/// Reads the first [`USAGE_LEN`] bytes of a usage file; ignores any further bytes.
///
/// # Errors
/// [`Damaged`] when there are too few bytes or the header is not of this layout.
pub fn read_usage(bytes: &[u8]) -> Result<Usage, Damaged> {
    read_usage_of(bytes, |_| true)
}

/// Like [`read_usage`], but counts only the slots of processes for which `lives` returns true.
///
/// # Errors
/// The same as for [`read_usage`].
pub fn read_usage_of(bytes: &[u8], lives: impl FnMut(&ProcessUsage) -> bool) -> Result<Usage, Damaged> {
    let mut usage = Usage::default();
    for process in processes(bytes)?.filter(lives) {
        usage.processes += 1;
        for (sum, part) in usage.devices.iter_mut().zip(&process.devices) {
            sum.bytes = sum.bytes.saturating_add(part.bytes);
            sum.context_bytes = sum.context_bytes.saturating_add(part.context_bytes);
            sum.launches = sum.launches.saturating_add(part.launches);
            sum.gpu_nanoseconds = sum.gpu_nanoseconds.saturating_add(part.gpu_nanoseconds);
        }
    }
    let counter = |at: usize| long(bytes, core::mem::offset_of!(UsageHeader, refused) + 8 * at);
    usage.refused = counter(0);
    usage.no_slot = counter(1);
    usage.unhooked = counter(2);
    usage.stolen = counter(3);
    usage.reclaimed = counter(4);
    Ok(usage)
}

/// Returns the processes that hold a slot.
///
/// # Errors
/// The same as for [`read_usage`].
pub fn processes(bytes: &[u8]) -> Result<Processes<'_>, Damaged> {
    check_header(bytes)?;
    if bytes.len() >= USAGE_LEN { Ok(Processes { bytes, next: 0 }) } else { Err(Damaged) }
}

/// The length of the part of the file, from its start, that describes the first `devices` GPUs. The bytes
/// after that describe the others.
pub const fn usage_length(devices: usize) -> usize {
    let devices = if devices < MAX_DEVICES { devices } else { MAX_DEVICES };
    LINES + devices * SLOTS * size_of::<DeviceLine>()
}

/// Whether `bytes` begin with a header of this layout.
pub(crate) fn check_header(bytes: &[u8]) -> Result<(), Damaged> {
    let known = bytes.get(..8) == Some(&MAGIC)
        && word(bytes, 8) == USAGE_VERSION
        && word(bytes, 12) == FILE_SIZE
        && word(bytes, 16) == SLOTS_WORD
        && word(bytes, 20) == DEVICES_WORD;
    if known { Ok(()) } else { Err(Damaged) }
}

/// Iterator over the slots in use.
#[derive(Clone, Debug)]
pub struct Processes<'file> {
    bytes: &'file [u8],
    next: usize,
}

impl Iterator for Processes<'_> {
    type Item = ProcessUsage;

    fn next(&mut self) -> Option<ProcessUsage> {
        while self.next < SLOTS {
            let slot = self.next;
            self.next += 1;
            let live = long(self.bytes, core::mem::offset_of!(UsageHeader, live) + slot / 64 * 8);
            let owner = OWNERS + slot * size_of::<Identity>();
            if live >> (slot % 64) & 1 == 1 && word(self.bytes, owner) == SLOT_LIVE {
                return Some(self.process(slot, owner));
            }
        }
        None
    }
}

impl Processes<'_> {
    fn process(&self, slot: usize, owner: usize) -> ProcessUsage {
        let devices = core::array::from_fn(|device| {
            let at = LINES + (device * SLOTS + slot) * size_of::<DeviceLine>();
            DeviceUsage {
                bytes: long(self.bytes, at),
                context_bytes: long(self.bytes, at + 8),
                launches: long(self.bytes, at + 16),
                gpu_nanoseconds: long(self.bytes, at + 24),
            }
        });
        let [pid_namespace, mapped] = [offset_of!(Identity, pid_namespace), offset_of!(Identity, mapped)];
        ProcessUsage {
            slot,
            pid: word(self.bytes, owner + 4),
            start_time: long(self.bytes, owner + 8),
            pid_namespace: long(self.bytes, owner + pid_namespace),
            mapped: core::array::from_fn(|at| long(self.bytes, owner + mapped + 8 * at)),
            devices,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(word) => u32::from_ne_bytes(*word),
        None => 0,
    }
}

pub(crate) fn long(bytes: &[u8], at: usize) -> u64 {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(long) => u64::from_ne_bytes(*long),
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::{vec, vec::Vec};

    fn file() -> Vec<u8> {
        let mut bytes = vec![0; USAGE_LEN];
        bytes[..USAGE_HEADER_LEN].copy_from_slice(&empty_usage_header());
        bytes
    }

    fn hold(bytes: &mut [u8], slot: usize, pid: u32, device: usize, held: u64) {
        bytes[128 + slot / 8] |= 1 << (slot % 8);
        let owner = OWNERS + slot * 64;
        bytes[owner..owner + 4].copy_from_slice(&SLOT_LIVE.to_ne_bytes());
        bytes[owner + 4..owner + 8].copy_from_slice(&pid.to_ne_bytes());
        let at = LINES + (device * SLOTS + slot) * 64;
        bytes[at..at + 8].copy_from_slice(&held.to_ne_bytes());
    }

    #[test]
    fn a_new_file_holds_nothing() {
        assert_eq!(read_usage(&file()), Ok(Usage::default()));
    }

    #[test]
    fn live_slots_are_summed_by_device_and_free_ones_ignored() {
        let mut bytes = file();
        hold(&mut bytes, 0, 11, 0, 100);
        hold(&mut bytes, 255, 12, 0, 20);
        hold(&mut bytes, 64, 13, 15, 3);
        hold(&mut bytes, 9, 14, 0, 1000);
        bytes[OWNERS + 9 * 64] = 0;
        let usage = read_usage(&bytes).unwrap();
        assert_eq!((usage.devices[0].bytes, usage.devices[15].bytes, usage.processes), (120, 3, 3));
        let pids: Vec<_> = processes(&bytes).unwrap().map(|process| (process.slot, process.pid)).collect();
        assert_eq!(pids, [(0, 11), (64, 13), (255, 12)]);
    }

    #[test]
    fn sums_saturate_whatever_the_tenant_writes() {
        let mut bytes = file();
        hold(&mut bytes, 0, 1, 0, u64::MAX);
        hold(&mut bytes, 1, 2, 0, u64::MAX);
        assert_eq!(read_usage(&bytes).unwrap().devices[0].bytes, u64::MAX);
        bytes[24..].fill(0xff);
        assert_eq!(read_usage(&bytes).unwrap().devices[3].bytes, 0, "state ff… is not live");
    }

    #[test]
    fn a_short_or_foreign_file_is_damaged() {
        let good = file();
        for length in [0, 1, 64, USAGE_HEADER_LEN, USAGE_LEN - 1] {
            assert_eq!(read_usage(&good[..length]), Err(Damaged), "{length} bytes");
        }
        for at in [0, 8, 12, 16, 20] {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            assert_eq!(read_usage(&bytes), Err(Damaged), "byte {at} changed");
        }
    }
}
