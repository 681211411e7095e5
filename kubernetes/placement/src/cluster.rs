//! All nodes, and the choice among them.

use std::collections::HashMap;

use crate::node::{Node, Place, Task};

/// What a place is worth to a task: the highest is taken.
pub trait Policy {
    /// The worth of `place` for `task` on `node`, which is as it was before.
    fn worth(&mut self, node: &Node, task: &Task, place: Place) -> f64;
}

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn worth(&mut self, node: &Node, task: &Task, place: Place) -> f64 {
        (**self).worth(node, task, place)
    }
}

/// Where a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The number of the node.
    pub node: usize,
    /// Its GPUs.
    pub place: Place,
}

/// The nodes, in the order in which equals are taken.
pub struct Cluster<P> {
    nodes: Vec<Node>,
    policy: P,
    /// Counts the changes of each node.
    changes: Vec<u32>,
    /// For each kind of task the best place on each node, as of that count.
    known: HashMap<Task, Vec<Known>>,
}

#[derive(Clone, Copy)]
struct Known {
    changes: u32,
    best: Option<(f64, Place)>,
}

impl<P: Policy> Cluster<P> {
    /// A cluster of these nodes.
    pub fn new(nodes: Vec<Node>, policy: P) -> Self {
        let changes = vec![1; nodes.len()];
        Self { nodes, policy, changes, known: HashMap::new() }
    }

    /// The nodes as they are.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The best place for the task; `None` where it fits nowhere. Nothing changes.
    pub fn choose(&mut self, task: &Task) -> Option<Placed> {
        let known = self.known.entry(*task).or_default();
        known.resize(self.nodes.len(), Known { changes: 0, best: None });
        let mut chosen: Option<(f64, Placed)> = None;
        for (number, node) in self.nodes.iter().enumerate() {
            let of_node = &mut known[number];
            if of_node.changes != self.changes[number] {
                *of_node = Known { changes: self.changes[number], best: best(&mut self.policy, node, task) };
            }
            if let Some((worth, place)) = of_node.best
                && chosen.is_none_or(|(most, _)| worth > most)
            {
                chosen = Some((worth, Placed { node: number, place }));
            }
        }
        chosen.map(|(_, placed)| placed)
    }

    /// Puts the task at the best place. `None` where it fits nowhere.
    pub fn put(&mut self, task: &Task) -> Option<Placed> {
        let placed = self.choose(task)?;
        self.nodes[placed.node].take(task, placed.place);
        self.changed(placed.node);
        Some(placed)
    }

    /// Takes a task away that [`Cluster::put`] placed.
    pub fn end(&mut self, task: &Task, placed: Placed) {
        self.nodes[placed.node].give_back(task, placed.place);
        self.changed(placed.node);
    }

    fn changed(&mut self, node: usize) {
        self.changes[node] = self.changes[node].wrapping_add(1);
    }
}

/// The best place of one node. Of equals it is the first.
pub(crate) fn best<P: Policy>(policy: &mut P, node: &Node, task: &Task) -> Option<(f64, Place)> {
    let mut best: Option<(f64, Place)> = None;
    for place in node.places(task) {
        let worth = policy.worth(node, task, place);
        if best.is_none_or(|(most, _)| worth > most) {
            best = Some((worth, place));
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fill::Fill;
    use crate::node::{Models, WHOLE};
    use crate::simple::{Binpack, Spread};

    fn tasks(random: &mut fastrand::Rng, count: usize) -> Vec<Task> {
        let any = |_| {
            let gpus = [0, 1, 1, 1, 2, 4, 8][random.usize(..7)];
            let share = match gpus {
                0 => 0,
                1 => [100, 250, 460, 500, 1000][random.usize(..5)],
                _ => WHOLE,
            };
            let models = if random.u8(..4) == 0 { Models::ANY.with(random.u8(..3)) } else { Models::ANY };
            Task { cpu: random.u64(500..16_000), memory: random.u64(1..65_536), gpus, share, models }
        };
        (0..count).map(any).collect()
    }

    fn nodes() -> Vec<Node> {
        let node = |number: usize| {
            let model = u8::try_from(number % 3).unwrap();
            Node::idle(96_000, 262_144, [1, 2, 4, 8][number % 4], model)
        };
        (0..12).map(node).collect()
    }

    fn policies(tasks: &[Task]) -> [Box<dyn Policy>; 3] {
        let demand = tasks.iter().map(|task| (Task { memory: 0, ..*task }, 1.0)).collect();
        [Box::new(Fill::new(&demand)), Box::new(Binpack), Box::new(Spread)]
    }

    /// Places and ends tasks at random. Returns what was decided.
    fn run(cluster: &mut Cluster<Box<dyn Policy>>, tasks: &[Task], seed: u64) -> Vec<Option<Placed>> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut running = Vec::new();
        let mut decided = Vec::new();
        for task in tasks {
            let fits = cluster.nodes().iter().any(|node| node.places(task).next().is_some());
            let placed = cluster.put(task);
            assert_eq!(placed.is_some(), fits, "what fits is placed, and nothing else: {task:?}");
            running.extend(placed.map(|placed| (*task, placed)));
            decided.push(placed);
            if random.u8(..3) == 0 && !running.is_empty() {
                let (task, placed) = running.swap_remove(random.usize(..running.len()));
                cluster.end(&task, placed);
            }
            assert_sound(cluster, &running);
        }
        decided
    }

    /// What is left and what runs are together what there was, on every GPU.
    fn assert_sound(cluster: &Cluster<Box<dyn Policy>>, running: &[(Task, Placed)]) {
        for (number, (left, whole)) in cluster.nodes().iter().zip(nodes()).enumerate() {
            let mut sum = *left;
            for (task, placed) in running.iter().filter(|(_, placed)| placed.node == number) {
                sum.cpu += task.cpu;
                sum.memory += task.memory;
                placed.place.gpus().for_each(|gpu| sum.rest[gpu] += task.share);
                assert_eq!(placed.place.gpus().count(), usize::from(task.gpus));
            }
            assert_eq!(sum, whole, "node {number}");
        }
    }

    #[test]
    fn no_policy_gives_more_than_there_is_or_refuses_what_fits() {
        for seed in 0..20 {
            let tasks = tasks(&mut fastrand::Rng::with_seed(seed), 150);
            for policy in policies(&tasks) {
                run(&mut Cluster::new(nodes(), policy), &tasks, seed);
            }
        }
    }

    #[test]
    fn the_same_tasks_are_placed_the_same_again_and_after_a_new_start() {
        let tasks = tasks(&mut fastrand::Rng::with_seed(7), 150);
        let all = || policies(&tasks).into_iter();
        for ((one, other), anew) in all().zip(all()).zip(all()) {
            let (mut one, mut other) = (Cluster::new(nodes(), one), Cluster::new(nodes(), other));
            assert_eq!(run(&mut one, &tasks, 7), run(&mut other, &tasks, 7));
            // Whoever starts anew knows the nodes as they are, and nothing of how they came to be so.
            let mut anew = Cluster::new(one.nodes().to_vec(), anew);
            for task in &tasks {
                assert_eq!(anew.choose(task), one.choose(task), "{task:?}");
            }
        }
    }
}
