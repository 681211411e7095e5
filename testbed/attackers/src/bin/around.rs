//! Runs a program under the supervisor's filter by execve, as the runtime wrapper runs the low-level runtime.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Parser;
use gpushare_supervisor::abi::Era;
use gpushare_supervisor::filter::{denied, reported};
use gpushare_supervisor::handover::{connect_to, hand_over};
use gpushare_supervisor::sys::{install_with_listener, install_without_listener};

/// Becomes a program under the supervisor's filter.
#[derive(Parser)]
struct Args {
    /// The supervisor's socket; without it RM's calls are denied.
    #[arg(long)]
    socket: Option<PathBuf>,
    #[arg(long, default_value = "580.142")]
    driver: String,
    #[arg(required = true, trailing_var_arg = true)]
    words: Vec<OsString>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let version = args.driver.parse().ok().and_then(Era::for_version);
    let era = version.with_context(|| format!("driver {} is not known", args.driver))?;
    match args.socket {
        Some(socket) => {
            let connection = connect_to(&socket).context("socket")?;
            let listener = install_with_listener(&mut reported(era)).context("filter")?;
            hand_over(&connection, listener).context("hand over")?;
        }
        None => install_without_listener(&mut denied()).context("filter")?,
    }
    let (name, rest) = args.words.split_first().context("no program")?;
    Err(Command::new(name).args(rest).exec().into())
}
