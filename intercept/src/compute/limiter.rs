//! The slow path of one process on one device, as a state machine. Call it before a launch that credit did
//! not pay for, and report the launch's outcome to it afterwards. One thread at a time uses it.

use gpushare_region::{Bucket, LimitLine};

use super::bucket::Shared;
use super::costs::Costs;
use super::credit::Credit;
use super::key::Key;
use super::share::Share;
use super::{DEPTH, GUESS, LEAST_COST, MICROSECOND, MILLISECOND, PATIENCE, SLICE, UNTIMED};

/// How many launches may be timed at a time. Each owns the pair of events with its number.
pub const TIMED: usize = 32;

/// Delays up to this length are the cost of the event itself, in nanoseconds.
const LEAST_LATE: u64 = 20 * MICROSECOND;

/// State that all processes of the container share on the device, and the credit of this process there.
#[derive(Clone, Copy)]
pub struct Ground<'a> {
    /// The host's grant.
    pub line: &'a LimitLine,
    /// The bucket.
    pub bucket: &'a Bucket,
    /// Credit that this process may spend.
    pub credit: &'a Credit,
    /// Whether some stream of this process is being captured. No launch is then paid from credit, since it
    /// may only be recorded.
    pub capturing: bool,
}

/// The limiter's decision about a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Go to the driver: nothing is limited here.
    Free,
    /// Go to the driver between the two events of pair `0`, then call [`launched`](Limiter::launched) or
    /// [`refused`](Limiter::refused).
    Timed(usize),
    /// Ask again after this many nanoseconds: too much work is unfinished.
    Queued(u64),
    /// Ask again after this many nanoseconds: the share is used up.
    HeldBack(u64),
}

/// The result of a pair of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// The launch has not ended.
    Running,
    /// The launch took this many nanoseconds on the device.
    Took(u64),
    /// The events are gone, or the driver has no answer.
    Lost,
}

/// How far to search for launches that have ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// Up to the first running launch: later launches in its stream have not ended either.
    FirstThatRuns,
    /// All of them.
    All,
}

/// A launch between two events.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Mark {
    /// Order of launches, from 1; 0: this place is free.
    order: u64,
    key: u64,
    /// The charge for it.
    estimate: u64,
    /// Estimated work up to and including this launch.
    position: u64,
    /// When another launch first waited for this one, in monotonic nanoseconds; 0: never.
    waited_since: u64,
    /// Whether the cost of its kind was unknown.
    untimed: bool,
    /// No launch waits for it any more.
    overdue: bool,
    /// Its events show when the launch ended, but not how long it took.
    late: bool,
}

/// All zero bytes are the state to start with.
#[derive(Default)]
#[repr(C)]
pub struct Limiter {
    /// Credit that is neither spent nor passed to the fast path. It may be negative.
    purse: i64,
    /// The total ever drawn.
    drawn: u64,
    /// Position up to which work has ended.
    done: u64,
    orders: u64,
    naps: u32,
    marks: [Mark; TIMED],
    costs: Costs,
    counted: Counted,
}

/// Launches and GPU time of this process since the last call of [`Limiter::count`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counted {
    /// Launches.
    pub launches: u64,
    /// GPU time charged; correcting an overcharge may make it negative.
    pub nanoseconds: i64,
}

impl Limiter {
    /// Decides what a launch of `key` must do at `now`, in monotonic nanoseconds. `timing` reads a pair of
    /// events.
    pub fn ask(
        &mut self,
        ground: &Ground<'_>,
        key: Key,
        now: u64,
        mut timing: impl FnMut(usize) -> Timing,
    ) -> Answer {
        let shared = Shared::new(ground);
        self.collect(ground.credit);
        let Some(share) = Share::now(ground.line) else { return Answer::Free };
        self.reap(&shared, ground.credit, Reach::FirstThatRuns, &mut timing);
        shared.refill(now, share.rate);
        if self.is_too_deep(key) {
            // A stalled stream hides launches that have ended in other streams.
            self.reap(&shared, ground.credit, Reach::All, &mut timing);
        }
        if let Some(nap) = self.wait_for_work(key, now) {
            return Answer::Queued(nap);
        }
        let estimate = self.costs.cost(key).unwrap_or(GUESS);
        if !self.draw(&shared, estimate) {
            return Answer::HeldBack(shared.time_to_credit(share.rate));
        }
        self.mark(ground, key, estimate)
    }

