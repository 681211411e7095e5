//! The supervisor performs, outside of the container, those of the container's calls to NVIDIA's resource
//! manager (RM) that take or release device memory. It thereby enforces the container's share, whatever the
//! container runs.
//!
//! A seccomp filter around the container reports the calls ([`filter`]). The supervisor copies each call,
//! decides by the container's books and the lease's budget ([`calls`], [`books`], [`budget`]), performs it on
//! the program's own file, and writes the result into the program's memory. Only [`tasks`] and the layers
//! below it deal with processes, descriptors and clocks.
#![deny(unsafe_code)]

pub mod abi;
pub mod board;
pub mod books;
pub mod budget;
pub mod calls;
pub mod devices;
pub mod engine;
pub mod filter;
pub mod handles;
pub mod handover;
pub mod journal;
pub mod keeper;
pub mod kernel;
pub mod manager;
pub mod memory;
pub mod plan;
pub mod program;
pub mod rights;
pub mod sys;
pub mod tasks;
pub mod timekeeper;
pub mod worker;
