//! The two policies that look at what is given already, and at nothing to come.

use crate::ledger::Policy;
use crate::node::{Node, Place, Task};

/// The fullest GPUs, then the fullest node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Binpack;

/// The emptiest GPUs, then the emptiest node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread;

/// How much is left at a place and, much less weighty, of the whole node.
fn left(node: &Node, task: &Task, place: Place) -> f64 {
    let after = node.after(task, place);
    let at_place: u64 = place.gpus().map(|index| u64::from(after.rest[index])).sum();
    let whole = after.idle_share();
    #[expect(clippy::cast_precision_loss, reason = "thousandths of sixteen GPUs are small numbers")]
    let left = at_place as f64 + whole as f64 / 1e6 + after.cpu as f64 / 1e15;
    left
}

impl Policy for Binpack {
    fn worth(&mut self, node: &Node, task: &Task, place: Place) -> f64 {
        -left(node, task, place)
    }
}

impl Policy for Spread {
    fn worth(&mut self, node: &Node, task: &Task, place: Place) -> f64 {
        left(node, task, place)
    }
}
