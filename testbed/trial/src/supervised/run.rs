//! Runs a case once: handles all events in chronological order.

use gpushare_residency::event::{Event, Holder, Kind};
use gpushare_residency::time::Engine;
use gpushare_schedule::{Policy, Recorded, is_over, stay};
use gpushare_simulator::virtual_gpu::{BIN, Controls, Discipline, Switch, VirtualGpu};

use super::case::{Case, Outcome, SETTLES, Tenant};
use super::figures::{Latencies, Share};
use super::program::Program;
use super::supervisor::{Line, Manager, RUNS_FOR, Supervisor};
use crate::chance::Chance;
use crate::time::{MICROSECOND, MILLISECOND, SECOND};

/// The driver's default slice of a context.
const SLICE: u64 = 2_080 * MICROSECOND;
/// Duration of a switch between two turns, in nanoseconds of work.
const AT_WORK: u64 = 185 * MICROSECOND;
const AT_REST: u64 = 110 * MICROSECOND;

/// Interval at which the meter reads the card's record, and the record's age then.
const RECORD_EVERY: u64 = 100 * MILLISECOND;
const RECORD_DELAY: u64 = 60 * MILLISECOND;
/// A container that worked within this time counts as working.
const RECENT: u64 = 5 * SECOND;

/// Runs a case. Without supervisors the card shares its time by itself.
pub(super) fn run(case: &Case, is_held: bool) -> Outcome {
    let mut run = Run::new(case, is_held);
    run.drive();
    run.outcome(is_held)
}

/// Runs a case without supervisors, with these slices in microseconds.
pub(super) fn run_sliced(case: &Case, slices: &[u64]) -> Outcome {
    let mut run = Run::new(case, false);
    for (slice, contexts) in slices.iter().zip(&run.contexts) {
        let controls = Controls { slice: Some(slice * MICROSECOND * RUNS_FOR / 100), is_stopped: false };
        contexts.iter().for_each(|process| run.gpu.control(*process, controls));
    }
    run.drive();
    run.outcome(true)
}

struct Run<'c> {
    case: &'c Case,
    gpu: VirtualGpu,
    programs: Vec<Program>,
    /// Contexts of the containers, by container.
    contexts: Vec<Vec<usize>>,
    supervisors: Vec<Supervisor>,
    board: Vec<Line>,
    policies: Vec<Policy>,
    manager: Manager,
}

impl<'c> Run<'c> {
    fn new(case: &'c Case, is_held: bool) -> Self {
        let chance = |number: u64| Chance::new(case.seed.wrapping_mul(1_000).wrapping_add(number));
        let (mut programs, mut contexts, mut supervisors) = (Vec::new(), Vec::new(), Vec::new());
        let mut count = 0;
        for (number, tenant) in case.tenants.iter().enumerate() {
            let first = count;
            for process in first..first + tenant.processes {
                let chance = chance(u64::try_from(process).unwrap_or(0));
                programs.push(Program::new((process, number), tenant.work, tenant.starts, chance));
            }
            count += tenant.processes + tenant.idle;
            contexts.push((first..count).collect::<Vec<usize>>());
            if is_held {
                let chance = chance(500 + u64::try_from(number).unwrap_or(0));
                let calls = (tenant.channels, tenant.delays, tenant.hinders);
                supervisors.push(Supervisor::new(number, calls, chance, case.lateness));
            }
        }
        let switch = Switch { at_work: AT_WORK, at_rest: AT_REST, holds: case.holds };
        Self {
            case,
            gpu: VirtualGpu::switching(Discipline::Slices(SLICE), switch, count),
            programs,
            contexts,
            supervisors,
            board: vec![Line::default(); case.tenants.len()],
            policies: case.tenants.iter().map(|tenant| tenant.policy.clone()).collect(),
            manager: Manager::default(),
        }
    }

    fn end(&self) -> u64 {
        self.case.seconds * SECOND
    }

    fn drive(&mut self) {
        let mut changes: Vec<u64> = self.case.tenants.iter().map(|tenant| tenant.starts).collect();
        let mut record = if self.case.has_record { RECORD_EVERY } else { u64::MAX };
        loop {
            let programs = self.programs.iter().filter_map(Program::wakes).min();
            let supervisors = self.supervisors.iter().map(Supervisor::wakes).min();
            let change = if self.programs.iter().any(Program::waits) { self.gpu.next_change() } else { None };
            let times = [programs, supervisors, change, changes.iter().copied().min(), Some(record)];
            let Some(now) = times.into_iter().flatten().min().filter(|now| *now < self.end()) else { break };
            self.gpu.advance(now);
            for (number, at) in changes.iter_mut().enumerate().filter(|(_, at)| **at <= now) {
                *at = self.change(number, now);
            }
            if record <= now {
                self.record(now);
                record = now + RECORD_EVERY;
            }
            self.supervise(now);
            for program in &mut self.programs {
                program.act(&mut self.gpu, now);
            }
        }
        self.gpu.advance(self.end());
    }

    /// Starts or ends a container's processes. Returns when that changes again.
    fn change(&mut self, number: usize, now: u64) -> u64 {
        let tenant = &self.case.tenants[number];
        let next = tenant.changes(now);
        if !tenant.is_there(now) {
            self.contexts[number].iter().for_each(|process| self.gpu.cancel(*process));
            let own = self.programs.iter_mut().filter(|program| program.tenant == number);
            own.for_each(|program| program.end(next));
        }
        if let Some(supervisor) = self.supervisors.get_mut(number) {
            supervisor.notice_change(now);
        }
        next
    }

