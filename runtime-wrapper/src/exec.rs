//! Finds the low-level runtime, and replaces this process with it or runs it as a child.

use std::convert::Infallible;
use std::env;
use std::ffi::{CString, NulError, OsString};
use std::fs;
use std::io;
use std::iter::once;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};
use gpushare_config::Config;
use gpushare_inject::is_same_file;
use nix::unistd::execv;
use serde_json::Value;

use crate::args::Args;
use crate::inherited;
use crate::supervised::Filter;

/// Returns the first low-level runtime in the settings that exists and is executable.
///
/// The settings name absolute paths: podman may pass no PATH, and a PATH may contain a wrong runc first.
///
/// # Errors
/// When none exists, or it is the wrapper itself.
pub fn find(config: &Config) -> Result<&Path> {
    let Some(runtime) = config.runtimes.iter().find(|path| is_program(path)) else {
        let looked: Vec<String> = config.runtimes.iter().map(|path| path.display().to_string()).collect();
        bail!(
            "no low-level runtime found (looked for {}); install runc or crun, or set runtime.candidates",
            looked.join(", ")
        );
    };
    if is_same_file(runtime, Path::new("/proc/self/exe")) {
        bail!(
            "runtime.candidates names gpushare-runtime itself ({}); name runc or crun there",
            runtime.display()
        );
    }
    Ok(runtime)
}

/// Replaces this process with `runtime`, with the same arguments, environment, working directory, descriptors
/// and signals. Returns only on failure.
pub fn low_level(runtime: &Path) -> Result<Infallible> {
    low_level_under(runtime, Filter::None)
}

/// Like [`low_level`], with a filter around the runtime and all processes that it starts. After a failure
/// this process must do nothing else: the filter stays.
///
/// Does not use `Command::exec`, which resets signals and their mask for Rust programs.
pub fn low_level_under(runtime: &Path, filter: Filter) -> Result<Infallible> {
    let words = once(runtime.as_os_str().to_owned()).chain(env::args_os().skip(1));
    let words: Vec<CString> =
        words.map(OsString::into_vec).map(CString::new).collect::<Result<_, NulError>>()?;
    let program = words.first().context("no program")?;
    inherited::restore();
    filter.put_around_this_process()?;
    let error = execv(program, &words).unwrap_err();
    Err(io::Error::from(error)).with_context(|| cannot_run(runtime))
}

/// Runs `runtime` to its end with the same arguments, environment, working directory and standard
/// descriptors. The runtime ignores SIGXFSZ, as this process does, and no signal that the engine had ignored.
/// It ends with this process: an engine that kills a call and repeats it must not find the first one still at
/// work.
///
/// # Errors
/// When it cannot be started.
pub fn low_level_to_its_end(runtime: &Path) -> Result<ExitStatus> {
    inherited::close_again();
    inherited::await_children();
    let mut call = Command::new(runtime);
    inherited::end_with_this_process(call.args(env::args_os().skip(1)));
    call.status().with_context(|| cannot_run(runtime))
}

/// Returns the bundle of the container `args.id` according to `runtime`; `None` if it does not know the
/// container.
pub fn bundle_of(runtime: &Path, args: &Args) -> Option<PathBuf> {
    inherited::await_children();
    let mut state = Command::new(runtime);
    if let Some(root) = &args.root {
        state.arg("--root").arg(root);
    }
    let told = state.arg("state").arg(args.id.as_ref()?).stderr(Stdio::null()).output().ok()?;
    let state: Value = serde_json::from_slice(&told.stdout).ok()?;
    state["bundle"].as_str().map(PathBuf::from)
}

fn cannot_run(runtime: &Path) -> String {
    format!("cannot run the low-level runtime {}", runtime.display())
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o111 != 0)
}
