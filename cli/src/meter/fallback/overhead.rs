//! Measures what containers' contexts really take of a GPU: the driver's count of their processes, less
//! what their books say that programs allocated.

use std::collections::HashMap;

use gpushare_region::{DeviceUsage, Overhead};

use crate::meter::account::Held;

/// Results of earlier polls, by lease and line.
#[derive(Debug, Default)]
pub struct Overheads(HashMap<(i64, usize), Known>);

/// State of one container's contexts on one GPU.
#[derive(Debug, Default)]
struct Known {
    /// The last valid poll.
    last: Option<Poll>,
    /// By how much contexts were last found to take more than their charge, in bytes.
    excess: u64,
}

/// One poll, sizes in bytes.
#[derive(Clone, Copy, Debug)]
struct Poll {
    /// Charge for contexts in the books.
    charged: u64,
    /// How many processes the driver counts.
    processes: u32,
    /// Memory that contexts take.
    taken: u64,
}

/// Change to the limits file after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Write this; `None` where the container has no contexts.
    Is(Option<Overhead>),
    /// Write nothing: the figure in the file stays until it is too old.
    Unknown,
}

impl Overheads {
    /// Evaluates one poll: the books `before` and `after` the driver was asked, and its count `held`, `None`
    /// where the driver failed or does not report memory by process.
    ///
    /// A poll is valid if the books did not change meanwhile, because a free between the readings would look
    /// like a context. Two consecutive valid polls must see the same contexts, because a new context is still
    /// growing. The result that is closer to the charge counts.
    ///
    /// A known excess holds until two valid polls replace it: code that was loaded does not go away because a
    /// process started, or because the driver did not answer.
    pub fn poll(
        &mut self,
        key: (i64, usize),
        before: &DeviceUsage,
        held: Option<Held>,
        after: &DeviceUsage,
    ) -> Figure {
        let known = self.0.entry(key).or_default();
        let charged = after.context_bytes;
        let allocated = after.bytes.saturating_sub(charged);
        let is_stable = (before.bytes, before.context_bytes) == (after.bytes, charged);
        let Some(Held { bytes, processes }) = held.filter(|_| is_stable) else {
            return known.in_doubt(charged);
        };
        if charged == 0 {
            *known = Known::default();
            return Figure::Is(None);
        }
        // The driver cannot count less than was allocated: a process is still making its context.
        let Some(taken) = bytes.checked_sub(allocated).filter(|_| processes > 0) else {
            return known.in_doubt(charged);
        };
        let last = known.last.replace(Poll { charged, processes, taken });
        let Some(last) = last.filter(|last| (last.charged, last.processes) == (charged, processes)) else {
            return known.in_doubt(charged);
        };
        let (low, high) = (taken.min(last.taken), taken.max(last.taken));
        let taken = charged.clamp(low, high);
        known.excess = taken.saturating_sub(charged);
        Figure::Is(Overhead::new(taken, charged))
    }

    /// Forgets leases that ended.
    pub fn retain(&mut self, living: impl Fn(i64) -> bool) {
        self.0.retain(|(lease, _), _| living(*lease));
    }
}

impl Known {
    /// Repeats a known excess after an invalid poll, for contexts that are charged as `charged`.
    fn in_doubt(&self, charged: u64) -> Figure {
        if self.excess == 0 {
            return Figure::Unknown;
        }
        Overhead::new(charged.saturating_add(self.excess), charged)
            .map_or(Figure::Unknown, |it| Figure::Is(Some(it)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const KEY: (i64, usize) = (1, 0);

    fn books(bytes: u64, context_bytes: u64) -> DeviceUsage {
        DeviceUsage { bytes: bytes * MIB, context_bytes: context_bytes * MIB, ..DeviceUsage::default() }
    }

    fn held(bytes: u64, processes: u32) -> Option<Held> {
        Some(Held { bytes: bytes * MIB, processes })
    }

    #[test]
    fn a_figure_is_believed_at_the_second_poll_of_the_same_contexts() {
        let mut overheads = Overheads::default();
        // By the driver, processes, by the books, of it contexts: what contexts take, where that is known.
        for (bytes, processes, booked, contexts, want) in [
            (300, 1, 776, 776, None), // the context is being made
            (520, 1, 776, 776, Some(520)),
            (1520, 1, 1776, 776, Some(520)),
            (1520, 1, 1800, 776, Some(520)), // 24 MiB are charged and not yet there
            (1612, 1, 1776, 776, Some(612)),
            (2200, 2, 2552, 1552, None), // another process
            (2200, 2, 2552, 1552, Some(1200)),
            (200, 2, 2552, 1552, None), // less than was allocated
            (2200, 2, 2552, 1552, Some(1200)),
            (4552, 2, 2552, 1552, Some(1552)), // the second such poll counts
            (4552, 2, 2552, 1552, Some(3552)),
            (2200, 2, 2552, 1552, Some(1552)),
            (2200, 2, 2552, 1552, Some(1200)),
        ] {
            let books = books(booked, contexts);
            let figure = overheads.poll(KEY, &books, held(bytes, processes), &books);
            let found = match figure {
                Figure::Is(Some(overhead)) => Some(overhead.of(contexts * MIB).div_ceil(MIB)),
                _ => None,
            };
            let near = |(found, want): (u64, u64)| found.abs_diff(want) <= 1;
            assert_eq!(found.is_some(), want.is_some(), "{bytes} of {booked}: {found:?}");
            assert!(found.zip(want).is_none_or(near), "{bytes} of {booked}: {found:?} for {want:?}");
        }
        let none = DeviceUsage::default();
        assert_eq!(overheads.poll(KEY, &none, held(0, 0), &none), Figure::Is(None));
    }

    #[test]
    fn books_that_change_while_the_driver_is_asked_say_nothing() {
        let mut overheads = Overheads::default();
        let (full, empty) = (books(3848, 776), books(776, 776));
        for _ in 0..3 {
            // 3 GiB are freed after the driver has counted them.
            assert_eq!(overheads.poll(KEY, &full, held(3592, 1), &empty), Figure::Unknown);
        }
    }

    #[test]
    fn an_excess_holds_while_polls_say_nothing() {
        let mut overheads = Overheads::default();
        let one = books(776, 776);
        let beyond = Figure::Is(Overhead::new(3776 * MIB, 776 * MIB));
        overheads.poll(KEY, &one, held(3776, 1), &one);
        assert_eq!(overheads.poll(KEY, &one, held(3776, 1), &one), beyond);
        assert_eq!(overheads.poll(KEY, &one, None, &one), beyond, "the driver fails");
        // Another process starts: its context is charged, and the excess stays what it was.
        let two = books(1552, 1552);
        let both = Figure::Is(Overhead::new((1552 + 3000) * MIB, 1552 * MIB));
        assert_eq!(overheads.poll(KEY, &one, held(3776, 1), &two), both);
        assert_eq!(overheads.poll(KEY, &two, held(4296, 2), &two), both);
    }

    #[test]
    fn leases_that_ended_are_forgotten() {
        let mut overheads = Overheads::default();
        let books = books(776, 776);
        overheads.poll(KEY, &books, held(520, 1), &books);
        overheads.retain(|lease| lease != 1);
        assert_eq!(overheads.poll(KEY, &books, held(520, 1), &books), Figure::Unknown);
    }
}
