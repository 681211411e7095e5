//! The harness of the scenario tests: it runs the shipped binaries against real low-level runtimes and a real
//! docker daemon, on a node with simulated GPUs, and asks the kernel and the engines what came of it.
//!
//! It links no other part of gpushare: what a test knows, a user can see too. The scenarios are in
//! `tests/tests/`, the set-up of the machine in `tests/setup/`. A set-up that goes wrong panics: in a test
//! that is the clearest report.

pub mod artifacts;
pub mod bundle;
pub mod cluster;
pub mod command;
pub mod containerd;
pub mod daemon;
pub mod distribution;
pub mod docker;
pub mod grpc;
pub mod hooked;
pub mod image;
pub mod leases;
pub mod machine;
pub mod meter;
pub mod mps;
pub mod namespace;
pub mod needs;
pub mod node;
pub mod pages;
pub mod podman;
pub mod probe;
pub mod python;
pub mod regions;
mod rlimit;
pub mod runtime;
pub mod scratch;
pub mod service;
pub mod shim;
pub mod slurm;
pub mod terminal;
pub mod view;
pub mod watched;
pub mod workplace;
