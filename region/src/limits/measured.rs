//! The host meter's measurements of each GPU: the words in the file, and the same as a value.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64, fence};

use super::LimitsFile;
use crate::MAX_DEVICES;

/// The host meter's measurements of the container on one GPU. Written under its own sequence counter.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Measured {
    /// Odd while the host writes.
    pub sequence: AtomicU32,
    /// Always 0: libraries of earlier versions read the idle time lent to a container here.
    lent: AtomicU32,
    /// End of the last counted sampling window, monotonic time in nanoseconds; 0: nothing was ever measured.
    pub until: AtomicU64,
    /// GPU time of the container's processes in all windows so far, in nanoseconds.
    pub own_nanoseconds: AtomicU64,
    /// With [`BY_RECORD`] the GPU time is from the GPU's own record. The other bits differ in each window:
    /// libraries of earlier versions concluded from an equal value that no other process used the GPU.
    source: AtomicU64,
    /// Device memory that the driver counts for the container's processes, in bytes; 0 if the driver does not
    /// report it.
    pub memory_bytes: AtomicU64,
    /// Monotonic time at which the host wrote this line, in nanoseconds. An old time means that the meter has
    /// stopped.
    pub written: AtomicU64,
    /// Part of `memory_bytes` that the container's usage file does not explain, in bytes; 0: it explains
    /// everything. Below [`WITHHELD`].
    unbooked: AtomicU64,
    /// Memory that the node could add to the line's memory limit now, in MiB. Only the meter writes this word
    /// and the next, and no other part of the line with them.
    pub room_mebibytes: AtomicU32,
    /// Number of the last request for a higher limit that the meter has granted or denied.
    pub answered: AtomicU32,
}

const _: () = assert!(size_of::<Measured>() == 64);

/// The bit of [`Measured::unbooked`] that makes libraries of earlier versions lower their limit by the bytes.
const WITHHELD: u64 = 1 << 63;

/// The bit of [`Measured::source`] which says that the GPU time is from the GPU's own record.
const BY_RECORD: u64 = 1 << 63;

const LINES: usize = core::mem::offset_of!(LimitsFile, measured);

/// A line of the host's measurements as a value; all zero if nothing was measured. The fields are those of
/// [`Measured`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measurement {
    /// End of the last counted window, monotonic nanoseconds; 0: nothing was measured.
    pub until: u64,
    /// GPU time of the container, in nanoseconds.
    pub own_nanoseconds: u64,
    /// Device memory that the driver counts, in bytes.
    pub memory_bytes: u64,
    /// Monotonic time at which the host wrote the line, in nanoseconds; 0: never.
    pub written: u64,
    /// Device memory that the container's usage file does not explain, in bytes.
    pub unbooked_bytes: u64,
    /// Whether the GPU time is from the GPU's own record of context switches, not from NVML's samples.
    pub is_by_record: bool,
}

impl Measured {
    /// Writes the line. Only one writer may run at a time. A writer that died half-way leaves an odd
    /// sequence, from which the next writer continues.
    pub fn set(&self, value: &Measurement) {
        let writing = self.sequence.load(Relaxed) | 1;
        self.sequence.store(writing, Relaxed);
        fence(Release);
        self.lent.store(0, Relaxed);
        self.until.store(value.until, Relaxed);
        self.own_nanoseconds.store(value.own_nanoseconds, Relaxed);
        let by_record = if value.is_by_record { BY_RECORD } else { 0 };
        self.source.store(value.until & !BY_RECORD | by_record, Relaxed);
        self.memory_bytes.store(value.memory_bytes, Relaxed);
        self.written.store(value.written, Relaxed);
        self.unbooked.store(value.unbooked_bytes & !WITHHELD, Relaxed);
        self.sequence.store(writing.wrapping_add(1), Release);
    }

    /// Returns the line; `None` while a write is in progress. A reader retries a few times and then does
    /// without the line.
    pub fn get(&self) -> Option<Measurement> {
        let before = self.sequence.load(Acquire);
        let value = Measurement {
            until: self.until.load(Relaxed),
            own_nanoseconds: self.own_nanoseconds.load(Relaxed),
            memory_bytes: self.memory_bytes.load(Relaxed),
            written: self.written.load(Relaxed),
            unbooked_bytes: self.unbooked.load(Relaxed) & !WITHHELD,
            is_by_record: self.source.load(Relaxed) & BY_RECORD != 0,
        };
        fence(Acquire);
        (before.is_multiple_of(2) && self.sequence.load(Relaxed) == before).then_some(value)
    }
}

/// The measurements in the bytes of a limits file, for the host's own display and for a meter that continues
/// where another stopped; `None` if there are too few bytes. A line with a write in progress reads as not
/// measured. The caller reads the file twice: bytes that are equal both times are not torn.
pub fn measurements(bytes: &[u8]) -> Option<[Measurement; MAX_DEVICES]> {
    let lines = bytes.get(LINES..LINES + MAX_DEVICES * size_of::<Measured>())?;
    let mut all = [Measurement::default(); MAX_DEVICES];
    for (value, line) in all.iter_mut().zip(lines.chunks_exact(size_of::<Measured>())) {
        if word(line, 0).is_multiple_of(2) {
            *value = Measurement {
                until: long(line, 8),
                own_nanoseconds: long(line, 16),
                memory_bytes: long(line, 32),
                written: long(line, 40),
                unbooked_bytes: long(line, 48) & !WITHHELD,
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

const _: () = assert!(core::mem::offset_of!(Measured, lent) == 4);
const _: () = assert!(core::mem::offset_of!(Measured, until) == 8);
const _: () = assert!(core::mem::offset_of!(Measured, own_nanoseconds) == 16);
const _: () = assert!(core::mem::offset_of!(Measured, source) == 24);
const _: () = assert!(core::mem::offset_of!(Measured, memory_bytes) == 32);
const _: () = assert!(core::mem::offset_of!(Measured, written) == 40);
const _: () = assert!(core::mem::offset_of!(Measured, unbooked) == 48);

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::limits::tests::{bytes_of, empty};

    const SEEN: Measurement = Measurement {
        until: u64::MAX,
        own_nanoseconds: 3,
        memory_bytes: 5 << 30,
        written: 6,
        unbooked_bytes: 7,
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
    fn no_library_of_an_earlier_version_lowers_its_limit_or_takes_itself_for_alone() {
        let file = empty();
        let line = &file.measured[0];
        let mut sources = [1, 2].map(|until| {
            line.set(&Measurement { until, unbooked_bytes: u64::MAX, ..SEEN });
            assert_eq!((line.lent.load(Relaxed), line.unbooked.load(Relaxed) >> 63), (0, 0));
            line.source.load(Relaxed) & !BY_RECORD
        });
        sources.sort_unstable();
        assert_ne!(sources[0], sources[1]);
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
