//! Requests of other systems: every dialect, with the sets of `tests/dialects`.
#![allow(clippy::unwrap_used, missing_docs)]

mod engines;
mod golden;
mod page;
mod pairs;
mod properties;
mod sets;
mod slurm;
mod statements;
mod trust;
