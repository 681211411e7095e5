//! The books under many real processes. A "driver" with one shared word per process records the memory really
//! held, so every test compares the books with figures that the books do not keep.

#![allow(clippy::unwrap_used, reason = "a step that fails shall fail the test")]

mod container;
mod files;
mod namespaces;
mod process;
mod races;
mod slots;
mod survival;
