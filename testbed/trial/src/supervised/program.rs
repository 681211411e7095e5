//! A process of a container, and its work on the card.

use gpushare_simulator::virtual_gpu::VirtualGpu;

use crate::chance::Chance;
use crate::time::{MICROSECOND, MILLISECOND, SECOND};

/// How long a thread takes to notice that the card has finished, in nanoseconds.
const NOTICE: u64 = 12 * MICROSECOND;
/// How many launches the driver queues.
const QUEUE: usize = 1024;
/// Variation of kernel lengths, in per cent.
const JITTER: u64 = 10;

/// The work that a process repeats: a request of some kernels, and then a pause until the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Typical length of a kernel, in nanoseconds.
    pub kernel: u64,
    /// Processor time of a launch, in nanoseconds.
    pub launch: u64,
    /// Kernels of a request, at whose end it waits; 0: it never waits.
    pub request: u32,
    /// The time between two requests.
    pub between: Between,
}

/// Time of the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// This many nanoseconds after the end of the last one.
    Pause(u64),
    /// At random, on average this many nanoseconds after the begin of the last one. Requests that arrive
    /// earlier wait.
    Arrivals(u64),
    /// This many nanoseconds after the begin of the last request.
    Period(u64),
}

impl Work {
    /// Creates work of kernels of this many nanoseconds, without waits.
    #[must_use]
    pub const fn kernels(kernel: u64) -> Self {
        Self { kernel, launch: 3 * MICROSECOND, request: 0, between: Between::Pause(0) }
    }

    /// Creates work of such kernels with a wait after each. The program resumes `pause` nanoseconds after it
    /// notices the end.
    #[must_use]
    pub const fn waits(kernel: u64, pause: u64) -> Self {
        Self { request: 1, between: Between::Pause(pause), ..Self::kernels(kernel) }
    }

    /// Creates training work: steps of 14 ms, each fifth of which ends with a wait. It leaves the card idle
    /// for 4.5 per cent of the time.
    #[must_use]
    pub const fn training() -> Self {
        let pause = 3_300 * MICROSECOND;
        Self { request: 1_000, between: Between::Pause(pause), ..Self::kernels(70 * MICROSECOND) }
    }

    /// Creates inference work: requests of 4 ms, bound by their launches, with 1.4 ms of GPU time in 200
    /// small kernels.
    #[must_use]
    pub const fn inference(between: Between) -> Self {
        Self { kernel: 7 * MICROSECOND, launch: 19_500, request: 200, between }
    }

    /// Creates inference work in which a request comes 5 ms after the last one has ended.
    #[must_use]
    pub const fn closed_loop() -> Self {
        Self::inference(Between::Pause(5 * MILLISECOND))
    }

    /// Creates inference work with twenty requests a second at random times.
    #[must_use]
    pub const fn arrivals() -> Self {
        Self::inference(Between::Arrivals(SECOND / 20))
    }
}

/// A process that launches kernels, and waits for them.
pub(super) struct Program {
    /// Its index on the card.
    pub(super) process: usize,
    pub(super) tenant: usize,
    work: Work,
    chance: Chance,
    state: State,
    /// Arrival of the current request, or of the next one if requests arrive by themselves.
    came: u64,
    launched: u32,
    /// Duration of each request in nanoseconds, with the time at which it completed.
    pub(super) latencies: Vec<(u64, u64)>,
}

enum State {
    Until(u64),
    /// Until the submission with this number has ended.
    Ended(u64),
}

impl Program {
    pub(super) fn new((process, tenant): (usize, usize), work: Work, starts: u64, chance: Chance) -> Self {
        let (state, came) = (State::Until(starts), starts);
        Self { process, tenant, work, chance, state, came, launched: 0, latencies: Vec::new() }
    }

    /// Returns when the process continues by itself.
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

    /// Ends the process, and restarts it at `again`.
    pub(super) fn end(&mut self, again: u64) {
        (self.state, self.came, self.launched) = (State::Until(again), again, 0);
    }

    /// Runs the process at `now`.
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
