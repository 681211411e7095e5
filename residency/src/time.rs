//! Computes how long each context had the engine.

use std::collections::{BTreeMap, VecDeque};

use crate::event::{Event, Holder, Kind};

/// Most lines that wait to be settled. A card makes some thousands a second.
const MOST_WAITING: usize = 1 << 17;

/// The time that each context had the engine within an interval, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Time of each context.
    pub by: BTreeMap<Holder, u64>,
    /// How often each context took over the engine from another.
    pub taken: BTreeMap<Holder, u32>,
    /// Whether one context took over from another. If not, the context that is there may have no work.
    pub is_contested: bool,
    /// How many switches the record lost.
    pub lost: u64,
}

/// The state of the engine, according to the record.
#[derive(Debug, Default)]
pub struct Engine {
    /// Lines in the order of their times.
    waiting: VecDeque<Event>,
    holder: Option<Holder>,
    /// Time up to which holders have been credited, in nanoseconds of the card's clock.
    settled: u64,
    sequence: Option<u16>,
    /// The current or latest holder.
    last: Option<Holder>,
    lost: u64,
}

impl Engine {
    /// Creates an engine with no history before this moment of the card's clock.
    pub fn since(moment: u64) -> Self {
        Self { settled: moment, ..Self::default() }
    }

    /// Returns the holder at the end of the settled time.
    pub fn holder(&self) -> Option<Holder> {
        self.holder
    }

    /// Adds a line of the record. A line that is out of order takes the time of the line before it.
    pub fn note(&mut self, event: Event) {
        // A switch has two lines. The documentation does not say whether both share a number or each has its
        // own.
        let step = self.sequence.map_or(0, |last| event.sequence.wrapping_sub(last));
        self.sequence = Some(event.sequence);
        if step > 1 {
            self.lose(u64::from(step) - 1);
        }
        if self.waiting.len() < MOST_WAITING {
            let at = event.at.max(self.waiting.back().map_or(0, |last| last.at));
            self.waiting.push_back(Event { at, ..event });
        } else {
            self.lose(1);
        }
    }

    /// Records that `lines` lines are missing from here on: the holder during that time is unknown.
    pub fn lose(&mut self, lines: u64) {
        self.lost = self.lost.saturating_add(lines);
        let at = self.waiting.back().map_or(self.settled, |last| last.at);
        if self.waiting.len() < MOST_WAITING {
            self.waiting.push_back(Event { kind: Kind::Reset, at, sequence: self.sequence.unwrap_or(0) });
        }
    }

    /// Credits the holders with the time from the last settlement until this moment of the card's clock. All
    /// lines until then must have been added.
    pub fn settle(&mut self, until: u64) -> Held {
        let mut held = Held { lost: std::mem::take(&mut self.lost), ..Held::default() };
        while let Some(event) = self.waiting.front().copied().filter(|event| event.at <= until) {
            self.waiting.pop_front();
            self.spend(event.at, &mut held);
            self.holder = match event.kind {
                Kind::Start(holder) => {
                    if self.last.is_some_and(|last| last != holder) {
                        held.is_contested = true;
                        *held.taken.entry(holder).or_default() += 1;
                    }
                    self.last = Some(holder);
                    Some(holder)
                }
                // End of a context whose start was lost.
                Kind::End(holder) if self.holder != Some(holder) => self.holder,
                Kind::Other => self.holder,
                Kind::End(_) | Kind::Reset => None,
            };
        }
        self.spend(until, &mut held);
        held
    }

