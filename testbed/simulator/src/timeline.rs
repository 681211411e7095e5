//! A GPU's time line: when the work of all processes runs, and how long each process kept the GPU busy.
//!
//! [`fifo`] is a GPU that works in the order of submission, [`slices`] one whose processes take turns. `runs`
//! records the work of either; busy time is computed from it.

mod fifo;
mod runs;
mod slices;

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::clock;
use crate::lock::Owner;
use crate::session::Session;
use crate::state::{Gpu, RUNS};

pub use slices::Asked;

/// Longest sleep of a waiter, in nanoseconds. It then reclaims dead processes' resources and checks again.
const NAP: u64 = 4_000_000;
/// Shorter waits are busy waits, in nanoseconds.
const SPIN: u64 = 60_000;

/// The end of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// On a GPU that works in the order of submission: a moment.
    End(fifo::End),
    /// On a GPU that slices: a place on the process's line.
    Place(slices::Place),
}

impl Default for Mark {
    /// Returns the end of no work, which has always passed.
    fn default() -> Self {
        Self::End(fifo::End::default())
    }
}

/// The end of a piece of work, and the moment at which it ends.
#[derive(Clone)]
pub struct Stamp {
    /// The end itself.
    pub mark: Mark,
    /// Set on a GPU that slices, where the moment is not known at submission.
    moment: Option<slices::Moment>,
}

fn in_turns(gpu: &Gpu) -> bool {
    gpu.turns.slice.load(Ordering::Relaxed) != 0
}

/// Queues `length` nanoseconds of work. On a GPU that works in the order of submission it starts at `after`
/// or later.
pub fn submit(gpu: &Gpu, session: &Session, length: u64, after: u64) -> Mark {
    if in_turns(gpu) {
        return Mark::Place(slices::submit(gpu, session, length));
    }
    let _guard = session.lock(&gpu.time_lock);
    Mark::End(fifo::submit(gpu, session.owner, length, after))
}

/// Queues a stamp of the moment at which the work queued so far has ended. `asked` is the process's list for
/// this GPU.
pub fn stamp(gpu: &Gpu, session: &Session, asked: &Asked, after: u64) -> Stamp {
    if in_turns(gpu) {
        let (place, moment) = asked.ask(gpu, session);
        return Stamp { mark: Mark::Place(place), moment: Some(moment) };
    }
    Stamp { mark: submit(gpu, session, 0, after), moment: None }
}

/// Runs or stops a process on a GPU that slices, and sets the length of its turns in nanoseconds; 0: the
/// GPU's default.
pub fn steer(gpu: &Gpu, session: &Session, owner: Owner, runs: bool, slice: u64) {
    if in_turns(gpu) {
        slices::steer(gpu, session, owner, runs, slice);
    }
}

/// Drops the work of a dead process that has not run yet. The caller holds the time lock.
pub fn cancel(gpu: &Gpu, session: &Session, dead: Owner) {
    if in_turns(gpu) {
        slices::cancel(gpu, session, dead);
    } else {
        fifo::cancel(gpu, dead);
    }
}

impl Mark {
    /// Encodes the mark as numbers, so that other processes of the node can read it.
    #[must_use]
    pub fn words(self) -> [u64; 4] {
        match self {
            Self::End(end) => [0, end.time, end.cuts, 0],
            Self::Place(place) => [1, place.owner.slot.into(), place.owner.generation.into(), place.position],
        }
    }

    /// Decodes a mark from the numbers of [`Mark::words`].
    #[must_use]
    pub fn of_words([kind, first, second, third]: [u64; 4]) -> Self {
        let number = |word| u32::try_from(word).unwrap_or(u32::MAX);
        if kind == 0 {
            return Self::End(fifo::End { time: first, cuts: second });
        }
        let owner = Owner { slot: number(first), generation: number(second) };
        Self::Place(slices::Place { owner, position: third })
    }

    /// Whether work that `session`'s process queues from now on follows this work without waiting for it:
    /// true on a GPU that slices, for work of the same process.
    #[must_use]
    pub fn precedes(&self, session: &Session) -> bool {
        matches!(self, Self::Place(place) if place.owner == session.owner)
    }

