//! `gpushare-kube`: gpushare's part in a Kubernetes cluster.
//!
//! - [`node`] runs on each node with GPUs, as root, in the namespaces of pids and mounts of the node. It
//!   shows GPUs to the cluster's scheduler, reserves in the node's quota store what the scheduler placed, and
//!   hands the containers over by CDI or as countable resources. It enforces nothing itself:
//!   `gpushare-runtime` or the hook do.
//! - [`scheduler`] is an extender of kube-scheduler for GPUs that are counted by resources.
//! - [`webhook`] is called by the API server when pods are made: it sets their runtime class, and refuses keys
//!   by which a pod would grant itself something.
//! - [`plugin`] is what `kubectl gpushare` shows.
#![forbid(unsafe_code)]

mod api;
mod asks;
mod gpus;
mod node;
mod plugin;
mod resource;
mod scheduler;
mod serve;
mod webhook;

use std::ffi::{OsStr, OsString};
use std::path::Path;
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
    /// Extends kube-scheduler for GPUs that are counted by resources, until it is told to end.
    Scheduler(scheduler::Options),
    /// Answers the API server when pods are made, until it is told to end.
    Webhook(webhook::Options),
    /// What `kubectl gpushare` shows: GPUs, shares, and why a pod waits.
    Kubectl(plugin::Options),
}

/// The name under which kubectl finds the program as its plugin.
const PLUGIN: &str = "kubectl-gpushare";

fn main() -> ExitCode {
    let done = match Args::parse_from(arguments()).command {
        Command::Node(options) => node::run(options),
        Command::Scheduler(options) => scheduler::run(options),
        Command::Webhook(options) => webhook::run(&options),
        Command::Kubectl(options) => plugin::run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpushare-kube: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The arguments. Called as kubectl's plugin, the program is its subcommand `kubectl`.
fn arguments() -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let name = arguments.first().map(Path::new).and_then(Path::file_name);
    if name == Some(OsStr::new(PLUGIN)) {
        arguments.insert(1, "kubectl".into());
    }
    arguments
}
