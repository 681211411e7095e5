//! The OCI runtime that engines call. It grants a share at `create`, then becomes the low-level runtime.
//!
//! Calls other than `create`, `run`, `exec`, `checkpoint`, `restore` and `delete` go to the low-level runtime
//! immediately, and so does a container without a request. On success this process never exits by itself:
//! execve keeps its pid, parent and descriptors.
#![deny(unsafe_code)]

mod args;
mod create;
mod delete;
mod exec;
mod inherited;
mod orphan;
mod report;
mod supervised;

use std::convert::Infallible;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use args::{Args, Command};
use gpushare_config::Config;

fn main() -> ExitCode {
    let began = Instant::now();
    gpushare_inject::outlive_file_size_limit();
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let args = Args::parse(&words);
    let Err(error) = run(&args, began);
    report::failure(&args, &error);
    ExitCode::FAILURE
}

fn run(args: &Args, began: Instant) -> Result<Infallible> {
    if let Command::Unclear(why) = &args.command {
        return Err(why.clone().into());
    }
    // A mistake in the settings must not prevent stopping containers, or starting those that need no
    // settings.
    let (config, slip) = match Config::load() {
        Ok(config) => (config, None),
        Err(error) => match Config::salvaged(None) {
            Some(config) => (config, Some(error)),
            None => return Err(error.into()),
        },
    };
    if args.command == Command::Other {
        return exec::low_level(exec::find(&config)?); // there is nothing to log
    }
    match args.command {
        // `exec` is called every few seconds for a container's health check, too often for the log.
        Command::Exec => return supervised::exec(args, &config),
        Command::Checkpoint => return supervised::checkpoint(args, &config),
        _ => {}
    }
    config.log.start();
    match (&args.command, slip) {
        (Command::Delete, _) => delete::delete(args, &config),
        (_, Some(slip)) => create::without_settings(args, &config, slip),
        (Command::Restore, None) => create::restore(args, &config),
        (_, None) => create::create(args, &config, began),
    }
}
