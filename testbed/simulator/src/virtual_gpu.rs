//! A GPU in virtual time: work of several processes that takes time and computes nothing, on a clock that the
//! caller moves.
//!
//! A run of eleven seconds takes milliseconds, gives the same result every time, and is not disturbed by
//! other work on the machine. The module owns the order in which work runs, the stamps of events and the busy
//! time of each process. Programs, limits and samples belong to its caller.

use std::collections::{HashMap, VecDeque};

/// Length of a bin of the busy times, in nanoseconds.
pub const BIN: u64 = 1_000_000;

/// How the device chooses the next work to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discipline {
    /// In the order of submission; nothing is ever cut.
    Submission,
    /// Processes with work take turns of this many nanoseconds. Kernels are cut; a process whose queue is
    /// empty loses its turn at once.
    Slices(u64),
}

/// Work of one process: a length in nanoseconds, or 0 for an event.
#[derive(Clone, Copy, Debug)]
struct Work {
    left: u64,
    is_event: bool,
}

#[derive(Debug, Default)]
struct Queue {
    pending: VecDeque<Work>,
    controls: Controls,
    submitted: u64,
    ended: u64,
    stamps: HashMap<u64, u64>,
    bins: Vec<u64>,
    busy: u64,
}

/// How a process is scheduled, as a supervisor sets it from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controls {
    /// Whether its work stands still.
    pub is_stopped: bool,
    /// Nanoseconds of its turns; `None`: the device's own.
    pub slice: Option<u64>,
}

/// Duration of the switch between two turns, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switch {
    /// A switch that ends a turn while work is left.
    pub at_work: u64,
    /// A switch from a process that has no work left.
    pub at_rest: u64,
    /// How long an idle process keeps the device before others get their turn.
    pub holds: u64,
}

/// The device; its clock starts at 0 and counts nanoseconds.
#[derive(Debug)]
pub struct VirtualGpu {
    discipline: Discipline,
    now: u64,
    queues: Vec<Queue>,
    /// Owners of the pending work in the order of submission.
    order: VecDeque<usize>,
    turn: Turn,
    switch: Switch,
    handovers: Vec<Handover>,
}

/// A switch of the device from one process to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// The process that leaves the device.
    pub from: usize,
    /// When it leaves, in nanoseconds.
    pub left: u64,
    /// The process that takes the device.
    pub to: usize,
    /// When it takes the device, in nanoseconds.
    pub taken: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    /// Process that has the turn.
    of: usize,
    /// End of the switch to it.
    begin: u64,
    /// The latest end of the turn.
    end: u64,
    /// Time since which it has had no work, while the device waits for it.
    rests: Option<u64>,
}

/// The device's activity, and its latest end.
enum Phase {
    /// It works for the process that has the turn.
    Runs(u64),
    /// It switches, or waits for that process.
    Waits(u64),
}

impl VirtualGpu {
    /// Creates an idle device at time 0 for `processes` processes. Switches between them take no time.
    #[must_use]
    pub fn new(discipline: Discipline, processes: usize) -> Self {
        Self::switching(discipline, Switch::default(), processes)
    }

    /// Like [`VirtualGpu::new`], but switches take time. There are switches only between turns.
    #[must_use]
    pub fn switching(discipline: Discipline, switch: Switch, processes: usize) -> Self {
        Self {
            discipline,
            switch,
            now: 0,
            queues: (0..processes).map(|_| Queue::default()).collect(),
            order: VecDeque::new(),
            turn: Turn::default(),
            handovers: Vec::new(),
        }
    }

    /// Sets how `process` is scheduled from now on. A running kernel is cut at once.
    pub fn control(&mut self, process: usize, controls: Controls) {
        self.queues[process].controls = controls;
    }

    /// Returns how `process` is scheduled.
    #[must_use]
    pub fn controls(&self, process: usize) -> Controls {
        self.queues[process].controls
    }

    /// Queues a kernel of `length` nanoseconds, at least 1. Returns its number among the process's
    /// submissions, from 1.
    pub fn launch(&mut self, process: usize, length: u64) -> u64 {
        self.submit(process, Work { left: length.max(1), is_event: false })
    }

