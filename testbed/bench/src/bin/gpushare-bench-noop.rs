//! A low-level runtime that does nothing and succeeds, so that only the wrapper's own cost remains.
//!
//! Called as `--peak PROGRAM ARGS...` it runs the program and prints the peak of its resident memory in KiB.
//! A small program must do that, because until its execve a child counts the pages of its parent. Called as
//! `--become PROGRAM` it runs execve on the program at once, which is the least that any wrapper can cost.
#![forbid(unsafe_code)]

use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use nix::sys::resource::{UsageWho, getrusage};

fn main() -> ExitCode {
    let mut words = env::args_os().skip(1);
    let (Some(mode), Some(program)) = (words.next(), words.next()) else { return ExitCode::SUCCESS };
    let mut command = Command::new(program);
    if mode == "--become" {
        // exec returns only on failure.
        let _ = command.exec();
        return ExitCode::FAILURE;
    }
    if mode != "--peak" {
        return ExitCode::SUCCESS;
    }
    let ended = command.args(words).stdin(Stdio::null()).status();
    match (ended, getrusage(UsageWho::RUSAGE_CHILDREN)) {
        (Ok(status), Ok(usage)) if status.success() => {
            println!("{}", usage.max_rss());
            ExitCode::SUCCESS
        }
        _ => ExitCode::FAILURE,
    }
}
