//! The supervisor, so that cargo builds it with these tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    gpushare_supervisor::program::main()
}
