//! The program. All of it is in the library, so that tests can build the program themselves.

use std::process::ExitCode;

fn main() -> ExitCode {
    gpushare_supervisor::program::main(std::env::args().skip(1))
}
