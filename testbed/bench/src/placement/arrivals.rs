//! Places tasks that arrive in a random order. None leaves.

use fastrand::Rng;
use gpushare_placement::{Policy, Task};

use super::trace::{self, Trace, needs};

/// Demand that has arrived at the end, in percent of all GPUs.
const ARRIVED: u64 = 130;

/// The outcome of one run, or the mean of several, in percent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Allocated part of all GPUs.
    pub allocated: f64,
    /// Refused part of the CPU-only tasks that arrived.
    pub refused_cpu: f64,
    /// Refused part of the tasks with eight GPUs that arrived.
    pub refused_eight: f64,
}

impl Outcome {
    /// Returns the mean of several runs; zeros for none.
    pub fn mean<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let mean = |figure: fn(&Self) -> f64| {
            let (sum, count) =
                all.clone().fold((0.0, 0.0), |(sum, count), one| (sum + figure(one), count + 1.0));
            if count > 0.0 { sum / count } else { 0.0 }
        };
        Self {
            allocated: mean(|one| one.allocated),
            refused_cpu: mean(|one| one.refused_cpu),
            refused_eight: mean(|one| one.refused_eight),
        }
    }
}

/// Places the tasks of the list in the order of this seed. The allocated part is the mean over the arrivals
/// at which the demand rounds to 130 %.
pub fn run<P: Policy>(trace: &Trace, seed: u64, policy: P) -> Outcome {
    let mut random = Rng::with_seed(seed);
    let mut nodes = trace.nodes.clone();
    random.shuffle(&mut nodes);
    let capacity = trace.capacity();
    let tasks = arrivals(trace, capacity, &mut random);
    let mut ledger = trace::ledger(nodes.into_iter(), policy);
    let (mut arrived, mut allocated) = (0, 0);
    let (mut sum, mut count) = (0.0, 0.0);
    let mut cpu_only = Counts::default();
    let mut eight = Counts::default();
    for (number, task) in tasks.iter().enumerate() {
        arrived += task.demand();
        let placed = ledger.put(number, &needs(task)).is_some();
        if placed {
            allocated += task.demand();
        }
        match task.gpus {
            0 => cpu_only.add(placed),
            8 => eight.add(placed),
            _ => {}
        }
        if (arrived * 100 + capacity / 2) / capacity == ARRIVED {
            sum += percent(allocated, capacity);
            count += 1.0;
        }
    }
    Outcome {
        allocated: if count > 0.0 { sum / count } else { 0.0 },
        refused_cpu: cpu_only.refused(),
        refused_eight: eight.refused(),
    }
}

/// Returns the tasks in the order of their arrival: the list's in a random order, then random ones of the
/// list, until the demand no longer rounds to 130 %.
fn arrivals(trace: &Trace, capacity: u64, random: &mut Rng) -> Vec<Task> {
    let mut tasks: Vec<Task> = trace.tasks.iter().map(|timed| timed.task).collect();
    random.shuffle(&mut tasks);
    let count = tasks.len();
    let mut arrived = 0;
    let end = capacity * (2 * ARRIVED + 1) / 200;
    let mut number = 0;
    while arrived < end {
        if number >= tasks.len() {
            let one = tasks[random.usize(..count)];
            tasks.push(one);
        }
        arrived += tasks[number].demand();
        number += 1;
    }
    tasks.truncate(number);
    tasks
}

#[derive(Default)]
struct Counts {
    arrived: u64,
    refused: u64,
}

impl Counts {
    fn add(&mut self, placed: bool) {
        self.arrived += 1;
        self.refused += u64::from(!placed);
    }

    fn refused(&self) -> f64 {
        percent(self.refused, self.arrived.max(1))
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of a few million at most")]
pub fn percent(part: u64, of: u64) -> f64 {
    part as f64 * 100.0 / of as f64
}
