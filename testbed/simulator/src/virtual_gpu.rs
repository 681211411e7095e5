//! A GPU in virtual time: work of several processes that takes time and computes nothing, on a clock that the
//! caller moves.
//!
//! A run of eleven seconds takes milliseconds, gives the same result every time, and is not disturbed by
//! other work on the machine. The module owns the order in which work runs, the stamps of events and the busy
//! time of each process. Programs, limits and samples belong to its caller.

use std::collections::{HashMap, VecDeque};

/// Length of a bin of the busy times, in nanoseconds.
pub const BIN: u64 = 1_000_000;

/// Whose work runs next.
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
    submitted: u64,
    ended: u64,
    stamps: HashMap<u64, u64>,
    bins: Vec<u64>,
    busy: u64,
}

/// The device; its clock starts at 0 and counts nanoseconds.
#[derive(Debug)]
pub struct VirtualGpu {
    discipline: Discipline,
    now: u64,
    queues: Vec<Queue>,
    /// Owners of the pending work in the order of submission.
    order: VecDeque<usize>,
    /// Process whose turn it is.
    turn: usize,
    /// When the turn ends at the latest.
    turn_end: u64,
}

impl VirtualGpu {
    /// An idle device at time 0 for `processes` processes.
    #[must_use]
    pub fn new(discipline: Discipline, processes: usize) -> Self {
        let queues = (0..processes).map(|_| Queue::default()).collect();
        Self { discipline, now: 0, queues, order: VecDeque::new(), turn: 0, turn_end: 0 }
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

    /// Whether submission `number` of `process` has ended.
    #[must_use]
    pub fn has_ended(&self, process: usize, number: u64) -> bool {
        self.queues[process].ended >= number
    }

    /// The number of the last submission of `process`.
    #[must_use]
    pub fn last(&self, process: usize) -> u64 {
        self.queues[process].submitted
    }

    /// How many submissions of `process` have not ended.
    #[must_use]
    pub fn pending(&self, process: usize) -> usize {
        self.queues[process].pending.len()
    }

    /// Takes the stamp of the event that was submission `number`; `None` if it has not ended.
    pub fn take_stamp(&mut self, process: usize, number: u64) -> Option<u64> {
        self.queues[process].stamps.remove(&number)
    }

    /// Nanoseconds for which `process` has kept the device busy.
    #[must_use]
    pub fn busy(&self, process: usize) -> u64 {
        self.queues[process].busy
    }

    /// Busy nanoseconds of `process` in each bin of [`BIN`] nanoseconds.
    #[must_use]
    pub fn bins(&self, process: usize) -> &[u64] {
        &self.queues[process].bins
    }

    /// When the next piece of work or the next turn ends; `None` if nothing is queued.
    #[must_use]
    pub fn next_change(&mut self) -> Option<u64> {
        self.choose()?;
        let left = self.queues[self.turn].pending.front()?.left;
        let end = self.now + left;
        Some(if matches!(self.discipline, Discipline::Slices(_)) { end.min(self.turn_end) } else { end })
    }

    /// Moves the clock to `to`, and runs the work until then.
    pub fn advance(&mut self, to: u64) {
        while self.now <= to {
            if self.choose().is_none() {
                break;
            }
            let process = self.turn;
            let (now, turn_end) = (self.now, self.turn_end);
            let slices = matches!(self.discipline, Discipline::Slices(_));
            let queue = &mut self.queues[process];
            let Some(work) = queue.pending.front_mut() else { break };
            let mut run = work.left.min(to - now);
            if slices {
                run = run.min(turn_end - now);
            }
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

    /// Sets `turn` to the process that runs now; `None` if no process has work.
    fn choose(&mut self) -> Option<()> {
        match self.discipline {
            Discipline::Submission => self.turn = *self.order.front()?,
            Discipline::Slices(length) => {
                let goes_on = !self.queues[self.turn].pending.is_empty() && self.now < self.turn_end;
                if !goes_on {
                    let count = self.queues.len();
                    let next = (1..=count).map(|step| (self.turn + step) % count);
                    self.turn = next.into_iter().find(|process| !self.queues[*process].pending.is_empty())?;
                    self.turn_end = self.now + length;
                }
            }
        }
        Some(())
    }
}

impl Queue {
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

    /// Stamps of two pairs of events around kernels of 5 and 3 ms that two processes submit at once.
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
