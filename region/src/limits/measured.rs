//! What the host's meter says about each GPU: the words in the file, and the same as a value.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64, fence};

use super::LimitsFile;
use crate::MAX_DEVICES;

/// What the host's meter says about the container on one GPU. Written under its own sequence counter.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Measured {
    /// Odd while the host writes.
    pub sequence: AtomicU32,
    /// Share of the GPU that a `burst` container may use now, in hundredths of a percent; 0: the meter says
    /// nothing, and the container's own share counts.
    pub burst_share: AtomicU32,
    /// End of the last sampling window that is counted, monotonic time in nanoseconds; 0: nothing was ever
    /// measured.
    pub until: AtomicU64,
    /// GPU time of the container's processes in all windows so far, in nanoseconds.
    pub own_nanoseconds: AtomicU64,
    /// How often the meter found that others had used the GPU. A library only needs to know whether others
    /// used it; how much they used is not told.
    pub others_windows: AtomicU64,
    /// Device memory that the driver counts for the container's processes, in bytes; 0 where the driver does
    /// not tell.
    pub memory_bytes: AtomicU64,
    /// Monotonic time at which the host wrote this line, in nanoseconds. An old time means that the meter has
    /// stopped.
    pub written: AtomicU64,
    /// Part of `memory_bytes` that the container's own books do not explain, in bytes; 0: the books explain
    /// all of it. With [`WITHHELD`] the container's limit is lowered by it.
    unbooked: AtomicU64,
    /// What the node could add to the line's memory limit now, in MiB. The meter alone writes this word and
    /// the next, and no other part of the line with them.
    pub room_mebibytes: AtomicU32,
    /// Number of the last wish for a higher limit that the meter has answered, one way or the other.
    pub answered: AtomicU32,
}

const _: () = assert!(size_of::<Measured>() == 64);

/// The bit of [`Measured::unbooked`] by which the container's limit is lowered by the bytes.
const WITHHELD: u64 = 1 << 63;
/// A line that was written longer ago, in nanoseconds, is of a meter that has stopped: it lowers no limit.
const FRESH: u64 = 5_000_000_000;

/// The bit of [`Measured::others_windows`] by which the GPU time is that of the GPU's own record.
const BY_RECORD: u64 = 1 << 63;

const LINES: usize = core::mem::offset_of!(LimitsFile, measured);

/// A line of the host's measurements as a value; all zero where nothing was measured. The fields are those of
/// [`Measured`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measurement {
    /// Hundredths of a percent that a `burst` container may use now; 0: the meter says nothing.
    pub burst_share: u32,
    /// End of the last window counted, monotonic nanoseconds; 0: nothing was measured.
    pub until: u64,
    /// GPU time of the container, in nanoseconds.
    pub own_nanoseconds: u64,
    /// How often the meter found somebody else on the GPU.
    pub others_windows: u64,
    /// Device memory by the driver's count, in bytes.
    pub memory_bytes: u64,
    /// When the host wrote the line, monotonic nanoseconds; 0: never.
    pub written: u64,
    /// Device memory that the container's own books do not explain, in bytes.
    pub unbooked_bytes: u64,
    /// Whether the container's limit is lowered by it.
    pub is_withheld: bool,
    /// Whether the GPU time is that of the GPU's own record of context switches, and not of NVML's samples.
    pub is_by_record: bool,
}

impl Measured {
    /// Writes the line. Only one writer may run at a time. A writer that died half-way leaves an odd
    /// sequence, from which the next writer continues.
    pub fn set(&self, value: &Measurement) {
        let writing = self.sequence.load(Relaxed) | 1;
        self.sequence.store(writing, Relaxed);
        fence(Release);
        self.burst_share.store(value.burst_share, Relaxed);
        self.until.store(value.until, Relaxed);
        self.own_nanoseconds.store(value.own_nanoseconds, Relaxed);
        let by_record = if value.is_by_record { BY_RECORD } else { 0 };
        self.others_windows.store(value.others_windows & !BY_RECORD | by_record, Relaxed);
        self.memory_bytes.store(value.memory_bytes, Relaxed);
        self.written.store(value.written, Relaxed);
        let withheld = if value.is_withheld { WITHHELD } else { 0 };
        self.unbooked.store(value.unbooked_bytes & !WITHHELD | withheld, Relaxed);
        self.sequence.store(writing.wrapping_add(1), Release);
    }

    /// The line; `None` while a write is in progress. A reader tries again a few times and then does without
    /// the line.
    pub fn get(&self) -> Option<Measurement> {
        let before = self.sequence.load(Acquire);
        let unbooked = self.unbooked.load(Relaxed);
        let others = self.others_windows.load(Relaxed);
        let value = Measurement {
            burst_share: self.burst_share.load(Relaxed),
            until: self.until.load(Relaxed),
            own_nanoseconds: self.own_nanoseconds.load(Relaxed),
            others_windows: others & !BY_RECORD,
            memory_bytes: self.memory_bytes.load(Relaxed),
            written: self.written.load(Relaxed),
            unbooked_bytes: unbooked & !WITHHELD,
            is_withheld: unbooked & WITHHELD != 0,
            is_by_record: others & BY_RECORD != 0,
        };
        fence(Acquire);
        (before.is_multiple_of(2) && self.sequence.load(Relaxed) == before).then_some(value)
    }