    /// Queues an event. Returns its number among the process's submissions, from 1.
    pub fn record(&mut self, process: usize) -> u64 {
        self.submit(process, Work { left: 0, is_event: true })
    }

    fn submit(&mut self, process: usize, work: Work) -> u64 {
        let queue = &mut self.queues[process];
        queue.pending.push_back(work);
        queue.submitted += 1;
        let number = queue.submitted;
        if self.discipline == Discipline::Submission {
            self.order.push_back(process);
        }
        number
    }

    /// Drops the queued work of `process`, as when it has ended.
    pub fn cancel(&mut self, process: usize) {
        let queue = &mut self.queues[process];
        queue.pending.clear();
        queue.ended = queue.submitted;
        self.order.retain(|owner| *owner != process);
    }

    /// Whether submission `number` of `process` has ended.
    #[must_use]
    pub fn has_ended(&self, process: usize, number: u64) -> bool {
        self.queues[process].ended >= number
    }

    /// Returns the number of the last submission of `process`.
    #[must_use]
    pub fn last(&self, process: usize) -> u64 {
        self.queues[process].submitted
    }

    /// Returns how many submissions of `process` have not ended.
    #[must_use]
    pub fn pending(&self, process: usize) -> usize {
        self.queues[process].pending.len()
    }

    /// Takes the stamp of the event that was submission `number`; `None` if it has not ended.
    pub fn take_stamp(&mut self, process: usize, number: u64) -> Option<u64> {
        self.queues[process].stamps.remove(&number)
    }

    /// Returns the nanoseconds for which `process` has kept the device busy.
    #[must_use]
    pub fn busy(&self, process: usize) -> u64 {
        self.queues[process].busy
    }

    /// Returns the busy nanoseconds of `process` in each bin of [`BIN`] nanoseconds.
    #[must_use]
    pub fn bins(&self, process: usize) -> &[u64] {
        &self.queues[process].bins
    }

    /// Returns all switches so far, in order.
    #[must_use]
    pub fn handovers(&self) -> &[Handover] {
        &self.handovers
    }

    /// Returns when the next piece of work, turn or switch ends; `None` if nothing can run.
    #[must_use]
    pub fn next_change(&mut self) -> Option<u64> {
        match self.choose()? {
            Phase::Runs(until) => {
                let left = self.queues[self.turn.of].pending.front()?.left;
                Some(until.min(self.now + left))
            }
            Phase::Waits(until) => Some(until),
        }
    }

    /// Moves the clock to `to`, and runs the work until then.
    pub fn advance(&mut self, to: u64) {
        while self.now <= to {
            match self.choose() {
                Some(Phase::Waits(until)) if until <= to => self.now = until,
                Some(Phase::Runs(until)) => {
                    let (now, process) = (self.now, self.turn.of);
                    let queue = &mut self.queues[process];
                    let Some(work) = queue.pending.front_mut() else { break };
                    let run = work.left.min(until.min(to) - now);
                    work.left -= run;
                    let ended = work.left == 0;
                    queue.spend(now, run);
                    self.now += run;
                    if ended {
                        self.end(process);
                    } else if run == 0 {
                        break; // the clock has arrived
                    }
                }
                Some(Phase::Waits(_)) | None => break,
            }
        }
        self.now = self.now.max(to);
    }

    fn end(&mut self, process: usize) {
        let now = self.now;
        let queue = &mut self.queues[process];
        queue.ended += 1;
        if queue.pending.pop_front().is_some_and(|work| work.is_event) {
            queue.stamps.insert(queue.ended, now);
        }
        if self.discipline == Discipline::Submission {
            self.order.pop_front();
        }
    }

