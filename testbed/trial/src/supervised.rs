//! Shares that supervisors enforce from outside of the containers, by windows and slices.
//!
//! The schedule is the product's (`gpushare-schedule`). The card has the times measured on an H200 with
//! driver 580: its slices, its switches, and the duration of calls that stop and start channels. Programs are
//! typical ones: kernels of any length, training, requests.

mod case;
mod figures;
mod picture;
mod program;
mod run;
mod supervisor;

pub use case::{Case, Outcome, Tenant};
pub use figures::{Latencies, Share};
pub use picture::picture;
pub use program::{Between, Work};
pub use supervisor::Lateness;
