//! The two hooks of a container with a share: `prestart` names the container's init as the lease's holder,
//! `poststop` gives the lease back. In hook-only mode, without the wrapper, `createRuntime` does all of the wrapper's
//! work on the container that exists already ([`hook_only`]).
//!
//! Started by the low-level runtime as root, in the host's namespaces, once for each. It first gives up whatever it
//! was handed and does not need ([`sanitise`]), and prints nothing on success. It starts no other program, but in
//! hook-only mode a copy of itself that attaches mounts, and gpushare's CLI where the node's GPUs are not known yet.

mod args;
mod hook_only;
mod sanitise;
mod stage;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use args::{Call, Stage};

fn main() -> ExitCode {
    gpushare_inject::outlive_file_size_limit();
    gpushare_inject::run_child(std::env::args_os().skip(1));
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
    if std::env::args_os().skip(1).eq(["--version"]) {
        writeln!(io::stdout(), "gpushare-hook {}", env!("CARGO_PKG_VERSION"))?;
        return Ok(());
    }
    let call = Call::parse(std::env::args_os().skip(1))?;
    let state = sanitise::enter(&call)?;
    match (&call, call.stage()) {
        (Call::Wrapper(args), Stage::Prestart) => stage::prestart(args, &state),
        (Call::Wrapper(args), Stage::Poststop) => stage::poststop(args),
        (Call::HookOnly { config, cdi, .. }, Stage::Prestart) => {
            hook_only::create(&state, config.as_deref(), *cdi)
        }
        (Call::HookOnly { config, .. }, Stage::Poststop) => hook_only::poststop(&state, config.as_deref()),
    }
}
