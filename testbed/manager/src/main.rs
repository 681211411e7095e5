//! Serves the resource manager of a simulated node until it is killed.

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use gpushare_simulated_manager::serve;
use nix::sys::signal::{SigSet, Signal};

/// Serves the resource manager of a simulated node for tests, where gpushare-simulated-supervisor holds the
/// containers.
#[derive(Parser)]
struct Args {
    /// The node's folder, as `gpushare-simulator create` has it.
    node: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let ends = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    ends.thread_block()?; // also in its threads, so that signals arrive only here
    let session = serve(&args.node)?;
    println!("ready");
    ends.wait()?;
    drop(session);
    Ok(())
}
