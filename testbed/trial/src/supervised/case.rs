//! The containers that share a card in a run, and the run's random conditions.

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
    /// The work of each of its processes.
    pub work: Work,
    /// How many of its processes work.
    pub processes: usize,
    /// How many more have a context and are idle.
    pub idle: usize,
    /// Channels of each process.
    pub channels: usize,
    /// Length of a call that its programs make whenever the container is about to be stopped, in nanoseconds.
    pub delays: u64,
    /// Length of a call that they make right after each start, in nanoseconds.
    pub hinders: u64,
    /// When its processes start, in nanoseconds.
    pub starts: u64,
    /// Nanoseconds after which its processes end, and after the same time others start; `None`: they stay.
    pub beat: Option<u64>,
}

impl Tenant {
    /// Creates a container with one process.
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

    /// Whether its processes exist at `now`.
    pub(super) fn is_there(&self, now: u64) -> bool {
        let lived = now.checked_sub(self.starts);
        lived.is_some_and(|lived| self.beat.is_none_or(|beat| (lived / beat).is_multiple_of(2)))
    }

    /// Returns when that changes next after `now`.
    pub(super) fn changes(&self, now: u64) -> u64 {
        match (now.checked_sub(self.starts), self.beat) {
            (None, _) => self.starts,
            (Some(lived), Some(beat)) => self.starts + (lived / beat + 1) * beat,
            (Some(_), None) => u64::MAX,
        }
    }

    /// Sets the number of working processes.
    #[must_use]
    pub fn processes(self, processes: usize) -> Self {
        Self { processes, ..self }
    }
}

/// A card that containers share for some seconds.
#[derive(Clone, Debug)]
pub struct Case {
    /// The containers that share the card.
    pub tenants: Vec<Tenant>,
    /// The frame of windows.
    pub frame: Frame,
    /// How late supervisors wake up.
    pub lateness: Lateness,
    /// For how many nanoseconds an idle process keeps the card while others wait. It was not measured
    /// directly. The latency of an inference on an H200 fits 0, and does not fit 20 microseconds.
    pub holds: u64,
    /// Whether a meter reads the card's record of working groups.
    pub has_record: bool,
    /// Length in seconds, at least 2. The first one does not count.
    pub seconds: u64,
    /// Seed of the pseudo-random numbers.
    pub seed: u64,
}

impl Case {
    /// Creates a run of 11 s on a machine that wakes supervisors on time.
    #[must_use]
    pub fn new(tenants: Vec<Tenant>, seed: u64) -> Self {
        let lateness = Lateness { of_thousand: 1, most: MILLISECOND };
        Self { tenants, frame: Frame::SHORT, lateness, holds: 0, has_record: true, seconds: 11, seed }
    }

    /// Runs the case under supervisors.
    #[must_use]
    pub fn run(&self) -> Outcome {
        run::run(self, true)
    }

    /// Runs the case without supervisors. Shares are per cent of the card's time.
    #[must_use]
    pub fn run_free(&self) -> Outcome {
        run::run(self, false)
    }

    /// Runs the case without supervisors, with these slices in microseconds. Shares are per cent of a
    /// container's work alone.
    #[must_use]
    pub fn run_sliced(&self, slices: &[u64]) -> Outcome {
        run::run_sliced(self, slices)
    }

    /// Returns a case in which the container has a card to itself, without a supervisor.
    pub(super) fn alone(&self, tenant: &Tenant) -> Self {
        Self {
            tenants: vec![Tenant { starts: 0, beat: None, ..tenant.clone() }],
            seconds: self.seconds.min(6),
            ..self.clone()
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Share of each container.
    pub shares: Vec<Share>,
    /// Begin and end of each RM call, in nanoseconds.
    pub calls: Vec<(u64, u64)>,
    /// Length of the run in nanoseconds.
    pub length: u64,
    /// GPU time of each container by the card's record of switches, in nanoseconds.
    pub recorded: Vec<u64>,
    /// For how many nanoseconds each container kept the card busy, per millisecond.
    pub busy: Vec<Vec<u64>>,
}

impl Outcome {
    /// Returns the sum of all containers' shares, in per cent of their work alone.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.shares.iter().map(|share| share.mean).sum()
    }

    /// Returns the per cent of the time in which RM was busy.
    #[must_use]
    pub fn load(&self) -> f64 {
        float(self.calls.iter().map(|(begin, end)| end - begin).sum()) * 100.0 / float(self.length)
    }

    /// Returns the 99th percentile of how long other calls at random times wait for RM, in nanoseconds.
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

/// Settling time: the first second.
pub(super) const SETTLES: u64 = SECOND;
