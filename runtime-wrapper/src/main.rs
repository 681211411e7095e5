//! The OCI runtime that engines call: grants a share at `create`, then becomes the low-level runtime.
//!
//! Whatever is no `create`, `run` or `delete` goes to the low-level runtime at once, and so does a container that
//! asks for nothing. On success this process never exits by itself: execve keeps pid, parent and descriptors.
#![forbid(unsafe_code)]

mod args;
mod create;
mod delete;
mod exec;
mod orphan;
mod report;

use std::convert::Infallible;
use std::process::ExitCode;

use anyhow::Result;
use args::{Args, Command};
use gpushare_config::Config;

fn main() -> ExitCode {
    let args = Args::parse(std::env::args_os().skip(1).collect());
    let Err(error) = run(&args);
    report::failure(&args, &error);
    ExitCode::FAILURE
}

fn run(args: &Args) -> Result<Infallible> {
    let config = match (Config::load(), args.command) {
        (Ok(config), _) => config,
        (Err(error), Command::Create) => return Err(error.into()),
        // A slip in the settings must not keep anybody from stopping containers.
        (Err(error), _) => Config::salvaged(None).ok_or(error)?,
    };
    let act: fn(&Args, &Config) -> Result<Infallible> = match args.command {
        Command::Create => create::create,
        Command::Delete => delete::delete,
        Command::Other => return exec::low_level(exec::find(&config)?), // there is nothing to log
    };
    config.log.start();
    act(args, &config)
}
