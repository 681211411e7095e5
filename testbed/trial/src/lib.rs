//! Tests the compute share in virtual time: containers with their processes and a GPU share one clock.
//!
//! The limiter is the interception library's; the device is the simulator's. A run shows how far the GPU time
//! of each container is from its share. The suite contains a negative control that must fail, a limiter that
//! never learns. Without it the suite would prove nothing.
#![forbid(unsafe_code)]

mod books;
mod cases;
mod chance;
mod container;
mod figures;
mod program;
mod run;
pub mod supervised;
mod time;

pub use cases::{Case, Setting, Summary, cases};
pub use container::{Container, Load, Shape};
pub use figures::{Bounds, Figures};
pub use gpushare_simulator::virtual_gpu::Discipline;
pub use program::Estimates;
pub use run::Trial;
pub use time::{MICROSECOND, MILLISECOND, SECOND};
