//! A process of a trial. It launches through the limiter as the hooks do, and sleeps at the same points.

use gpushare_intercept::compute::{Answer, Credit, Key, Limiter, TIMED, Timing};
use gpushare_simulator::virtual_gpu::VirtualGpu;

use crate::books::Books;
use crate::chance::Chance;
use crate::container::Load;
use crate::time::MICROSECOND;

/// Processor time of a launch, in nanoseconds.
const LAUNCH: u64 = 3 * MICROSECOND;
/// Additional processor time of two events, in nanoseconds.
const EVENTS: u64 = 2 * MICROSECOND;
/// The most by which kernel timers fire late, in nanoseconds.
const SLACK: u64 = 60 * MICROSECOND;
/// How long a thread takes to notice that the GPU has finished, in nanoseconds.
const NOTICE: u64 = 5 * MICROSECOND;
/// How many launches the driver queues.
const QUEUE: usize = 1024;

/// Whether the limiter learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimates {
    /// It learns the costs of launches.
    Learned,
    /// It learns nothing. This is the negative control.
    Pinned,
}

/// End of a process's sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sleep {
    Until(u64),
    /// After the submission with this number has ended, plus this many nanoseconds.
    Ended(u64, u64),
    Over,
}

pub(crate) struct Program {
    pub(crate) container: usize,
    pub(crate) sleep: Sleep,
    credit: Credit,
    process: usize,
    load: Load,
    estimates: Estimates,
    limiter: Limiter,
    chance: Chance,
    /// Submissions of the two events of each pair.
    pairs: [(u64, u64); TIMED],
    /// The next kernel to launch, while it is held back.
    next: Option<(usize, u64)>,
    launches: u32,
}

impl Program {
    pub(crate) fn new(
        process: usize,
        container: usize,
        load: Load,
        start: u64,
        chance: Chance,
        estimates: Estimates,
    ) -> Self {
        Self {
            container,
            sleep: Sleep::Until(start.max(load.active.0)),
            credit: Credit::default(),
            process,
            load,
            estimates,
            limiter: Limiter::default(),
            chance,
            pairs: [(0, 0); TIMED],
            next: None,
            launches: 0,
        }
    }

    /// Returns when the process continues; `None` if it waits for the GPU, or has finished.
    pub(crate) fn wakes(&self) -> Option<u64> {
        match self.sleep {
            Sleep::Until(time) => Some(time),
            Sleep::Ended(..) | Sleep::Over => None,
        }
    }

    /// Wakes up if the submission that it waits for has ended.
    pub(crate) fn notice(&mut self, gpu: &VirtualGpu, now: u64) {
        if let Sleep::Ended(number, more) = self.sleep
            && gpu.has_ended(self.process, number)
        {
            self.sleep = Sleep::Until(now + NOTICE + more);
        }
    }

    /// Runs the process until its next sleep, with at most one launch.
    pub(crate) fn step(&mut self, gpu: &mut VirtualGpu, books: &Books, now: u64) {
        if now >= self.load.active.1 {
            self.sleep = Sleep::Over;
            return;
        }
        if gpu.pending(self.process) >= QUEUE {
            self.sleep = Sleep::Ended(gpu.last(self.process) - QUEUE as u64 / 2, 0);
            return;
        }
        let (kind, length) = match self.next {
            Some(next) => next,
            None => self.load.next(&mut self.chance, now),
        };
        self.next = Some((kind, length));
        let key = Key::kernel(0x1000 + kind * 64, [132, 1, 1], [256, 1, 1]);
        if self.credit.spend(key) {
            gpu.launch(self.process, length);
            self.launched(gpu, now + LAUNCH);
            return;
        }
        match self.ask(gpu, books, key, now) {
            Answer::Free => {
                gpu.launch(self.process, length);
                self.launched(gpu, now + LAUNCH);
            }
            Answer::Timed(pair) => {
                let begin = gpu.record(self.process);
                gpu.launch(self.process, length);
                self.pairs[pair] = (begin, gpu.record(self.process));
                self.limiter.launched(pair, Some(0));
                self.launched(gpu, now + LAUNCH + EVENTS);
            }
            Answer::Queued(nap) | Answer::HeldBack(nap) => {
                self.sleep = Sleep::Until(now + nap + self.chance.below(SLACK));
            }
        }
    }

    fn ask(&mut self, gpu: &mut VirtualGpu, books: &Books, key: Key, now: u64) -> Answer {
        let Self { limiter, credit, pairs, process, .. } = self;
        let pinned = self.estimates == Estimates::Pinned;
        if pinned {
            limiter.forget(credit, key);
        }
        limiter.ask(&books.ground(credit), key, now, |pair| {
            if pinned { Timing::Lost } else { timing(gpu, *process, pairs[pair]) }
        })
    }

    fn launched(&mut self, gpu: &VirtualGpu, then: u64) {
        self.next = None;
        self.launches += 1;
        let waits = self.load.synchronise != 0 && self.launches.is_multiple_of(self.load.synchronise);
        self.sleep =
            if waits { Sleep::Ended(gpu.last(self.process), self.load.pause) } else { Sleep::Until(then) };
    }
}

fn timing(gpu: &mut VirtualGpu, process: usize, (begin, end): (u64, u64)) -> Timing {
    if !gpu.has_ended(process, end) {
        return Timing::Running;
    }
    match (gpu.take_stamp(process, begin), gpu.take_stamp(process, end)) {
        (Some(begin), Some(end)) => Timing::Took(end - begin),
        _ => Timing::Lost,
    }
}
