//! A process of a container, and what it has the card do.

use gpushare_simulator::virtual_gpu::VirtualGpu;

use crate::chance::Chance;
use crate::time::{MICROSECOND, MILLISECOND, SECOND};

/// How long a thread takes to notice that the card is done, in nanoseconds.
const NOTICE: u64 = 12 * MICROSECOND;
/// How many launches the driver queues.
const QUEUE: usize = 1024;
/// By how many per cent lengths of kernels differ.
const JITTER: u64 = 10;

/// What a process does over and over: a request of some kernels, and something else until the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Nanoseconds of a kernel, by and large.
    pub kernel: u64,
    /// Processor time of a launch, in nanoseconds.
    pub launch: u64,
    /// Kernels of a request, whose end it waits for; 0: it never waits.
    pub request: u32,
    /// What is between two requests.
    pub between: Between,
}

/// When the next request comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// So many nanoseconds after the end of the last one.
    Pause(u64),
    /// By chance, so many nanoseconds after the begin of the last one in the mean. Requests that come earlier
    /// wait.
    Arrivals(u64),
    /// This many nanoseconds after the begin of the last request.
    Period(u64),
}

impl Work {
    /// Kernels of this many nanoseconds, and never a wait.
    #[must_use]
    pub const fn kernels(kernel: u64) -> Self {
        Self { kernel, launch: 3 * MICROSECOND, request: 0, between: Between::Pause(0) }
    }

    /// Such kernels, with a wait after each, from which the program comes back `pause` nanoseconds after it
    /// noticed.
    #[must_use]
    pub const fn waits(kernel: u64, pause: u64) -> Self {
        Self { request: 1, between: Between::Pause(pause), ..Self::kernels(kernel) }
    }

    /// Training: steps of 14 ms, of which each fifth ends with a wait. It leaves the card idle for 4.5 per
    /// cent of the time.
    #[must_use]
    pub const fn training() -> Self {
        let pause = 3_300 * MICROSECOND;
        Self { request: 1_000, between: Between::Pause(pause), ..Self::kernels(70 * MICROSECOND) }
    }

    /// Requests of 4 ms, bound by their launches: 1.4 ms of the card's time in 200 small kernels.
    #[must_use]
    pub const fn inference(between: Between) -> Self {
        Self { kernel: 7 * MICROSECOND, launch: 19_500, request: 200, between }
    }

    /// One that comes 5 ms after the last one has ended.
    #[must_use]
    pub const fn closed_loop() -> Self {
        Self::inference(Between::Pause(5 * MILLISECOND))
    }

    /// Twenty requests a second by chance.
    #[must_use]
    pub const fn arrivals() -> Self {
        Self::inference(Between::Arrivals(SECOND / 20))
    }
}

/// A process that launches kernels, and waits for them.
pub(super) struct Program {
    /// Its place on the card.
    pub(super) process: usize,
    pub(super) tenant: usize,
    work: Work,
    chance: Chance,
    state: State,
    /// When the request in hand came; the next one, if requests come by themselves.
    came: u64,
    launched: u32,
    /// Nanoseconds that requests took, with the moment at which each was done.
    pub(super) latencies: Vec<(u64, u64)>,
}

enum State {
    Until(u64),
    /// Until its submission of this number has ended.
    Ended(u64),
}

impl Program {
    pub(super) fn new((process, tenant): (usize, usize), work: Work, starts: u64, chance: Chance) -> Self {
        let (state, came) = (State::Until(starts), starts);
        Self { process, tenant, work, chance, state, came, launched: 0, latencies: Vec::new() }
    }

    /// When it goes on by itself.
    pub(super) fn wakes(&self) -> Option<u64> {
        match self.state {
            State::Until(time) => Some(time),
            State::Ended(_) => None,
        }
    }

    /// Whether it waits for the card.
    pub(super) fn waits(&self) -> bool {
        matches!(self.state, State::Ended(_))
    }

    /// Is gone, and comes back at `again`.
    pub(super) fn end(&mut self, again: u64) {
        (self.state, self.came, self.launched) = (State::Until(again), again, 0);
    }

    /// Does what it does at `now`.
    pub(super) fn act(&mut self, gpu: &mut VirtualGpu, now: u64) {
        match self.state {
            State::Ended(number) if gpu.has_ended(self.process, number) => {
                self.state = State::Until(now + NOTICE)
            }
            State::Until(time) if time <= now => self.go_on(gpu, now),
            _ => {}
        }
    }

    fn go_on(&mut self, gpu: &mut VirtualGpu, now: u64) {
        if self.work.request > 0 && self.launched == self.work.request {
            self.launched = 0;
            self.latencies.push((now, now - self.came));
            let next = match self.work.between {
                Between::Pause(pause) => now + pause,
                Between::Arrivals(mean) => self.came + self.chance.exponential(mean),
                Between::Period(period) => now.max(self.came + period),
            };
            self.came = next;
            self.state = State::Until(next.max(now));
            return;
        }
        if gpu.pending(self.process) >= QUEUE {
            self.state = State::Ended(gpu.last(self.process) - QUEUE as u64 / 2);
            return;
        }
        let last = gpu.launch(self.process, self.chance.around(self.work.kernel, JITTER));
        self.launched = self.launched.wrapping_add(1);
        let is_whole = self.work.request > 0 && self.launched == self.work.request;
        self.state = if is_whole { State::Ended(last) } else { State::Until(now + self.work.launch) };
    }
}
