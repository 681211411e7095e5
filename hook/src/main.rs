//! The hooks of a container with a share: `prestart` makes the container's init the lease's holder, and
//! `poststop` releases the lease. In hook-only mode there is no wrapper, and `createRuntime` does all its
//! work on the created container ([`hook_only`]).
//!
//! The low-level runtime starts each hook once, as root, in the host's namespaces. The hook first drops
//! everything that it inherited and does not need ([`sanitise`]), and prints nothing on success. In hook-only
//! mode it starts a copy of itself that attaches mounts, and gpushare's CLI if the inventory is not cached
//! yet. In both modes it starts the CLI if the driver has to limit the container, too.

mod args;
mod hook_only;
mod sanitise;
mod stage;

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use args::{Call, Stage};

fn main() -> ExitCode {
    let began = Instant::now();
    gpushare_inject::outlive_file_size_limit();
    gpushare_inject::run_child(std::env::args_os().skip(1));
    match run(began) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr cannot be written to, the exit status must do.
            let _ = writeln!(io::stderr(), "gpushare-hook: {}", gpushare_inject::one_line(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(began: Instant) -> Result<()> {
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
            hook_only::create(&state, config.as_deref(), *cdi, began)
        }
        (Call::HookOnly { config, .. }, Stage::Poststop) => hook_only::poststop(&state, config.as_deref()),
    }
}
