//! Who shares a card in a run, and with what luck.

use gpushare_schedule::Policy;
use gpushare_schedule::frame::Frame;

use super::figures::{Share, float};
use super::program::Work;
use super::run;
use super::supervisor::Lateness;
use crate::time::{MILLISECOND, SECOND};

/// A container with a share of the card, and its processes.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    /// How it shares the card.
    pub policy: Policy,
    /// What each of its processes does.
    pub work: Work,
    /// How many of them work.
    pub processes: usize,
    /// How many more have a context and do nothing.
    pub idle: usize,
    /// Channels of each process.
    pub channels: usize,
    /// Length of a call that its programs make whenever the container is about to be stopped, in nanoseconds.
    pub delays: u64,
    /// Length of a call that they make right after each start, in nanoseconds.
    pub hinders: u64,
    /// When its processes start, in nanoseconds.
    pub starts: u64,
    /// After so many nanoseconds they are gone, and after so many more there are others; `None`: they stay.
    pub beat: Option<u64>,
}

impl Tenant {
    /// A container with one process.
    #[must_use]
    pub const fn new(policy: Policy, work: Work) -> Self {
        Self {
            policy,
            work,
            processes: 1,
            idle: 0,
            channels: 8,
            delays: 0,
            hinders: 0,
            starts: 0,
            beat: None,
        }
    }

    /// Whether its processes are there at `now`.
    pub(super) fn is_there(&self, now: u64) -> bool {
        let lived = now.checked_sub(self.starts);
        lived.is_some_and(|lived| self.beat.is_none_or(|beat| (lived / beat).is_multiple_of(2)))
    }

    /// When that changes next after `now`.
    pub(super) fn changes(&self, now: u64) -> u64 {
        match (now.checked_sub(self.starts), self.beat) {
            (None, _) => self.starts,
            (Some(lived), Some(beat)) => self.starts + (lived / beat + 1) * beat,
            (Some(_), None) => u64::MAX,
        }
    }

    /// The same with so many processes that work.
    #[must_use]
    pub fn processes(self, processes: usize) -> Self {
        Self { processes, ..self }
    }
}

/// A card that containers share for some seconds.
#[derive(Clone, Debug)]
pub struct Case {
    /// Who shares the card.
    pub tenants: Vec<Tenant>,
    /// The frame of windows.
    pub frame: Frame,
    /// How late supervisors wake up.
    pub lateness: Lateness,
    /// For how many nanoseconds a process that has nothing to do keeps the card while others wait. It was not
    /// measured directly. The latency of an inference on an H200 fits 0, and does not fit 20 microseconds.
    pub holds: u64,
    /// Whether a meter reads the card's record of who worked.
    pub has_record: bool,
    /// Length in seconds, 2 at least. The first one is not counted.
    pub seconds: u64,
    /// Seed of the pseudo-random numbers.
    pub seed: u64,
}

impl Case {
    /// A run of 11 s on a machine that wakes supervisors in time.
    #[must_use]
    pub fn new(tenants: Vec<Tenant>, seed: u64) -> Self {
        let lateness = Lateness { of_thousand: 1, most: MILLISECOND };
        Self { tenants, frame: Frame::SHORT, lateness, holds: 0, has_record: true, seconds: 11, seed }
    }

    /// What each container gets.
    #[must_use]
    pub fn run(&self) -> Outcome {
        run::run(self, true)
    }

    /// What each container gets without supervisors, in per cent of the card's time.
    #[must_use]
    pub fn run_free(&self) -> Outcome {
        run::run(self, false)
    }

    /// Runs without supervisors, with these slices in microseconds. Shares are per cent of what a container does alone.
    #[must_use]
    pub fn run_sliced(&self, slices: &[u64]) -> Outcome {
        run::run_sliced(self, slices)
    }

    /// What each container does alone on a card, without a supervisor.
    pub(super) fn alone(&self, tenant: &Tenant) -> Self {
        Self {
            tenants: vec![Tenant { starts: 0, beat: None, ..tenant.clone() }],
            seconds: self.seconds.min(6),
            ..self.clone()
        }
    }
}

/// What became of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What each container got.
    pub shares: Vec<Share>,
    /// Begin and end of each RM call, in nanoseconds.
    pub calls: Vec<(u64, u64)>,
    /// Length of the run in nanoseconds.
    pub length: u64,
    /// GPU time of each container by the card's record of switches, in nanoseconds.
    pub recorded: Vec<u64>,
    /// For how many nanoseconds each container kept the card busy in each millisecond.
    pub busy: Vec<Vec<u64>>,
}

impl Outcome {
    /// Per cent of what they do alone, of all containers together.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.shares.iter().map(|share| share.mean).sum()
    }

    /// Per cent of the time in which RM was busy.
    #[must_use]
    pub fn load(&self) -> f64 {
        float(self.calls.iter().map(|(begin, end)| end - begin).sum()) * 100.0 / float(self.length)
    }

    /// 99th percentile of how long other calls at random times wait for RM, in nanoseconds.
    #[must_use]
    pub fn wait(&self) -> u64 {
        const STEP: usize = 10_000;
        let mut calls = self.calls.iter().peekable();
        let (mut free, mut waits) = (0, Vec::new());
        for now in (0..self.length).step_by(STEP) {
            while let Some((_, end)) = calls.next_if(|(begin, _)| *begin <= now.max(free)) {
                free = *end;
            }
            waits.push(u64::saturating_sub(free, now));
        }
        waits.sort_unstable();
        waits[waits.len() * 99 / 100]
    }
}

/// The first second.
pub(super) const SETTLES: u64 = SECOND;
