//! How long recent launches of each kind took, and what the next one is assumed to cost.

use super::key::{Key, PLACES};

/// How many last timings of a kind are kept.
const LAST: usize = 4;

#[repr(C)]
pub(super) struct Samples {
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
    last: [u64; LAST],
}

impl Default for Samples {
    fn default() -> Self {
        Self { kinds: [Kind::default(); PLACES] }
    }
}

impl Samples {
    /// What a launch of `key` is assumed to cost, in nanoseconds; `None`: this kind was never timed.
    pub(super) fn cost(&self, key: Key) -> Option<u64> {
        let kind = self.kinds.get(key.place())?;
        (kind.tag == key.tag() && kind.count > 0).then_some(kind.cost)
    }

    /// Adds a timing of `key`. Returns what the launch itself probably took, and the assumed cost of the next
    /// one.
    ///
    /// Other tenants' turns on the GPU only ever lengthen a timing. A timing far above the least of the last
    /// few is therefore cut, unless this process is `alone`. A cost that really rises is adopted within two
    /// timings.
    pub(super) fn add(&mut self, key: Key, time: u64, alone: bool) -> (u64, u64) {
        let Some(kind) = self.kinds.get_mut(key.place()) else { return (time, time) };
        if kind.tag != key.tag() {
            *kind = Kind { tag: key.tag(), ..Kind::default() };
        }
        kind.add(time, alone)
    }

    pub(super) fn forget(&mut self, key: Key) {
        if let Some(kind) = self.kinds.get_mut(key.place()).filter(|kind| kind.tag == key.tag()) {
            *kind = Kind::default();
        }
    }
}

impl Kind {
    fn add(&mut self, time: u64, alone: bool) -> (u64, u64) {
        let place = self.count as usize % LAST;
        if let Some(last) = self.last.get_mut(place) {
            *last = time;
        }
        self.count = self.count.saturating_add(1);
        let least = self.last.iter().take(self.count as usize).copied().min().unwrap_or(time);
        let likely = if alone { time } else { time.min(above(least)) };
        self.above = if likely > above(self.cost) { self.above.saturating_add(1) } else { 0 };
        self.cost = match u64::from(self.count) {
            1 => time,
            _ if self.above >= 2 => likely,
            count => average(self.cost, likely, count.min(4)),
        };
        (likely, self.cost)
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
