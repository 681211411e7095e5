//! Which node and which GPUs of a cluster a task gets. Pure: no clock, no I/O, and the same input gives the
//! same answer.
//!
//! A [`Ledger`] knows the nodes and what pods hold of them, to the byte. It asks a [`Policy`] what each place
//! that fits is worth: [`Fill`], [`Binpack`] or [`Spread`]. A share that fits is never refused; of a
//! pod with several containers a bounded number of ways is tried. Policies see parts of
//! GPUs in thousandths: of memory or of compute, whichever is more.
#![forbid(unsafe_code)]

mod fill;
mod ledger;
mod machine;
mod node;
mod simple;

pub use fill::{Demand, Fill};
pub use ledger::{Host, Ledger, Policy};
pub use machine::{Gpu, Machine, Memory, Misfit, Needs, Part, Places, Share};
pub use node::{GPUS, Models, Node, Place, Task, WHOLE};
pub use simple::{Binpack, Spread};