    /// The driver accepted the launch of pair `pair`. `late`: by how many nanoseconds an event may have been
    /// delayed because the processor was busy with something else; `None`: the events were not recorded.
    ///
    /// A late timing of a known kind is ignored. The first timing of a kind is used even if it is late.
    pub fn launched(&mut self, pair: usize, late: Option<u64>) {
        self.counted.launches = self.counted.launches.saturating_add(1);
        let Some(mark) = self.marks.get_mut(pair) else { return };
        match late {
            Some(late) => mark.late = !mark.untimed && late > (mark.estimate / 16).max(LEAST_LATE),
            None => self.clear(pair),
        }
    }

    /// The driver refused the launch of pair `pair`: it costs nothing.
    pub fn refused(&mut self, pair: usize) {
        let estimate = self.marks.get(pair).map_or(0, |mark| mark.estimate);
        self.purse = self.purse.saturating_add_unsigned(estimate);
        self.clear(pair);
    }

    /// Settles the launch of pair `pair` before its events are destroyed. False: it has not ended.
    pub fn settle_one(&mut self, ground: &Ground<'_>, pair: usize, timing: Timing) -> bool {
        self.look(&Shared::new(ground), ground.credit, pair, &mut |_| timing)
    }

    /// The launch of pair `pair` had used the device for up to `time` nanoseconds when its context ended.
    /// This says nothing about the cost of its kind.
    pub fn cut_short(&mut self, ground: &Ground<'_>, pair: usize, time: u64) {
        let estimate = self.marks.get(pair).map_or(0, |mark| mark.estimate);
        let more = i64::try_from(time.saturating_sub(estimate)).unwrap_or(i64::MAX);
        self.charge(&Shared::new(ground), more);
        self.end(pair);
    }

    /// The events of pair `pair` are gone.
    pub fn lost(&mut self, pair: usize) {
        self.clear(pair);
    }

    /// Takes the fast path's credit back, so that every launch asks from now on. Called when a capture
    /// begins.
    pub fn close(&mut self, credit: &Credit) {
        self.collect(credit);
    }

    /// Forgets the cost of `key`: its handle may be reused for something else.
    pub fn forget(&mut self, credit: &Credit, key: Key) {
        self.costs.forget(key);
        credit.forget_cost(key);
    }

    /// Returns the usage since the last call.
    pub fn count(&mut self) -> Counted {
        core::mem::take(&mut self.counted)
    }

    fn collect(&mut self, credit: &Credit) {
        let taken = credit.take();
        self.purse = self.purse.saturating_add(taken.nanoseconds);
        self.counted.launches = self.counted.launches.saturating_add(taken.launches);
    }

    /// Settles the timed launches that have ended, in launch order, and those that no launch waits for.
    fn reap(
        &mut self,
        shared: &Shared<'_>,
        credit: &Credit,
        reach: Reach,
        timing: &mut impl FnMut(usize) -> Timing,
    ) {
        for pair in 0..TIMED {
            if self.marks.get(pair).is_some_and(|mark| mark.order != 0 && mark.overdue) {
                self.look(shared, credit, pair, timing);
            }
        }
        let mut order = 0;
        while let Some(pair) = self.first_after(order) {
            order = self.marks.get(pair).map_or(u64::MAX, |mark| mark.order);
            if !self.look(shared, credit, pair, timing) && reach == Reach::FirstThatRuns {
                return;
            }
        }
    }

    /// Whether the launch of `pair` has ended. If so, settles it.
    fn look(
        &mut self,
        shared: &Shared<'_>,
        credit: &Credit,
        pair: usize,
        timing: &mut impl FnMut(usize) -> Timing,
    ) -> bool {
        match timing(pair) {
            Timing::Running => return false,
            Timing::Took(time) => {
                self.settle_timed(shared, credit, pair, time);
                self.end(pair);
            }
            Timing::Lost => self.clear(pair),
        }
        true
    }

    fn settle_timed(&mut self, shared: &Shared<'_>, credit: &Credit, pair: usize, time: u64) {
        let Some(mark) = self.marks.get(pair).copied().filter(|mark| !mark.late) else { return };
        let key = Key::from_bits(mark.key);
        let time = time.max(1);
        credit.set_cost(key, self.costs.add(key, time));
        self.charge(shared, bounded(time) - bounded(mark.estimate));
    }

    fn charge(&mut self, shared: &Shared<'_>, nanoseconds: i64) {
        shared.charge(nanoseconds);
        self.counted.nanoseconds = self.counted.nanoseconds.saturating_add(nanoseconds);
    }

    /// Whether earlier work has to end before `key` is launched.
    fn is_too_deep(&self, key: Key) -> bool {
        self.is_full() || self.unfinished() > DEPTH.cast_signed() || self.is_unsure_about(key)
    }

