//! The study's own policy, fragmentation gradient descent, for comparison. It places a task where it least
//! increases the idle GPU shares that the tasks of the list could not use.

use gpushare_placement::{Demand, Node, Place, Policy, Task};

/// The part of the list's tasks whose kinds count, the most popular first.
const COUNTED: f64 = 0.95;

/// The policy for one list of tasks.
pub struct Fgd {
    kinds: Demand,
}

impl Fgd {
    /// Creates the policy for tasks that arrive according to `demand`.
    pub fn new(demand: &Demand) -> Self {
        let total: f64 = demand.iter().map(|(_, weight)| weight).sum();
        let mut kinds = demand.clone();
        kinds.sort_by(|one, other| other.1.total_cmp(&one.1));
        let mut passed = 0.0;
        kinds.retain(|(_, weight)| {
            let counts = passed < COUNTED * total;
            passed += weight;
            counts
        });
        let counted: f64 = kinds.iter().map(|(_, weight)| weight).sum();
        kinds.iter_mut().for_each(|(_, weight)| *weight /= counted);
        Self { kinds }
    }

    /// Returns the thousandths of idle GPUs that arriving tasks cannot use, on average.
    pub fn fragments(&self, node: &Node) -> f64 {
        let idle = float(node.idle_share());
        // A node's memory decides which tasks fit, but not which part is a fragment.
        let roomy = Node { memory: u64::MAX, ..*node };
        let unusable = |task: &Task| {
            if task.gpus == 0 || !roomy.fits(task) {
                return idle;
            }
            let small = node.gpus().iter().filter(|rest| **rest < task.share);
            small.map(|rest| f64::from(*rest)).sum()
        };
        self.kinds.iter().map(|(task, weight)| weight * unusable(task)).sum()
    }
}

impl Policy for Fgd {
    fn worth(&mut self, node: &Node, task: &Task, place: Place) -> f64 {
        let less = self.fragments(node) - self.fragments(&node.after(task, place));
        // The study's scheduler only has whole scores from 0 to 100, and does worse with finer ones.
        (100.0 / (1.0 + (-less / 1000.0).exp())).floor()
    }
}

#[expect(clippy::cast_precision_loss, reason = "thousandths of sixteen GPUs are small numbers")]
fn float(number: u64) -> f64 {
    number as f64
}
