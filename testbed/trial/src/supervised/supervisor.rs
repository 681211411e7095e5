//! The supervisor of a container, and the duration of its calls.

use std::collections::VecDeque;

use gpushare_schedule::controller::{Controller, Orders, Running};
use gpushare_schedule::frame::Frame;
use gpushare_schedule::{Card, Policy, Recorded, Tenant, working};
use gpushare_simulator::virtual_gpu::{Controls, VirtualGpu};

use crate::chance::Chance;
use crate::time::MICROSECOND;

/// Median duration of calls in nanoseconds, and the standard deviation of its logarithm.
const STOP: (u64, f64) = (500 * MICROSECOND, 0.145);
const START: (u64, f64) = (300 * MICROSECOND, 0.124);
const SLICE: (u64, f64) = (250 * MICROSECOND, 0.2);
/// Per cent of a call after which a stop and a start take effect.
const STOPS_AFTER: u64 = 48;
const STARTS_AFTER: u64 = 90;
/// Most channels that a call names.
const MOST_CHANNELS: usize = 64;
/// A requested slice of 100 really runs for this long.
pub(super) const RUNS_FOR: u64 = 102;

/// How late supervisors wake up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lateness {
    /// How many of a thousand wake-ups are late.
    pub of_thousand: u64,
    /// The largest delay in nanoseconds.
    pub most: u64,
}

/// RM, which performs one call at a time.
#[derive(Debug, Default)]
pub(super) struct Manager {
    free: u64,
    /// Begin and end of each call.
    pub(super) calls: Vec<(u64, u64)>,
}

impl Manager {
    /// Returns when a call made at `now` begins and ends.
    fn call(&mut self, now: u64, (median, spread): (u64, f64), chance: &mut Chance) -> (u64, u64) {
        let begin = now.max(self.free);
        let length = chance.log_normal(median, spread);
        self.free = begin + length;
        self.calls.push((begin, self.free));
        (begin, self.free)
    }

    /// Keeps RM busy with a program's call for `length` nanoseconds from `now` on.
    fn hold(&mut self, now: u64, length: u64) {
        self.free = now.max(self.free) + length;
    }
}

/// A supervisor's line on the board.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    pub(super) working: u32,
    /// How many of its groups had the card recently, by its record.
    pub(super) recorded: Option<Recorded>,
    /// When its channels were last started, in microseconds.
    started: u64,
    /// [`Tenant::pays`] and [`Tenant::stint`].
    pays: u32,
    stint: u32,
}

/// A call to make, one of several if there are many channels.
#[derive(Clone, Copy, Debug)]
struct Call {
    process: usize,
    change: Change,
    /// Whether this call decides: a group runs while any of its channels does.
    is_decisive: bool,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Stop,
    Start,
    Slice(u64),
}

/// Calls in progress.
struct Job {
    began: u64,
    calls: VecDeque<Call>,
    /// End of the current call.
    ends: u64,
    /// The groups that run after the job.
    then: Running,
    is_disturbed: bool,
}

pub(super) struct Supervisor {
    tenant: usize,
    channels: usize,
    delays: u64,
    hinders: u64,
    /// When its channels were last started, in microseconds.
    started: u64,
    controller: Controller,
    chance: Chance,
    lateness: Lateness,
    /// The last orders to the card, and whether all processes match them.
    running: Running,
    is_settled: bool,
    slice: Option<u32>,
    effects: Vec<(u64, Call)>,
    job: Option<Job>,
    wakes: u64,
}

impl Supervisor {
    pub(super) fn new(
        tenant: usize,
        (channels, delays, hinders): (usize, u64, u64),
        chance: Chance,
        lateness: Lateness,
    ) -> Self {
        Self {
            tenant,
            channels,
            delays,
            hinders,
            started: 0,
            controller: Controller::default(),
            chance,
            lateness,
            running: Running::All,
            is_settled: true,
            slice: None,
            effects: Vec::new(),
            job: None,
            wakes: u64::MAX,
        }
    }

    /// Returns when it has something to do.
    pub(super) fn wakes(&self) -> u64 {
        let effects = self.effects.iter().map(|(at, _)| *at);
        let next = self.job.as_ref().map_or(self.wakes, |job| job.ends);
        effects.chain([next]).min().unwrap_or(next)
    }

    /// Records that processes have started or ended.
    pub(super) fn notice_change(&mut self, now: u64) {
        (self.is_settled, self.slice, self.wakes) = (self.running == Running::All, None, now);
        self.job.iter_mut().for_each(|job| job.is_disturbed = true);
    }

    /// Runs the supervisor at `now`. `there` lists those of its processes that have a context.
    pub(super) fn act(
        &mut self,
        (gpu, manager): (&mut VirtualGpu, &mut Manager),
        (board, policies, frame): (&mut [Line], &[Policy], Frame),
        there: &[usize],
        now: u64,
    ) {
        self.take_effect(gpu, now);
        let tenants = self.tenants(board, policies);
        let is_at_work = self.works(manager, (Card { frame, tenants: &tenants }, there), now);
        let own = &mut board[self.tenant];
        (own.pays, own.started) = (self.controller.pays(), self.started);
        if is_at_work || now < self.wakes {
            return;
        }
        let groups = u32::try_from(there.len()).unwrap_or(u32::MAX);
        own.working = groups;
        if there.is_empty() {
            self.controller.leave();
            (self.started, self.wakes) = (0, u64::MAX);
            return;
        }
        let tenants = self.tenants(board, policies);
        let card = Card { frame, tenants: &tenants };
        let orders =
            self.controller.step(&card, self.lease(), now / MICROSECOND, (groups, self.calls(there)));
        let own = &mut board[self.tenant];
        (own.pays, own.stint) = (self.controller.pays(), self.controller.stint());
        self.wakes = (orders.until * MICROSECOND).max(now) + self.lateness();
        self.obey(&orders, there, now);
        if self.job.as_ref().is_some_and(|job| job.then == Running::Stopped) {
            manager.hold(now, self.delays);
        }
        let _ = self.works(manager, (card, there), now);
    }