    /// Returns when the marked work ends, if that is known before it has run.
    #[must_use]
    pub fn end(&self, gpu: &Gpu) -> Option<u64> {
        match self {
            Self::End(end) => Some(end.time(gpu)),
            Self::Place(_) => None,
        }
    }

    /// Whether the marked work has ended.
    #[must_use]
    pub fn done(&self, gpu: &Gpu, session: &Session) -> bool {
        match self {
            Self::End(end) => end.passed(gpu),
            Self::Place(place) => place.passed(gpu, session),
        }
    }

    /// Returns the nanoseconds until the marked work ends, if nothing intervenes.
    fn left(&self, gpu: &Gpu, session: &Session) -> u64 {
        match self {
            Self::End(end) => end.time(gpu).saturating_sub(clock::now()),
            Self::Place(place) => place.left(gpu, session),
        }
    }

    /// Sleeps until the marked work has ended.
    pub fn wait(&self, gpu: &Gpu, session: &Session) {
        while !self.done(gpu, session) {
            let left = self.left(gpu, session);
            if left <= SPIN {
                std::thread::yield_now();
                continue;
            }
            std::thread::sleep(Duration::from_nanos((left - SPIN / 2).min(NAP)));
            if left > NAP {
                session.sweep();
            }
        }
    }
}

impl Stamp {
    /// Returns the moment in nanoseconds of the device clock, once it has come.
    #[must_use]
    pub fn time(&self, gpu: &Gpu, session: &Session, asked: &Asked) -> Option<u64> {
        match (self.mark, &self.moment) {
            (Mark::Place(place), Some(moment)) => asked.time(gpu, session, place, moment),
            (mark, _) if mark.done(gpu, session) => mark.end(gpu),
            _ => None,
        }
    }
}

/// Busy time of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Slot and generation of the process, because slots are reused.
    pub owner: Owner,
    /// Busy time in nanoseconds.
    pub time: u64,
}

/// Lists the processes whose work began on `gpu`, and when, in order, starting with the run of number `from`.
/// Also returns the number to pass next.
#[must_use]
pub fn began(gpu: &Gpu, session: &Session, from: u64) -> (Vec<(Owner, u64)>, u64) {
    let _guard = session.lock(&gpu.time_lock);
    if in_turns(gpu) {
        slices::advance(gpu, session);
    }
    let (now, count) = (clock::now(), gpu.run_count.load(Ordering::Acquire));
    let from = from.max(count.saturating_sub(RUNS as u64));
    // On a GPU that works in the order of submission, future work is already planned.
    let has_begun = |index: &u64| runs::run(gpu, *index).start.load(Ordering::Relaxed) <= now;
    let begun = (from..count).take_while(has_begun).map(|index| runs::run(gpu, index));
    let begun: Vec<(Owner, u64)> =
        begun.map(|run| (runs::owner(run), run.start.load(Ordering::Relaxed))).collect();
    let next = from + begun.len() as u64;
    (begun, next)
}

/// Returns how long each process kept `gpu` busy between the moments `from` and `to` of the device clock.
#[must_use]
pub fn busy(gpu: &Gpu, session: &Session, from: u64, to: u64) -> Vec<Busy> {
    let _guard = session.lock(&gpu.time_lock);
    if in_turns(gpu) {
        slices::advance(gpu, session);
    }
    let mut sums: Vec<Busy> = Vec::new();
    for run in runs::newest(gpu, |run| run.end.load(Ordering::Acquire) > from) {
        let (start, end) = (run.start.load(Ordering::Relaxed), run.end.load(Ordering::Relaxed));
        let part = end.min(to).saturating_sub(start.max(from));
        let time = runs::share(run.busy.load(Ordering::Relaxed), part, end.saturating_sub(start));
        if time == 0 {
            continue;
        }
        let owner = runs::owner(run);
        match sums.iter_mut().find(|sum| sum.owner == owner) {
            Some(sum) => sum.time += time,
            None => sums.push(Busy { owner, time }),
        }
    }
    sums
}
