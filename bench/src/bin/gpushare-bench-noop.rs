//! A low-level runtime that does nothing and succeeds: behind it the wrapper's own cost is all there is.
//!
//! As `--peak PROGRAM ARGS...` it runs the program and prints the peak of its resident memory in KiB. A small program
//! must do that: a child counts the pages of whoever started it until its execve. As `--become PROGRAM` it becomes the
//! program at once: what no wrapper can cost less than.
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
        // It returns on failure only.
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