    /// By how many bytes the container's memory limit is lowered, for what it holds beyond its books. `now` is
    /// asked for the monotonic time in nanoseconds where it is any at all.
    #[inline]
    pub fn withheld(&self, now: impl FnOnce() -> u64) -> u64 {
        let unbooked = self.unbooked.load(Relaxed);
        if unbooked & WITHHELD == 0 { 0 } else { self.if_fresh(unbooked & !WITHHELD, now()) }
    }

    /// `bytes`, unless the meter that wrote them has stopped. Apart, since each allocation passes by it.
    #[cold]
    #[inline(never)]
    fn if_fresh(&self, bytes: u64, now: u64) -> u64 {
        if now.saturating_sub(self.written.load(Relaxed)) > FRESH { 0 } else { bytes }
    }
}

/// The measurements in the bytes of a limits file, for the host's own display and for a meter that continues
/// where another stopped; `None` when the bytes are too few. A line that was being written reads as nothing
/// measured. The caller reads the file twice: bytes that are equal both times are not torn.
pub fn measurements(bytes: &[u8]) -> Option<[Measurement; MAX_DEVICES]> {
    let lines = bytes.get(LINES..LINES + MAX_DEVICES * size_of::<Measured>())?;
    let mut all = [Measurement::default(); MAX_DEVICES];
    for (value, line) in all.iter_mut().zip(lines.chunks_exact(size_of::<Measured>())) {
        if word(line, 0).is_multiple_of(2) {
            *value = Measurement {
                burst_share: word(line, 4),
                until: long(line, 8),
                own_nanoseconds: long(line, 16),
                others_windows: long(line, 24) & !BY_RECORD,
                memory_bytes: long(line, 32),
                written: long(line, 40),
                unbooked_bytes: long(line, 48) & !WITHHELD,
                is_withheld: long(line, 48) & WITHHELD != 0,
                is_by_record: long(line, 24) & BY_RECORD != 0,
            };
        }
    }
    Some(all)
}

fn word(line: &[u8], at: usize) -> u32 {
    line.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

fn long(line: &[u8], at: usize) -> u64 {
    line.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

const _: () = assert!(core::mem::offset_of!(Measured, burst_share) == 4);
const _: () = assert!(core::mem::offset_of!(Measured, until) == 8);
const _: () = assert!(core::mem::offset_of!(Measured, own_nanoseconds) == 16);
const _: () = assert!(core::mem::offset_of!(Measured, others_windows) == 24);
const _: () = assert!(core::mem::offset_of!(Measured, memory_bytes) == 32);
const _: () = assert!(core::mem::offset_of!(Measured, written) == 40);
const _: () = assert!(core::mem::offset_of!(Measured, unbooked) == 48);

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::limits::tests::{bytes_of, empty};

    const SEEN: Measurement = Measurement {
        burst_share: 7150,
        until: u64::MAX,
        own_nanoseconds: 3,
        others_windows: 4,
        memory_bytes: 5 << 30,
        written: 6,
        unbooked_bytes: 7,
        is_withheld: true,
        is_by_record: true,
    };

    #[test]
    fn what_the_meter_writes_is_what_both_sides_read() {
        let file = empty();
        file.measured[15].set(&SEEN);
        assert_eq!(file.measured[15].get(), Some(SEEN));
        assert_eq!(file.measured[0].get(), Some(Measurement::default()));
        let all = measurements(&bytes_of(&file)).unwrap();
        assert_eq!((all[15], all[14]), (SEEN, Measurement::default()));
        assert_eq!(measurements(&bytes_of(&file)[1..]), None);
    }

    #[test]
    fn the_limit_is_lowered_only_where_the_meter_says_so_and_lives() {
        let file = empty();
        let line = &file.measured[0];
        for (is_withheld, age, want) in
            [(false, 0, 0), (true, 0, 7), (true, FRESH, 7), (true, FRESH + 1, 0), (true, 0, 7)]
        {
            line.set(&Measurement { is_withheld, ..SEEN });
            assert_eq!(line.withheld(|| SEEN.written + age), want, "{is_withheld}, {age}");
        }
        line.set(&Measurement::default());
        assert_eq!(line.withheld(|| 0), 0);
    }

    #[test]
    fn a_line_that_its_writer_left_half_way_is_not_read_and_heals_at_the_next_write() {
        let file = empty();
        let line = &file.measured[0];
        line.set(&SEEN);
        line.sequence.fetch_add(1, Relaxed);
        assert_eq!(line.get(), None);
        assert_eq!(measurements(&bytes_of(&file)).unwrap()[0], Measurement::default());
        line.set(&SEEN);
        assert_eq!(line.get(), Some(SEEN));
    }

    #[test]
    fn a_reader_never_sees_half_of_a_line() {
        let file = empty();
        let line = &file.measured[0];
        let rounds = if cfg!(miri) { 200 } else { 200_000 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=rounds {
                    line.set(&Measurement { until: round, own_nanoseconds: round, written: round, ..SEEN });
                }
            });
            let mut last = 0;
            while last < rounds {
                let Some(seen) = line.get() else { continue };
                assert_eq!((seen.until, seen.own_nanoseconds), (seen.written, seen.written));
                assert!(seen.written >= last);
                last = seen.written;
                std::thread::yield_now();
            }
        });
    }
}
