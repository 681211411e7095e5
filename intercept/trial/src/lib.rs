//! The compute share tried in virtual time: containers with their processes, a GPU, and the host's meter, on one clock.
//!
//! The limiter is the one that the interception library holds; the device is the simulator's. What a run shows is how
//! far the GPU time that each container got lies from its share. A suite of runs is worth something only because the
//! negative control in it, a limiter that never learns, fails it.
#![forbid(unsafe_code)]

mod books;
mod cases;
mod chance;
mod container;
mod figures;
mod meter;
mod program;
mod run;
mod time;

pub use cases::{Case, Summary, cases};
pub use container::{Container, Load, Shape};
pub use figures::{Figures, MISS};
pub use gpushare_simulator::virtual_gpu::Discipline;
pub use meter::{Meter, Rounding};
pub use program::Estimates;
pub use run::Trial;
pub use time::{MICROSECOND, MILLISECOND, SECOND};