    fn spend(&mut self, until: u64, held: &mut Held) {
        let length = until.saturating_sub(self.settled);
        self.settled = self.settled.max(until);
        if let Some(holder) = self.holder.filter(|_| length > 0) {
            *held.by.entry(holder).or_default() += length;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn holder(context: u32) -> Holder {
        Holder { pid: 1000 + context, context }
    }

    /// Builds an engine that two contexts used in turn, 3 and 7 ms of each 10 ms. Switches take 0.1 ms of
    /// that.
    fn two(until: u64, skipped: std::ops::Range<u16>) -> Engine {
        let mut engine = Engine::since(0);
        let mut sequence = 0;
        let mut note = |kind, at| {
            sequence += 1;
            if !skipped.contains(&sequence) {
                engine.note(Event { kind, at, sequence });
            }
        };
        for begin in (0..until).step_by(10_000_000) {
            note(Kind::Start(holder(1)), begin);
            note(Kind::End(holder(1)), begin + 3 * MS - MS / 10);
            note(Kind::Start(holder(2)), begin + 3 * MS);
            note(Kind::End(holder(2)), begin + 10 * MS - MS / 10);
        }
        engine
    }

    #[test]
    fn time_is_given_to_who_had_the_engine_and_to_nobody_while_it_switches() {
        let mut engine = two(1000 * MS, 0..0);
        let mut sums = [0, 0];
        for until in (1..=10).map(|step| step * 100 * MS + MS) {
            let held = engine.settle(until);
            assert!(held.is_contested && held.lost == 0);
            assert!((9..=11).contains(&held.taken[&holder(1)]), "{held:?}");
            sums[0] += held.by.get(&holder(1)).copied().unwrap_or(0);
            sums[1] += held.by.get(&holder(2)).copied().unwrap_or(0);
        }
        assert_eq!(sums, [290 * MS, 690 * MS]);
    }

    #[test]
    fn who_is_alone_has_the_engine_and_nobody_contests_it() {
        let mut engine = Engine::since(0);
        engine.note(Event { kind: Kind::Start(holder(1)), at: 5 * MS, sequence: 1 });
        assert_eq!(engine.settle(10 * MS).by[&holder(1)], 5 * MS);
        let held = engine.settle(30 * MS);
        assert_eq!((held.by[&holder(1)], held.is_contested), (20 * MS, false));
        // The context returns, and no other had the engine meanwhile.
        engine.note(Event { kind: Kind::End(holder(1)), at: 31 * MS, sequence: 2 });
        engine.note(Event { kind: Kind::Start(holder(1)), at: 32 * MS, sequence: 3 });
        let held = engine.settle(40 * MS);
        assert_eq!((held.by[&holder(1)], held.is_contested), (9 * MS, false));
        engine.note(Event { kind: Kind::End(holder(1)), at: 41 * MS, sequence: 4 });
        engine.note(Event { kind: Kind::Start(holder(2)), at: 41 * MS, sequence: 5 });
        assert!(engine.settle(50 * MS).is_contested);
    }

    #[test]
    fn what_is_lost_is_counted_and_given_to_nobody() {
        let mut whole = two(100 * MS, 0..0);
        let mut torn = two(100 * MS, 10..20);
        let (whole, torn) = (whole.settle(100 * MS), torn.settle(100 * MS));
        assert_eq!((whole.lost, torn.lost), (0, 10));
        // The holder from line 9 at 20 ms to line 20 at 49.9 ms is unknown.
        let sum = |held: &Held| held.by.values().sum::<u64>();
        let missing = sum(&whole) - sum(&torn);
        assert_eq!(missing, 3 * (10 * MS - MS / 5));
        assert!(torn.by.iter().all(|(holder, time)| *time <= whole.by[holder]), "{torn:?}");
    }

    #[test]
    fn a_line_that_is_not_about_who_has_the_engine_is_not_lost_and_changes_nothing() {
        let mut engine = Engine::since(0);
        let kinds = [Kind::Start(holder(1)), Kind::Other, Kind::Other, Kind::End(holder(1))];
        for (sequence, kind) in (1..).zip(kinds) {
            engine.note(Event { kind, at: u64::from(sequence) * MS, sequence });
        }
        let held = engine.settle(10 * MS);
        assert_eq!((held.by[&holder(1)], held.lost), (3 * MS, 0));
    }

    #[test]
    fn lines_that_come_late_or_never_end_give_no_time_twice() {
        let mut engine = Engine::since(0);
        engine.note(Event { kind: Kind::Start(holder(1)), at: 20 * MS, sequence: 1 });
        engine.note(Event { kind: Kind::Start(holder(2)), at: 10 * MS, sequence: 2 });
        let held = engine.settle(30 * MS);
        assert_eq!(held.by.values().sum::<u64>(), 10 * MS);
        // The end of context 2 has the timestamp of the next start.
        engine.note(Event { kind: Kind::End(holder(7)), at: 31 * MS, sequence: 3 });
        assert_eq!(engine.settle(40 * MS).by[&holder(2)], 10 * MS);
        assert_eq!(engine.settle(35 * MS).by.len(), 0, "the clock does not go back");
    }
}
