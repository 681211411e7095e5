//! How long recent launches of each kind took, and the assumed cost of the next one.

use super::key::{Key, PLACES};

/// The number of timings over which a cost is averaged.
const LAST: u64 = 4;

#[repr(C)]
pub(super) struct Costs {
    kinds: [Kind; PLACES],
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Kind {
    tag: u32,
    /// Timings seen; 0: nothing is known.
    count: u32,
    /// Timings in a row that were far above the cost.
    above: u32,
    cost: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Self { kinds: [Kind::default(); PLACES] }
    }
}

impl Costs {
    /// The assumed cost of a launch of `key`, in nanoseconds; `None`: this kind was never timed.
    pub(super) fn cost(&self, key: Key) -> Option<u64> {
        let kind = self.kinds.get(key.place())?;
        (kind.tag == key.tag() && kind.count > 0).then_some(kind.cost)
    }

    /// Adds a timing of `key`. Returns the assumed cost of the next launch. A cost that rises is adopted
    /// within two timings.
    pub(super) fn add(&mut self, key: Key, time: u64) -> u64 {
        let Some(kind) = self.kinds.get_mut(key.place()) else { return time };
        if kind.tag != key.tag() {
            *kind = Kind { tag: key.tag(), ..Kind::default() };
        }
        kind.add(time)
    }

    pub(super) fn forget(&mut self, key: Key) {
        if let Some(kind) = self.kinds.get_mut(key.place()).filter(|kind| kind.tag == key.tag()) {
            *kind = Kind::default();
        }
    }
}

impl Kind {
    fn add(&mut self, time: u64) -> u64 {
        self.count = self.count.saturating_add(1);
        self.above = if time > above(self.cost) { self.above.saturating_add(1) } else { 0 };
        self.cost = match u64::from(self.count) {
            1 => time,
            _ if self.above >= 2 => time,
            count => average(self.cost, time, count.min(LAST)),
        };
        self.cost
    }
}

/// 1.3 times `time`.
const fn above(time: u64) -> u64 {
    time.saturating_add(time / 10 * 3)
}

/// `old` moved by one part in `parts` towards `new`.
fn average(old: u64, new: u64, parts: u64) -> u64 {
    let parts = parts.max(1);
    if new > old { old + (new - old) / parts } else { old - (old - new) / parts }
}
