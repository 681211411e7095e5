//! The two hooks of a container with a share: `prestart` names the container's init as the lease's holder,
//! `poststop` gives the lease back.
//!
//! Started by the low-level runtime as root, in the host's namespaces, once for each. It first gives up whatever it
//! was handed and does not need ([`sanitise`]), prints nothing on success, and starts no other program.

mod args;
mod sanitise;
mod stage;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use args::{Args, Stage};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A stderr that nobody can write to is no second failure.
            let _ = writeln!(io::stderr(), "gpushare-hook: {}", gpushare_inject::one_line(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args = Args::parse(std::env::args_os().skip(1))?;
    let state = sanitise::enter(args.stage)?;
    match args.stage {
        Stage::Prestart => stage::prestart(&args, &state),
        Stage::Poststop => stage::poststop(&args),
    }
}
