//! Serves a simulated resource manager at a folder until it is ended.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use gpushare_simulated_manager::{Gpu, Manager, mount};
use gpushare_supervisor::abi::Era;

/// Serves a simulated resource manager.
#[derive(Parser)]
struct Args {
    /// Folder that gets the files nvidiactl, nvidia-uvm, nvidia0 …
    folder: PathBuf,
    /// How many GPUs.
    #[arg(long, default_value_t = 1)]
    gpus: u8,
    /// Memory of each, in MiB.
    #[arg(long, default_value_t = 80 << 10)]
    memory: u64,
    /// The driver's version.
    #[arg(long, default_value = "580.142")]
    driver: String,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let version = args.driver.parse().ok().and_then(Era::for_version);
    let era = version.with_context(|| format!("driver {} is not known", args.driver))?;
    let gpus = (0..args.gpus).map(|gpu| Gpu { uuid: [gpu + 1; 16], memory: args.memory << 20 }).collect();
    let session = mount(Manager::new(era, gpus), u64::from(args.gpus), &args.folder)
        .with_context(|| format!("cannot mount at {}", args.folder.display()))?;
    println!("ready");
    session.join().context("the file system ended")
}