    /// The meter publishes which groups worked.
    fn record(&mut self, now: u64) {
        let bin = |time: u64| usize::try_from(time / BIN).unwrap_or(usize::MAX);
        let until = now.saturating_sub(RECORD_DELAY);
        let recent = bin(until.saturating_sub(RECENT))..bin(until);
        let last = bin(until.saturating_sub(SECOND))..bin(until);
        let handovers = self.gpu.handovers();
        let counted = |moment: u64| handovers.partition_point(|one| one.taken <= moment);
        let taken = &handovers[counted(until.saturating_sub(SECOND))..counted(until)];
        for ((line, contexts), policy) in self.board.iter_mut().zip(&self.contexts).zip(&self.policies) {
            let busy = |process: &usize| {
                let bins = self.gpu.bins(*process);
                let end = last.end.min(bins.len());
                bins.get(last.start.min(end)..end).map_or(0, |bins| bins.iter().sum::<u64>())
            };
            let used = contexts.iter().map(busy).sum::<u64>() / MICROSECOND;
            let taken = taken.iter().filter(|one| contexts.contains(&one.to)).count();
            let stay = match policy {
                Policy::Burst { share, .. } => {
                    let before = line.recorded.map_or(0, |recorded| recorded.stay);
                    stay(before, used, u32::try_from(taken).unwrap_or(u32::MAX), *share)
                }
                _ => 0,
            };
            let was_over = line.recorded.is_some_and(|recorded| recorded.is_over);
            let is_over = matches!(policy, Policy::Latency { share } if is_over(was_over, used, *share));
            let worked = |process: &&usize| {
                let bins = self.gpu.bins(**process);
                let end = recent.end.min(bins.len());
                bins.get(recent.start.min(end)..end).is_some_and(|bins| bins.iter().any(|busy| *busy > 0))
            };
            let working = u32::try_from(contexts.iter().filter(worked).count()).unwrap_or(u32::MAX);
            line.recorded = Some(Recorded { working, is_over, stay });
        }
    }

    fn supervise(&mut self, now: u64) {
        for (number, supervisor) in self.supervisors.iter_mut().enumerate() {
            if supervisor.wakes() > now {
                continue;
            }
            let there: &[usize] =
                if self.case.tenants[number].is_there(now) { &self.contexts[number] } else { &[] };
            let card = (&mut self.gpu, &mut self.manager);
            supervisor.act(card, (&mut self.board, &self.policies, self.case.frame), there, now);
        }
    }

    fn outcome(&self, is_held: bool) -> Outcome {
        let busy: Vec<Vec<u64>> =
            (0..self.case.tenants.len()).map(|number| self.bins(number, self.end())).collect();
        let shares = self.case.tenants.iter().enumerate().map(|(number, tenant)| {
            let counted = (tenant.starts + SETTLES, self.end());
            let solo = if is_held { self.solo(tenant) } else { 1.0 };
            let of_tenant = self.programs.iter().filter(|program| program.tenant == number);
            let all = of_tenant.flat_map(|program| &program.latencies);
            let took = all.filter(|(done, _)| (counted.0..counted.1).contains(done)).map(|(_, took)| *took);
            Share::new(&busy[number], counted, solo, Latencies::new(took.collect(), counted.1 - counted.0))
        });
        let calls = self.manager.calls.clone();
        Outcome { shares: shares.collect(), calls, recorded: self.recorded(), busy, length: self.end() }
    }

    /// Returns the GPU time of each container by the card's record of switches, in nanoseconds.
    fn recorded(&self) -> Vec<u64> {
        let mut engine = Engine::since(0);
        let holder = |process: usize| Holder { pid: u32::try_from(process).unwrap_or(0), context: 0 };
        let mut held = vec![0; self.contexts.len()];
        let mut settle = |engine: &mut Engine, until: u64| {
            for (Holder { pid, .. }, time) in engine.settle(until).by {
                let of = |contexts: &Vec<usize>| contexts.iter().any(|process| holder(*process).pid == pid);
                self.contexts.iter().position(of).into_iter().for_each(|tenant| held[tenant] += time);
            }
        };
        let mut sequence = 0;
        for one in self.gpu.handovers() {
            for (kind, at) in
                [(Kind::End(holder(one.from)), one.left), (Kind::Start(holder(one.to)), one.taken)]
            {
                sequence = u16::wrapping_add(sequence, 1);
                engine.note(Event { kind, at, sequence });
            }
            settle(&mut engine, one.taken);
        }
        settle(&mut engine, self.end());
        held
    }

    /// Returns the part of a second for which a container keeps the card busy when it is alone.
    fn solo(&self, tenant: &Tenant) -> f64 {
        run(&self.case.alone(tenant), false).shares[0].mean / 100.0
    }

    fn bins(&self, tenant: usize, end: u64) -> Vec<u64> {
        let count = usize::try_from(end / BIN).unwrap_or(0);
        let bin = |at: usize| {
            let of = |process: &usize| self.gpu.bins(*process).get(at).copied().unwrap_or(0);
            self.contexts[tenant].iter().map(of).sum()
        };
        (0..count).map(bin).collect()
    }
}
