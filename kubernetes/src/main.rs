//! `gpushare-kube`: gpushare's part in a Kubernetes cluster. `gpushare-kube node` runs on each node with
//! GPUs, as root, in the namespaces of pids and mounts of the node.
//!
//! It shows GPUs to the cluster's scheduler, reserves in the node's quota store what the scheduler placed,
//! and hands the containers over by CDI. It enforces nothing itself: `gpushare-runtime` or the hook do.
#![forbid(unsafe_code)]

mod node;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// gpushare's part in a Kubernetes cluster.
#[derive(Parser)]
#[command(name = "gpushare-kube", version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves this node's GPUs to kubelet and the cluster's scheduler, until it is told to end.
    Node(node::Options),
}

fn main() -> ExitCode {
    let Args { command: Command::Node(options) } = Args::parse();
    match node::run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpushare-kube: {error:#}");
            ExitCode::FAILURE
        }
    }
}
