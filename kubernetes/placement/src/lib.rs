//! Which node and which GPUs of a cluster a task gets. Pure: no clock, no I/O, and the same input gives the
//! same answer.
//!
//! A [`Cluster`] knows its nodes and asks a [`Policy`] what each place that fits is worth: [`Fill`],
//! [`Binpack`] or [`Spread`]. What fits is never refused. Amounts of a GPU are thousandths of it, whatever
//! they are of (memory, compute): who has both takes the larger one.
#![forbid(unsafe_code)]

mod cluster;
mod fill;
mod node;
mod simple;

pub use cluster::{Cluster, Placed, Policy};
pub use fill::{Demand, Fill};
pub use node::{GPUS, Models, Node, Place, Task, WHOLE};
pub use simple::{Binpack, Spread};
