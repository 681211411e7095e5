//! The two libraries over the simulated driver. A test is named after the case of another library's failure
//! that it covers (see `intercept/tests/README.md`). In each test, [`place::CONTEXT`] is charged for the first
//! context of a process.

#![allow(clippy::unwrap_used, reason = "a step that fails shall fail the test")]

mod client;
mod compute;
mod endings;
mod fake;
mod fake_races;
mod families;
mod frees;
mod graphs;
mod guest;
mod kills;
mod loader;
mod names;
mod overhead;
mod place;
mod pools;
mod processes;
mod views;
mod waits;

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;
