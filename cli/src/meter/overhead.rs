//! What containers' contexts really take of a GPU: the driver's count of their processes, less what their books say
//! that programs allocated.

use std::collections::HashMap;

use gpushare_region::{DeviceUsage, Overhead};

/// What earlier looks found, by lease and line.
#[derive(Debug, Default)]
pub struct Overheads(HashMap<(i64, usize), Look>);

/// One look at a container's contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Look {
    /// What its books charge for contexts, in bytes.
    charged: u64,
    /// How many processes the driver counts.
    processes: u32,
    overhead: Overhead,
}

impl Overheads {
    /// What the contexts of one line take, given the driver's count of `held` bytes in `processes`. `None` until two
    /// looks in a row saw the same contexts: one that is being made has not its whole size, and its charge may be
    /// noted later. Of two looks the larger counts, since an allocation that the driver has not made yet is in the
    /// books already.
    pub fn look(
        &mut self,
        key: (i64, usize),
        held: u64,
        processes: u32,
        books: &DeviceUsage,
    ) -> Option<Overhead> {
        let charged = books.context_bytes;
        let allocated = books.bytes.saturating_sub(charged);
        // The driver cannot count less than was allocated: then one of the two figures is wrong.
        let overhead = held.checked_sub(allocated).and_then(|taken| Overhead::new(taken, charged));
        let Some(overhead) = overhead.filter(|_| processes > 0) else {
            self.0.remove(&key);
            return None;
        };
        let last = self.0.insert(key, Look { charged, processes, overhead });
        let last = last.filter(|last| (last.charged, last.processes) == (charged, processes))?;
        Some(overhead.max(last.overhead))
    }

    /// Forgets leases that ended.
    pub fn retain(&mut self, living: impl Fn(i64) -> bool) {
        self.0.retain(|(lease, _), _| living(*lease));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn books(bytes: u64, context_bytes: u64) -> DeviceUsage {
        DeviceUsage { bytes: bytes * MIB, context_bytes: context_bytes * MIB, ..DeviceUsage::default() }
    }

    #[test]
    fn an_overhead_is_believed_at_the_second_look_at_the_same_contexts() {
        let mut overheads = Overheads::default();
        for (held, processes, bytes, contexts, want) in [
            (300, 1, 776, 776, None), // the context is being made
            (520, 1, 776, 776, Some(520)),
            (1520, 1, 1776, 776, Some(520)),
            (1520, 1, 1800, 776, Some(520)), // 24 MiB are charged and not yet there
            (1612, 1, 1776, 776, Some(612)),
            (2200, 2, 2552, 1552, None), // another process
            (2200, 2, 2552, 1552, Some(1200)),
            (200, 2, 2552, 1552, None), // less than was allocated
            (2200, 2, 2552, 1552, None),
            (2200, 2, 2552, 1552, Some(1200)),
            (0, 0, 0, 0, None),
        ] {
            let found = overheads.look((1, 0), held * MIB, processes, &books(bytes, contexts));
            let found = found.map(|overhead| overhead.of(contexts * MIB).div_ceil(MIB));
            let near = |(found, want): (u64, u64)| found.abs_diff(want) <= 1;
            assert!(found.is_some() == want.is_some(), "{held} of {bytes}: {found:?}");
            assert!(found.zip(want).is_none_or(near), "{held} of {bytes}: {found:?} for {want:?}");
        }
    }

    #[test]
    fn leases_that_ended_are_forgotten() {
        let mut overheads = Overheads::default();
        overheads.look((1, 0), 520 * MIB, 1, &books(776, 776));
        overheads.retain(|lease| lease != 1);
        assert_eq!(overheads.look((1, 0), 520 * MIB, 1, &books(776, 776)), None);
    }
}
