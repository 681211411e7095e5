//! Places tasks that come and go by the trace's own times, on a part of its nodes so that some have to wait.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use gpushare_placement::{Ledger, Machine, Policy, Task};

use super::fgd::Fgd;
use super::trace::{self, Trace, capacity, needs, popularity};
use crate::table::{Row, Table};

/// Keep one node of this many. At most 66 GPUs of the trace's 6,212 are used at one time, so on all nodes no
/// task would wait.
const KEPT: [usize; 3] = [80, 110, 150];

/// Measure idle shares once per this many arrivals.
const LOOK: usize = 50;

/// The result of a run.
struct Run {
    /// Mean seconds from a task's arrival to its start.
    wait: f64,
    /// How many tasks waited at all.
    waited: usize,
    /// Idle shares that the tasks of the list could not use, in percent of the GPUs: the mean over arrivals.
    fragments: f64,
}

/// Adds the rows of one list.
pub fn rows(name: &str, trace: &Trace, table: &mut Table) {
    let demand = popularity(&trace.tasks);
    for every in KEPT {
        let nodes: Vec<Machine> = trace.nodes.iter().step_by(every).cloned().collect();
        let mut told = super::policies(&demand).map(|(policy, worth)| {
            let judge = Fgd::new(&demand);
            (policy, run(&nodes, trace, worth, &judge))
        });
        told.reverse();
        let [(_, theirs), (policy, ours)] = told;
        let what = format!("{name}, by the trace's times on 1 node of {every}: mean wait, {policy}");
        table.push(Row::plain(&what, format!("{:.0} s", ours.wait)).spread(format!(
            "FGD {:.0} s; waited {} (FGD {}); unusable idle shares {:.2} % of all GPUs (FGD {:.2})",
            theirs.wait, ours.waited, theirs.waited, ours.fragments, theirs.fragments
        )));
    }
}

/// Runs the list. Tasks that do not fit wait in the order of arrival; later ones may overtake them.
fn run(nodes: &[Machine], trace: &Trace, policy: Box<dyn Policy>, judge: &Fgd) -> Run {
    let capacity = capacity(nodes);
    let mut tasks: Vec<(u64, u64, Task)> = trace
        .tasks
        .iter()
        .filter_map(|timed| {
            let (came, went) = timed.came.zip(timed.went)?;
            Some((came, went.saturating_sub(came), timed.task))
        })
        .collect();
    tasks.sort_by_key(|(came, ..)| *came);
    let mut ledger = trace::ledger(nodes.iter().cloned(), policy);
    // A task's end and number.
    let mut running: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut places: Vec<Option<usize>> = vec![None; tasks.len()];
    let mut waiting: VecDeque<usize> = VecDeque::new();
    let (mut waits, mut waited, mut fragments, mut looks) = (0_u64, 0, 0.0, 0.0);
    let mut start = |number: usize,
                     now: u64,
                     ledger: &mut Ledger<usize, Box<dyn Policy>>,
                     running: &mut BinaryHeap<_>| {
        let (came, length, task) = &tasks[number];
        let placed = ledger.put(number, &needs(task));
        if placed.is_some() {
            waits += now - came;
            waited += usize::from(now > *came);
            running.push(Reverse((now + length, number)));
        }
        placed
    };
    for (number, (came, ..)) in tasks.iter().enumerate() {
        while let Some(Reverse((end, ended))) =
            running.peek().copied().filter(|Reverse((end, _))| end <= came)
        {
            running.pop();
            if let Some(node) = places[ended] {
                ledger.release(node, &ended);
            }
            waiting.retain(|number| {
                places[*number] = start(*number, end, &mut ledger, &mut running);
                places[*number].is_none()
            });
        }
        places[number] = start(number, *came, &mut ledger, &mut running);
        if places[number].is_none() {
            waiting.push_back(number);
        }
        if number % LOOK != 0 {
            continue;
        }
        looks += 1.0;
        let lost: f64 = ledger.views().map(|node| judge.fragments(node)).sum();
        #[expect(clippy::cast_precision_loss, reason = "thousandths of some thousand GPUs")]
        let of = capacity as f64;
        fragments += lost * 100.0 / of;
    }
    // Tasks that still wait at the end have waited until then.
    let end = tasks.last().map_or(0, |(came, ..)| *came);
    for number in &waiting {
        waits += end - tasks[*number].0;
        waited += 1;
    }
    #[expect(clippy::cast_precision_loss, reason = "sums of seconds of some thousand tasks")]
    let (count, waits) = (tasks.len() as f64, waits as f64);
    Run { wait: waits / count, waited, fragments: fragments / looks }
}
