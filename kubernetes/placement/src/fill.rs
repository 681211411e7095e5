//! The policy `fill`: a task goes where least is lost of what the node could still take in.
//!
//! What a node could take in is tried: a few sequences of tasks, drawn from those that come to the cluster,
//! are walked over the node. What they leave idle will probably stay idle. The place is best whose node loses
//! idle shares that would have been left over anyway.

use std::collections::HashMap;

use crate::ledger::Policy;
use crate::node::{GPUS, Node, Place, Task, WHOLE};

// The numbers were tried on eight lists of a production trace (the bench's section "placement"): more
// sequences starve tasks of eight GPUs on some of them, and fewer on others.

/// How many sequences are walked.
const SEQUENCES: usize = 16;
/// Tasks of one sequence: more than fill a node of eight GPUs.
const LENGTH: usize = 40;
/// What is left of processors when no walk goes on, in thousandths of one: fewer start no task of a GPU.
const LEAST_CPU: u64 = 1000;
/// Makes half an idle GPU on each of two nodes worse than one on one: only the latter serves a whole-GPU
/// task.
const POWER: f64 = 0.6;
/// A task of eight GPUs counts as this power of eight of one. At 1 few sequences have one, and it is refused
/// three times as often.
const SIZE: f64 = 1.6;
/// What an idle processor is worth, of a GPU, that is too few for tasks without a GPU.
const STRANDED: f64 = 0.1;
/// States of nodes whose worth is kept. Above it all are forgotten. There is room for so many from the start:
/// to move a large table would make one decision wait for a tenth of a second.
const KEPT: usize = 1 << 18;

/// How often each kind of task comes.
pub type Demand = Vec<(Task, f64)>;

/// The policy, for one distribution of tasks.
pub struct Fill {
    sequences: Vec<Vec<Task>>,
    /// The processors that tasks without a GPU take, each with its part of all tasks.
    without_gpu: Vec<(u64, f64)>,
    /// What stays idle of a node, by its state.
    idle: HashMap<Node, f64>,
}

impl Fill {
    /// The policy for tasks that come as `demand` says. Weights need no sum; kinds without a GPU fill none.
    /// Equal demands give equal policies.
    #[must_use]
    pub fn new(demand: &Demand) -> Self {
        let all: f64 = demand.iter().map(|(_, weight)| weight).sum();
        let without_gpu = demand.iter().filter(|(task, _)| task.gpus == 0);
        let without_gpu = without_gpu.map(|(task, weight)| (task.cpu, weight / all)).collect();
        let idle = HashMap::with_capacity(KEPT);
        Self { sequences: sequences(demand), without_gpu, idle }
    }

    /// What will be lost of the node.
    fn lost(&mut self, node: &Node) -> f64 {
        self.idle(node) + self.stranded(node)
    }

    /// The processors that are too few for the tasks without a GPU.
    fn stranded(&self, node: &Node) -> f64 {
        let too_large = self.without_gpu.iter().filter(|(cpu, _)| *cpu > node.cpu);
        let part: f64 = too_large.map(|(_, part)| part).sum();
        #[expect(clippy::cast_precision_loss, reason = "thousandths of a node's processors")]
        let processors = node.cpu as f64 / 1000.0;
        STRANDED * processors * part
    }

    /// What stays idle of the node's GPUs, as the walks say.
    fn idle(&mut self, node: &Node) -> f64 {
        if node.idle_share() == 0 {
            return 0.0;
        }
        // The order of GPUs and what is left of the node's memory make no difference.
        let mut state = Node { memory: 0, ..*node };
        state.rest[..usize::from(node.gpus)].sort_unstable();
        if let Some(idle) = self.idle.get(&state) {
            return *idle;
        }
        let walks = self.sequences.iter().map(|sequence| after_walk(&state, sequence));
        let sum: f64 = walks.map(|left| (f64::from(left) / f64::from(WHOLE)).powf(POWER)).sum();
        #[expect(clippy::cast_precision_loss, reason = "there are a few sequences")]
        let idle = sum / self.sequences.len().max(1) as f64;
        if self.idle.len() >= KEPT {
            self.idle.clear();
        }
        self.idle.insert(state, idle);
        idle
    }
}

impl Policy for Fill {
    fn worth(&mut self, node: &Node, task: &Task, place: Place) -> f64 {
        self.lost(node) - self.lost(&node.after(task, place))
    }
}

/// What is idle of the node's GPUs when the sequence has been put into it, in thousandths. What does not fit
/// is left out. Parts of a GPU go to the fullest one.
fn after_walk(node: &Node, sequence: &[Task]) -> u32 {
    let mut cpu = node.cpu;
    let mut rest: [u16; GPUS] = node.rest;
    let rest = &mut rest[..usize::from(node.gpus)];
    let mut idle: u32 = rest.iter().map(|rest| u32::from(*rest)).sum();
    for task in sequence {
        if idle == 0 || cpu < LEAST_CPU {
            break;
        }
        if task.cpu > cpu || !fits(rest, task, node.model) {
            continue;
        }
        for _ in 0..task.gpus {
            let fitting = rest.iter_mut().filter(|rest| **rest >= task.share);
            if let Some(fullest) = fitting.min() {
                *fullest -= task.share;
                idle -= u32::from(task.share);
            }
        }
        cpu -= task.cpu;
    }
    idle
}

