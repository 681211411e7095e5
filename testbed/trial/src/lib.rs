//! Tries the compute share in virtual time: containers with their processes and a GPU share one clock.
//!
//! The limiter is that of the interception library; the device is the simulator's. A run shows how far the
//! GPU time of each container is from its share. The suite contains a negative control, a limiter that never
//! learns, which must fail: without it the suite would prove nothing.
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