    /// How long to wait for unfinished work before the next launch, in nanoseconds; `None`: not at all.
    fn wait_for_work(&mut self, key: Key, now: u64) -> Option<u64> {
        let pair = self.first_after(0)?;
        if !self.is_too_deep(key) {
            self.naps = 0;
            return None;
        }
        let mark = self.marks.get_mut(pair)?;
        if mark.waited_since == 0 {
            mark.waited_since = now;
        }
        if now.saturating_sub(mark.waited_since) > PATIENCE {
            self.give_up_waiting();
            return None;
        }
        self.naps = self.naps.saturating_add(1);
        Some(((30 * MICROSECOND) << self.naps.min(5)).min(MILLISECOND / 4))
    }

    /// Whether launching `key` would queue too much work of unknown length.
    fn is_unsure_about(&self, key: Key) -> bool {
        let mut untimed = self.active().filter(|mark| mark.untimed);
        self.costs.cost(key).is_none()
            && (untimed.clone().count() >= UNTIMED || untimed.any(|mark| mark.key == key.bits()))
    }

    /// Estimated work that was launched and has not ended, without unspent credit.
    fn unfinished(&self) -> i64 {
        self.drawn.wrapping_sub(self.done).cast_signed().saturating_sub(self.purse)
    }

    /// Stops waiting for the work that is queued now: it may itself wait for the next launch.
    fn give_up_waiting(&mut self) {
        let position = self.position();
        for mark in self.marks.iter_mut().filter(|mark| mark.order != 0) {
            mark.overdue = true;
        }
        self.done = position;
        if self.is_full()
            && let Some(oldest) = (0..TIMED).min_by_key(|pair| self.marks.get(*pair).map(|mark| mark.order))
        {
            self.clear(oldest);
        }
    }

    fn is_full(&self) -> bool {
        self.marks.iter().all(|mark| mark.order != 0)
    }

    /// Fills the purse to at least `estimate`. False: the bucket is empty.
    fn draw(&mut self, shared: &Shared<'_>, estimate: u64) -> bool {
        let missing = i64::try_from(estimate).unwrap_or(i64::MAX).saturating_sub(self.purse);
        if missing <= 0 {
            return true;
        }
        if shared.level() <= 0 {
            return false;
        }
        let taken = missing.unsigned_abs().max(SLICE);
        self.drawn = self.drawn.wrapping_add(taken);
        self.purse = self.purse.saturating_add_unsigned(taken);
        self.charge(shared, bounded(taken));
        true
    }

    /// Pays for the launch and hands the rest to the fast path.
    fn mark(&mut self, ground: &Ground<'_>, key: Key, estimate: u64) -> Answer {
        self.purse = self.purse.saturating_sub_unsigned(estimate);
        self.orders += 1;
        let mark = Mark {
            order: self.orders,
            key: key.bits(),
            estimate,
            position: self.position(),
            untimed: self.costs.cost(key).is_none(),
            ..Mark::default()
        };
        let free = self.marks.iter_mut().enumerate().find(|(_, place)| place.order == 0);
        let Some((pair, place)) = free else { return Answer::Queued(MILLISECOND) };
        *place = mark;
        self.naps = 0;
        if !ground.capturing
            && let Ok(purse) = u64::try_from(self.purse)
            && purse >= LEAST_COST
        {
            ground.credit.give(purse);
            self.purse = 0;
        }
        Answer::Timed(pair)
    }

    /// Position of the last launch.
    fn position(&self) -> u64 {
        self.drawn.wrapping_sub(self.purse.cast_unsigned())
    }

    fn active(&self) -> impl Iterator<Item = &Mark> + Clone {
        self.marks.iter().filter(|mark| mark.order != 0 && !mark.overdue)
    }

    /// The first launch after number `order` that a launch may wait for.
    fn first_after(&self, order: u64) -> Option<usize> {
        let marks = self.marks.iter().enumerate().filter(|(_, mark)| mark.order > order && !mark.overdue);
        marks.min_by_key(|(_, mark)| mark.order).map(|(pair, _)| pair)
    }

    /// The launch of `pair` has ended, and with it all launches before it.
    fn end(&mut self, pair: usize) {
        let Some(mark) = self.marks.get(pair) else { return };
        if mark.position.wrapping_sub(self.done).cast_signed() > 0 {
            self.done = mark.position;
        }
        self.clear(pair);
    }

    /// Frees the place of `pair`: nothing more will be known about its launch. A later launch will show when
    /// it has ended.
    fn clear(&mut self, pair: usize) {
        if let Some(mark) = self.marks.get_mut(pair) {
            *mark = Mark::default();
        }
    }
}

/// Limits nanoseconds so that the difference of two values does not overflow. An event may report any value.
fn bounded(nanoseconds: u64) -> i64 {
    const MOST: u64 = 1 << 62;
    nanoseconds.min(MOST).cast_signed()
}

#[cfg(test)]
mod tests;
