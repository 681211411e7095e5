//! Memory that a process's contexts use on a GPU in addition to its own allocations: code, local memory and
//! the driver's own structures. A library charges the cost in advance. The host's measurement of the real use
//! replaces it.

use core::sync::atomic::Ordering::Relaxed;

use super::LimitLine;

const MIB: u64 = 1 << 20;

/// Memory that the contexts of one process use on one GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextCost {
    /// A context in which nothing was loaded. Without this much room no context is created.
    pub bare: u64,
    /// The most that was observed once libraries had loaded their code. The difference to `bare` is kept
    /// free.
    pub most: u64,
}

impl ContextCost {
    /// The charge on a GPU without observations. An H200 with driver 580 took 520 MiB bare and 676 MiB with
    /// cuBLAS loaded; no other library or GPU was seen to take more than `most`.
    pub const UNKNOWN: Self = Self { bare: 520 * MIB, most: 776 * MIB };
}

/// Memory that a container's contexts really use, as a fraction of the charge for them in the usage file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overhead {
    /// The fraction, in 65,536ths.
    part: u32,
    /// Whether the host measured within the last second.
    is_fresh: bool,
}

/// [`Overhead::part`] if contexts use exactly the charged memory.
const EVEN: u32 = 1 << 16;
/// A measurement older than this is stale, in units of [`TICK`].
const FRESH: u32 = 954;
/// The unit of a measurement's time: 2^20 nanoseconds, about a millisecond.
const TICK: u32 = 20;

impl Overhead {
    /// The overhead of contexts that use `taken` bytes and are charged `charged`; `None` if nothing is
    /// charged.
    pub fn new(taken: u64, charged: u64) -> Option<Self> {
        let part = (u128::from(taken) * u128::from(EVEN)).div_ceil(u128::from(charged).max(1));
        // 0 means "no figure" in the file.
        let part = u32::try_from(part).unwrap_or(u32::MAX).max(1);
        (charged > 0).then_some(Self { part, is_fresh: true })
    }

    /// Returns the larger of the two.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        if self.part >= other.part { self } else { other }
    }

    /// Returns the memory that contexts with a charge of `charged` bytes really use.
    pub fn of(self, charged: u64) -> u64 {
        let bytes = u128::from(charged) * u128::from(self.part) / u128::from(EVEN);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// Whether contexts use more than is charged.
    pub const fn is_beyond(self) -> bool {
        self.part > EVEN
    }
}

impl LimitLine {
    /// Returns the charge for a process's contexts.
    pub fn context_cost(&self) -> ContextCost {
        let [bare, most] = [&self.context_mebibytes, &self.context_most_mebibytes]
            .map(|word| u64::from(word.load(Relaxed)) * MIB);
        if bare == 0 { ContextCost::UNKNOWN } else { ContextCost { bare, most: most.max(bare) } }
    }

    /// Sets the charge for contexts from now on, rounded up to MiB.
    pub fn set_context_cost(&self, cost: ContextCost) {
        let mebibytes = |bytes: u64| u32::try_from(bytes.div_ceil(MIB)).unwrap_or(u32::MAX);
        self.context_most_mebibytes.store(mebibytes(cost.most), Relaxed);
        self.context_mebibytes.store(mebibytes(cost.bare), Relaxed);
    }

    /// Writes the host's measurement at `now`, in monotonic nanoseconds; `None` if it has none.
    pub fn set_overhead(&self, overhead: Option<Overhead>, now: u64) {
        let part = overhead.map_or(0, |overhead| overhead.part);
        self.overhead.store(u64::from(ticks(now)) << 32 | u64::from(part), Relaxed);
    }

    /// Returns the host's last measurement, with `now` in monotonic nanoseconds. A figure that is more than a
    /// second old counts only if it is above the charge, since a context's code does not go away.
    pub fn overhead(&self, now: impl FnOnce() -> u64) -> Option<Overhead> {
        let word = self.overhead.load(Relaxed);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves of the word")]
        let (at, part) = ((word >> 32) as u32, word as u32);
        if part == 0 {
            return None;
        }
        let is_fresh = ticks(now()).wrapping_sub(at) <= FRESH;
        Some(Overhead { part, is_fresh }).filter(|overhead| is_fresh || overhead.is_beyond())
    }

    /// Whether contexts used more than their charge at the last measurement.
    #[inline]
    pub fn is_beyond_cost(&self) -> bool {
        #[expect(clippy::cast_possible_truncation, reason = "the lower half of the word")]
        let part = self.overhead.load(Relaxed) as u32;
        part > EVEN
    }
}

/// The lower bits of a time in ticks; they wrap after 52 days.
#[expect(clippy::cast_possible_truncation, reason = "the lower bits are meant")]
const fn ticks(now: u64) -> u32 {
    (now >> TICK) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_line_without_a_cost_charges_the_upper_bound() {
        let line = LimitLine::default();
        assert_eq!(line.context_cost(), ContextCost::UNKNOWN);
        line.set_context_cost(ContextCost { bare: 105 * MIB, most: 200 * MIB - 1 });
        assert_eq!(line.context_cost(), ContextCost { bare: 105 * MIB, most: 200 * MIB });
        line.set_context_cost(ContextCost { bare: 105 * MIB, most: 0 });
        assert_eq!(line.context_cost(), ContextCost { bare: 105 * MIB, most: 105 * MIB });
    }

    #[test]
    fn an_overhead_scales_with_what_is_charged_and_is_never_rounded_down_by_much() {
        for (taken, charged, of, want) in [
            (612, 776, 776, 612),
            (612, 776, 2 * 776, 2 * 612),
            (776, 776, 776, 776),
            (3000, 776, 776, 3000),
            (0, 776, 776, 0),
        ] {
            let overhead = Overhead::new(taken * MIB, charged * MIB).unwrap();
            let got = overhead.of(of * MIB);
            assert!(got.abs_diff(want * MIB) < MIB / 16, "{taken} of {charged} for {of}: {got}");
        }
        assert_eq!(Overhead::new(5, 0), None);
        assert_eq!(Overhead::new(u64::MAX, 1).unwrap().of(u64::MAX), u64::MAX);
    }

    #[test]
    fn an_old_figure_counts_only_where_it_is_above_the_charge() {
        let line = LimitLine::default();
        let now = 100 * SECOND;
        assert_eq!(line.overhead(|| now), None);
        for (taken, age, want) in
            [(600, 0, true), (600, SECOND, true), (600, 2 * SECOND, false), (900, 2 * SECOND, true)]
        {
            line.set_overhead(Overhead::new(taken * MIB, 776 * MIB), now);
            assert_eq!(line.overhead(|| now + age).is_some(), want, "{taken} MiB after {age} ns");
            assert_eq!(line.is_beyond_cost(), taken > 776);
        }
        line.set_overhead(None, now);
        assert_eq!((line.overhead(|| now), line.is_beyond_cost()), (None, false));
    }
}
