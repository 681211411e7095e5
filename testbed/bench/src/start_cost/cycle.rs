//! Runs one container from `create` to `delete`, through any runtime that is called like runc.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use gpushare_tests::bundle::Bundle;
use gpushare_tests::runtime::Runtime;
use gpushare_tests::scratch::Scratch;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::measure::timed;

/// A program that is called like runc.
#[derive(Debug)]
pub enum Program {
    /// runc, or the wrapper in front of it.
    Ours(Runtime),
    /// A peer's runtime, with this program's own environment, which contains its settings.
    Peer {
        /// Path of the program.
        path: PathBuf,
        /// Directory for its runtime root.
        scratch: Scratch,
    },
}

impl Program {
    fn command(&self, log: &Path, args: &[&OsStr]) -> Command {
        match self {
            Self::Ours(runtime) => runtime.command(log, args),
            Self::Peer { path, scratch } => {
                let mut command = Command::new(path);
                command.arg("--root").arg(scratch.path().join("root"));
                command.arg("--log").arg(log).args(["--log-format", "json"]).args(args);
                command
            }
        }
    }
}

/// A runtime with a bundle of its own, whose program ends at once.
#[derive(Debug)]
pub struct Contender {
    program: Program,
    bundle: Bundle,
}

/// Nanoseconds of each call for one container.
#[derive(Clone, Copy, Debug)]
pub struct Lap {
    pub create: i64,
    pub start: i64,
    pub delete: i64,
    /// Processor time in nanoseconds, user and kernel: the calls, their hooks and the container's init.
    pub cpu: i64,
}

impl Lap {
    /// Returns the nanoseconds of all three calls, without the container's program itself.
    pub fn whole(self) -> i64 {
        self.create + self.start + self.delete
    }
}

impl Contender {
    /// Combines `program` with a bundle of a small image, and with `env` in the container's environment.
    pub fn new(program: Program, env: Option<(&str, &str)>) -> Self {
        let bundle = Bundle::small().args(&["/bin/true"]);
        let bundle = match env {
            Some((name, value)) => bundle.env(name, value),
            None => bundle,
        };
        Self { program, bundle }
    }

    /// Runs `create`, `start` and `delete` from a freshly written config.json, as engines do. This process
    /// must reap orphans (`PR_SET_CHILD_SUBREAPER`), as containerd's shim does.
    ///
    /// # Errors
    /// If a call fails, with the runtime's standard error.
    pub fn lap(&self) -> Result<Lap> {
        let lap = self.calls();
        if lap.is_err() {
            // Report the first failure, not that of this call.
            let _ = self.delete(&["--force"]);
        }
        lap
    }

    fn calls(&self) -> Result<Lap> {
        let before = cpu_of_children()?;
        let create = self.create()?;
        let start = self.call(&["start".as_ref(), self.bundle.id().as_ref()])?;
        let pid = fs::read_to_string(self.pid_file()).context("create wrote no pid file")?;
        waitpid(Pid::from_raw(pid.trim().parse()?), None).context("the container's init is no child")?;
        let delete = self.delete(&[])?;
        Ok(Lap { create, start, delete, cpu: cpu_of_children()? - before })
    }

    /// Runs only `create`, and returns its nanoseconds.
    ///
    /// # Errors
    /// If it fails.
    pub fn create(&self) -> Result<i64> {
        self.bundle.write();
        self.call(&self.create_args().each_ref().map(AsRef::as_ref))
    }

    /// Returns the arguments of `create`.
    fn create_args(&self) -> [PathBuf; 6] {
        let bundle = self.bundle.path().to_owned();
        let words = ["create".into(), "--bundle".into(), bundle, "--pid-file".into()];
        let [create, flag, bundle, pid_flag] = words;
        [create, flag, bundle, pid_flag, self.pid_file(), self.bundle.id().into()]
    }

    /// Returns the command of `create`, not started yet, for a program that runs and measures it.
    pub fn create_command(&self) -> Command {
        self.bundle.write();
        self.program.command(&self.log(), &self.create_args().each_ref().map(AsRef::as_ref))
    }

    /// Runs `delete FLAGS... ID`, and returns its nanoseconds.
    ///
    /// # Errors
    /// If it fails.
    pub fn delete(&self, flags: &[&str]) -> Result<i64> {
        let words = ["delete"].iter().chain(flags).copied().chain([self.bundle.id()]);
        self.call(&words.map(OsStr::new).collect::<Vec<_>>())
    }

    /// Runs any other call with `args`, and returns its nanoseconds.
    ///
    /// # Errors
    /// If it fails.
    pub fn call(&self, args: &[&OsStr]) -> Result<i64> {
        let errors = self.bundle.path().join("stderr");
        let mut command = self.program.command(&self.log(), args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&errors)?);
        timed(&mut command)
            .with_context(|| format!("it said: {}", fs::read_to_string(&errors).unwrap_or_default().trim()))
    }

    /// Returns the container's id.
    pub fn id(&self) -> &str {
        self.bundle.id()
    }

    /// Returns the number of entries in the image.
    ///
    /// # Errors
    /// If a directory of the image cannot be read.
    pub fn files_in_image(&self) -> Result<usize> {
        entries_below(&self.bundle.root())
    }

    /// Returns the number of hooks in the current config.json.
    ///
    /// # Errors
    /// If config.json is not JSON.
    pub fn hooks(&self) -> Result<usize> {
        let config: serde_json::Value = serde_json::from_slice(&self.bundle.config_bytes())?;
        let stages = config["hooks"].as_object().into_iter().flatten();
        Ok(stages.filter_map(|(_, hooks)| hooks.as_array()).map(Vec::len).sum())
    }

    fn pid_file(&self) -> PathBuf {
        self.bundle.path().join("init.pid")
    }

    fn log(&self) -> PathBuf {
        self.bundle.path().join("log.json")
    }
}

/// Returns the processor time in nanoseconds of all descendants that were reaped.
fn cpu_of_children() -> Result<i64> {
    let used = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    Ok((used.user_time() + used.system_time()).num_nanoseconds())
}

fn entries_below(folder: &Path) -> Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        count += 1;
        if entry.file_type()?.is_dir() {
            count += entries_below(&entry.path())?;
        }
    }
    Ok(count)
}