    /// Returns the device's current activity; `None` if no process has work that may run.
    fn choose(&mut self) -> Option<Phase> {
        let Discipline::Slices(own) = self.discipline else {
            self.turn.of = *self.order.front()?;
            return Some(Phase::Runs(u64::MAX));
        };
        loop {
            let (now, current) = (self.now, self.turn.of);
            if now < self.turn.begin {
                return Some(Phase::Waits(self.turn.begin));
            }
            let queue = &self.queues[current];
            let (is_ready, is_stopped) = (queue.is_ready(), queue.controls.is_stopped);
            if is_ready && now < self.turn.end {
                self.turn.rests = None;
                return Some(Phase::Runs(self.turn.end));
            }
            let Some(next) = self.next() else {
                if !is_ready {
                    return None;
                }
                self.turn.end = now + queue.controls.slice.unwrap_or(own);
                continue;
            };
            let gives_up = !is_ready && !is_stopped;
            if gives_up && self.switch.holds > 0 {
                let rests = *self.turn.rests.get_or_insert(now);
                if now < rests + self.switch.holds {
                    return Some(Phase::Waits(rests + self.switch.holds));
                }
            }
            let begin = now + if gives_up { self.switch.at_rest } else { self.switch.at_work };
            let end = begin + self.queues[next].controls.slice.unwrap_or(own);
            self.handovers.push(Handover { from: self.turn.of, left: now, to: next, taken: begin });
            self.turn = Turn { of: next, begin, end, rests: None };
        }
    }

    /// Returns the process with the next turn; `None` if no other process has work that may run.
    fn next(&self) -> Option<usize> {
        let count = self.queues.len();
        let mut others = (1..count).map(|step| (self.turn.of + step) % count);
        others.find(|process| self.queues[*process].is_ready())
    }
}

impl Queue {
    fn is_ready(&self) -> bool {
        !self.controls.is_stopped && !self.pending.is_empty()
    }

    fn spend(&mut self, mut from: u64, mut length: u64) {
        self.busy += length;
        while length > 0 {
            let bin = usize::try_from(from / BIN).unwrap_or(usize::MAX);
            if self.bins.len() <= bin {
                self.bins.resize(bin + 1, 0);
            }
            let part = length.min(BIN - from % BIN);
            self.bins[bin] += part;
            from += part;
            length -= part;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Returns the stamps of two pairs of events around kernels of 5 and 3 ms that two processes submit at
    /// once.
    fn pairs(discipline: Discipline) -> [[u64; 2]; 2] {
        let mut gpu = VirtualGpu::new(discipline, 2);
        let numbers = [5, 3].map(|length| length * MS);
        let numbers: Vec<_> = (0..2)
            .map(|process| (gpu.record(process), gpu.launch(process, numbers[process]), gpu.record(process)))
            .collect();
        for step in 1..=200 {
            gpu.advance(step * MS / 10);
        }
        [0, 1].map(|process| {
            let (begin, _, end) = numbers[process];
            [begin, end].map(|number| gpu.take_stamp(process, number).unwrap() / MS)
        })
    }

    #[test]
    fn events_are_stamped_in_the_order_in_which_the_device_runs() {
        for (what, discipline, want) in [
            ("submission", Discipline::Submission, [[0, 5], [5, 8]]),
            ("slices of 2 ms", Discipline::Slices(2 * MS), [[2, 8], [0, 5]]),
            ("slices of 10 ms", Discipline::Slices(10 * MS), [[3, 8], [0, 3]]),
        ] {
            assert_eq!(pairs(discipline), want, "{what}");
        }
    }

    #[test]
    fn processes_that_always_have_work_share_a_slicing_device_evenly_whatever_the_kernels() {
        let mut gpu = VirtualGpu::new(Discipline::Slices(2 * MS), 3);
        for (process, length) in [10 * MS, MS, MS / 10].into_iter().enumerate() {
            (0..600 * MS / length).for_each(|_| _ = gpu.launch(process, length));
        }
        gpu.advance(600 * MS);
        let busy = [0, 1, 2].map(|process| gpu.busy(process) / MS);
        assert_eq!(busy, [200, 200, 200]);
        assert_eq!((0..3).flat_map(|process| gpu.bins(process)).sum::<u64>(), 600 * MS);
    }
}