fn fits(rest: &[u16], task: &Task, model: u8) -> bool {
    let free = rest.iter().filter(|rest| **rest >= task.share).count();
    free >= usize::from(task.gpus) && task.allows(model)
}

/// Draws the sequences. A kind comes the more often the more GPUs it takes, so that tasks of eight GPUs,
/// which are few and large, have their say. Of each step the draws lie evenly over the kinds.
fn sequences(demand: &Demand) -> Vec<Vec<Task>> {
    let wanted = demand.iter().filter(|(task, weight)| task.gpus > 0 && *weight > 0.0);
    let mut kinds: Vec<(Task, f64)> =
        wanted.map(|(task, weight)| (*task, weight * f64::from(task.gpus).powf(SIZE))).collect();
    // The draws do not depend on the order in which the kinds were counted, and those of a step lie evenly
    // over the numbers of GPUs first.
    kinds.sort_by_key(|(task, _)| (task.gpus, task.share, *task));
    let total: f64 = kinds.iter().map(|(_, weight)| weight).sum();
    if kinds.is_empty() {
        return Vec::new();
    }
    let mut random = fastrand::Rng::with_seed(1);
    let mut sequences = vec![Vec::new(); SEQUENCES];
    for _ in 0..LENGTH {
        let mut strata: Vec<usize> = (0..SEQUENCES).collect();
        random.shuffle(&mut strata);
        for (sequence, stratum) in sequences.iter_mut().zip(strata) {
            #[expect(clippy::cast_precision_loss, reason = "there are a few sequences")]
            let at = (stratum as f64 + random.f64()) / SEQUENCES as f64 * total;
            sequence.push(kind_at(&kinds, at));
        }
    }
    sequences
}

/// The kind at a point of the weights' sum.
fn kind_at(kinds: &[(Task, f64)], at: f64) -> Task {
    let mut passed = 0.0;
    let found = kinds.iter().find(|(_, weight)| {
        passed += weight;
        at < passed
    });
    found.or(kinds.last()).map(|(task, _)| *task).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::tests::{ledger, left, needs, placed};
    use crate::node::Models;

    fn task(gpus: u8, share: u16) -> Task {
        Task { cpu: 1000, memory: 1, gpus, share, models: Models::ANY }
    }

    #[test]
    fn a_share_goes_where_what_comes_leaves_room_for_it() {
        // Tasks of whole GPUs come: a part of one serves nobody else. Of parts, those of 400 come too.
        let demand = vec![(task(1, WHOLE), 1.0), (task(1, 400), 1.0)];
        let mut ledger = ledger(&[Node::idle(64_000, 1 << 20, 3, 0); 2], Fill::new(&demand));
        left(&mut ledger, 1, &[WHOLE, 400, 300]);
        assert_eq!(placed(&mut ledger, &needs(&task(1, 300))), Some((1, vec![2])));
    }

    #[test]
    fn a_task_without_a_gpu_strands_none() {
        // The first node's last processors are needed by its idle GPU; the second has no GPU idle.
        let nodes = [Node::idle(2000, 1 << 20, 1, 0), Node::idle(64_000, 1 << 20, 1, 0)];
        let mut ledger = ledger(&nodes, Fill::new(&vec![(task(1, WHOLE), 1.0)]));
        left(&mut ledger, 1, &[0]);
        let cpu_only = Task { cpu: 1500, memory: 1, ..Task::default() };
        assert_eq!(placed(&mut ledger, &needs(&cpu_only)), Some((1, vec![])));
    }

    #[test]
    fn a_demand_in_another_order_is_the_same_demand() {
        let mut demand = vec![(task(1, 300), 2.0), (task(8, WHOLE), 1.0), (task(2, WHOLE), 3.0)];
        let drawn = sequences(&demand);
        demand.reverse();
        assert_eq!(sequences(&demand), drawn);
        let count = |gpus: u8| drawn.iter().flatten().filter(|task| task.gpus == gpus).count();
        // Of 2, 9.1 and 27.9 parts of 39, evenly in each step.
        let counts = (count(1), count(2), count(8));
        assert!((25..45).contains(&counts.0) && (130..170).contains(&counts.1), "{counts:?}");
        let in_a_step = |step: usize| drawn.iter().filter(|sequence| sequence[step].gpus == 8).count();
        assert!((0..LENGTH).all(|step| (10..=13).contains(&in_a_step(step))), "{counts:?}");
        assert_eq!(sequences(&vec![(Task::default(), 1.0)]), Vec::<Vec<Task>>::new());
    }

    #[test]
    fn what_fits_is_placed_whatever_comes() {
        let mut ledger = ledger(&[Node::idle(8000, 1 << 20, 4, 0)], Fill::new(&Vec::new()));
        for _ in 0..4 {
            assert!(placed(&mut ledger, &needs(&task(1, 600))).is_some());
        }
        assert_eq!(placed(&mut ledger, &needs(&task(1, 600))), None);
        assert!(placed(&mut ledger, &needs(&task(1, 400))).is_some());
    }
}
