//! Becoming the low-level runtime.

use std::convert::Infallible;
use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use gpushare_config::Config;

/// The first low-level runtime of the settings that exists.
///
/// Candidates are absolute: podman may hand over no PATH, and a PATH may name a false runc first.
///
/// # Errors
/// When there is none, or it is this program.
pub fn find(config: &Config) -> Result<&Path> {
    let Some(runtime) = config.runtimes.iter().find(|path| is_program(path)) else {
        let looked: Vec<String> = config.runtimes.iter().map(|path| path.display().to_string()).collect();
        bail!(
            "no low-level runtime found (looked for {}); install runc or crun, or set runtime.candidates",
            looked.join(", ")
        );
    };
    if is_this_program(runtime) {
        bail!(
            "runtime.candidates names gpushare-runtime itself ({}); name runc or crun there",
            runtime.display()
        );
    }
    Ok(runtime)
}

/// Replaces this process by `runtime`, with the same arguments, environment, working directory and descriptors.
/// Returns only on failure.
///
/// `Command::exec` also puts SIGPIPE back, which Rust's start-up ignores and an execve would hand on.
pub fn low_level(runtime: &Path) -> Result<Infallible> {
    let error = Command::new(runtime).args(env::args_os().skip(1)).exec();
    Err(error).with_context(|| format!("cannot run the low-level runtime {}", runtime.display()))
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o111 != 0)
}

fn is_this_program(path: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
    identity(path).is_some() && identity(path) == identity(Path::new("/proc/self/exe"))
}
