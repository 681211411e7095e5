//! `gpushare-kube node` between a simulated kubelet and a simulated API server, on a simulated node with real
//! low-level runtimes.

mod aliases;
mod allocations;
mod claims;
mod lives;
mod plugin;
mod resizes;
mod slices;

use std::path::Path;

use gpushare_tests::cluster::{ClusterNode, Settings};

/// The agent's program, as it was built for these tests.
fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_gpushare-kube"))
}

/// A node of `gpus` GPUs of 80 GiB.
fn node(gpus: usize) -> ClusterNode {
    ClusterNode::start(program(), gpus, Settings::default())
}