    fn lease(&self) -> i64 {
        i64::try_from(self.tenant).unwrap_or(0)
    }

    /// Lists the tenants on the board.
    fn tenants(&self, board: &[Line], policies: &[Policy]) -> Vec<Tenant> {
        let lines = board.iter().zip(policies).zip(0..).filter(|((line, _), _)| line.working > 0);
        let tenant = |((line, policy), lease): ((&Line, &Policy), i64)| Tenant {
            lease,
            policy: policy.clone().in_force(line.recorded),
            is_present: true,
            working: working(line.working, line.recorded),
            rests: line.recorded.is_some_and(|recorded| recorded.working == 0),
            pays: if lease == self.lease() { 0 } else { line.pays },
            started: line.started,
            stay: line.recorded.map_or(0, |recorded| recorded.stay),
            stint: line.stint,
        };
        lines.map(tenant).collect()
    }

    /// Makes the calls in progress, one after the other. Returns whether there are any.
    fn works(&mut self, manager: &mut Manager, (card, there): (Card, &[usize]), now: u64) -> bool {
        let calls = self.calls(there);
        let Some(job) = &mut self.job else { return false };
        if now < job.ends {
            return true;
        }
        if let Some(call) = job.calls.pop_front() {
            let (length, after) = match call.change {
                Change::Stop => (STOP, STOPS_AFTER),
                Change::Start => (START, STARTS_AFTER),
                Change::Slice(_) => (SLICE, 100),
            };
            let (begin, end) = manager.call(now, length, &mut self.chance);
            if call.is_decisive {
                self.effects.push((begin + (end - begin) * after / 100, call));
            }
            job.ends = end;
            return true;
        }
        if job.then == Running::Stopped && self.running != Running::Stopped {
            let lease = i64::try_from(self.tenant).unwrap_or(0);
            self.controller.stopped(&card, lease, (job.began / MICROSECOND, now / MICROSECOND), calls);
        }
        if job.then != Running::Stopped && self.running == Running::Stopped {
            self.started = now / MICROSECOND;
            manager.hold(now, self.hinders);
        }
        (self.running, self.is_settled) = (job.then, !job.is_disturbed);
        self.wakes = if job.is_disturbed { now } else { self.wakes };
        self.job = None;
        false
    }

    fn obey(&mut self, orders: &Orders, there: &[usize], now: u64) {
        let mut calls = VecDeque::new();
        if let Some(slice) = orders.slice.filter(|slice| self.slice != Some(*slice)) {
            self.slice = Some(slice);
            let change = Change::Slice(u64::from(slice) * MICROSECOND * RUNS_FOR / 100);
            calls.extend(there.iter().map(|process| Call { process: *process, change, is_decisive: true }));
        }
        if orders.running != self.running || !self.is_settled {
            let groups = u32::try_from(there.len()).unwrap_or(u32::MAX);
            let of_process = self.channels.div_ceil(MOST_CHANNELS);
            // Stop first, to make room for those that start.
            for (change, decisive) in [(Change::Stop, of_process), (Change::Start, 1)] {
                let runs = matches!(change, Change::Start);
                let chosen = (0..).zip(there).filter(|(at, _)| {
                    let is_as_before = self.is_settled && self.running.includes(*at, groups) == runs;
                    orders.running.includes(*at, groups) == runs && !is_as_before
                });
                calls.extend(chosen.flat_map(|(_, process)| {
                    (1..=of_process).map(move |number| Call {
                        process: *process,
                        change,
                        is_decisive: number == decisive,
                    })
                }));
            }
        }
        if !calls.is_empty() {
            self.job = Some(Job { began: now, calls, ends: now, then: orders.running, is_disturbed: false });
        }
    }

    fn take_effect(&mut self, gpu: &mut VirtualGpu, now: u64) {
        let (due, later) = std::mem::take(&mut self.effects).into_iter().partition(|(at, _)| *at <= now);
        self.effects = later;
        for (_, Call { process, change, .. }) in due {
            let before = gpu.controls(process);
            let after = match change {
                Change::Stop => Controls { is_stopped: true, ..before },
                Change::Start => Controls { is_stopped: false, ..before },
                Change::Slice(slice) => Controls { slice: Some(slice), ..before },
            };
            gpu.control(process, after);
        }
    }

    fn calls(&self, there: &[usize]) -> u32 {
        u32::try_from(there.len() * self.channels.div_ceil(MOST_CHANNELS)).unwrap_or(u32::MAX)
    }

    fn lateness(&mut self) -> u64 {
        const LATE: u64 = 200 * MICROSECOND;
        if self.chance.below(1_000) < self.lateness.of_thousand {
            return LATE + self.chance.below(self.lateness.most - LATE);
        }
        5 * MICROSECOND + self.chance.below(20 * MICROSECOND)
    }
}
