//! `gpushare-bench [FILTER]`: measures gpushare and prints each figure with its target.
//!
//! Each figure and its baseline are measured alternately in one run, because machines differ and drift. A run
//! only reports: it never fails because a figure misses its target.
#![forbid(unsafe_code)]

mod books;
mod claims;
mod interception;
mod measure;
mod memory_disk;
mod meter;
mod neighbours;
mod place;
mod placement;
mod quota;
mod request;
mod share;
mod start_cost;
mod supervisor;
mod table;
mod virtual_share;

use std::env;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use gpushare_tests::artifacts;
use gpushare_tests::runtime::RUNC;
use table::Table;

/// A section's name, by which FILTER selects it, and the function that measures it.
type Section = (&'static str, fn() -> Result<Table>);

const SECTIONS: [Section; 11] = [
    ("starting a container", start_cost::section),
    ("quota store", quota::section),
    ("reading a request", request::section),
    ("interception", interception::section),
    ("supervisor", supervisor::section),
    ("beside others", neighbours::section),
    ("the meter beside many", meter::section),
    ("claims of Kubernetes", claims::section),
    ("placement in a cluster", placement::section),
    ("compute share, virtual time", virtual_share::section),
    ("compute share, real time", share::section),
];

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        [quota::CHILD, state, name] => quota::child(state, name),
        [] => run(""),
        [filter] if !filter.starts_with('-') => run(filter),
        _ => {
            println!("usage: gpushare-bench [FILTER]\nsections:");
            SECTIONS.iter().for_each(|(name, _)| println!("  {name}"));
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpushare-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(filter: &str) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("needs root: it makes containers and device nodes");
    }
    let chosen: Vec<Section> = SECTIONS.into_iter().filter(|(name, _)| name.contains(filter)).collect();
    if chosen.is_empty() {
        bail!("no section's name contains {filter:?}; see --help");
    }
    let _disk = memory_disk::on_tmpfs()?;
    println!("gpushare-bench {}: {}", env!("CARGO_PKG_VERSION"), measure::machine());
    for (name, section) in chosen {
        println!("\n## {name}\n");
        print!("{}", section().with_context(|| format!("section {name:?}"))?);
    }
    Ok(())
}

/// Returns the path of the no-op low-level runtime, which is built together with this program.
fn noop() -> Result<std::path::PathBuf> {
    let path = env::current_exe()?.with_file_name("gpushare-bench-noop");
    if !path.is_file() {
        bail!("{} is missing: run `make bench`", path.display());
    }
    Ok(path)
}

/// Fails before anything is measured if a program that the sections need is missing.
fn need_runtime() -> Result<()> {
    for path in [RUNC, gpushare_tests::image::BUSYBOX] {
        if !std::path::Path::new(path).exists() {
            bail!("{path} is missing: run tests/setup/packages.sh");
        }
    }
    let _ = (artifacts::wrapper(), artifacts::hook());
    Ok(())
}
