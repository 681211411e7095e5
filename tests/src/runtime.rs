//! The wrapper as containerd's shim calls it, in front of a real low-level runtime; and the containers it
//! made.
//!
//! crun refuses a machine where cgroup v1 and v2 are mixed, so there it runs in a view that shows v1 only.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::LazyLock;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::artifacts;
use crate::bundle::Bundle;
use crate::command::{self, Outcome};
use crate::node::SimulatedNode;
use crate::scratch::Scratch;
use crate::view::{self, Namespace, View};

/// Where Debian's runc is.
pub const RUNC: &str = "/usr/bin/runc";
/// Where Debian's crun is.
pub const CRUN: &str = "/usr/bin/crun";
/// Where youki is: in PATH, else where `cargo install --root /usr/local` puts it.
pub static YOUKI: LazyLock<String> = LazyLock::new(|| {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|folder| folder.join("youki")).find(|program| program.is_file());
    found.unwrap_or("/usr/local/bin/youki".into()).to_string_lossy().into_owned()
});

/// Which low-level runtime does the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LowLevel {
    /// runc.
    Runc,
    /// crun.
    Crun,
    /// youki, which no distribution has: where somebody installed it.
    Youki,
}

impl LowLevel {
    /// Those that every machine of the tests has.
    pub const ALL: [Self; 2] = [Self::Runc, Self::Crun];

    /// The absolute path of its program.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Runc => RUNC,
            Self::Crun => CRUN,
            Self::Youki => &YOUKI,
        }
    }

    /// The cgroups that it accepts.
    #[must_use]
    pub fn view(self) -> View {
        match self {
            Self::Runc => View::AsItIs,
            Self::Crun | Self::Youki => View::Unmixed,
        }
    }

    /// The settings that make it the wrapper's low-level runtime.
    #[must_use]
    pub fn settings(self) -> String {
        format!("[runtime]\ncandidates = [\"{}\"]", self.program())
    }
}

/// A runtime under test: a program that is called as runc is, with a runtime root of its own.
#[derive(Debug)]
pub struct Runtime {
    scratch: Scratch,
    program: PathBuf,
    view: View,
    /// The mount namespace of all its calls; `None` if each call makes a view of its own.
    namespace: Option<Namespace>,
    config: PathBuf,
    /// A folder that this runtime finds empty.
    hidden: Option<PathBuf>,
}

impl Runtime {
    /// The wrapper in front of `low_level`, on `node`.
    #[must_use]
    pub fn wrapped(low_level: LowLevel, node: &SimulatedNode) -> Self {
        let name = format!("{low_level:?}").to_lowercase();
        Self::with_config(low_level, &node.config_with(&name, &low_level.settings()))
    }

    /// The wrapper in front of `low_level`, under the settings file `config`, which must name it.
    #[must_use]
    pub fn with_config(low_level: LowLevel, config: &Path) -> Self {
        Self {
            scratch: Scratch::new("runtime"),
            program: artifacts::wrapper(),
            view: low_level.view(),
            namespace: None,
            config: config.to_owned(),
            hidden: None,
        }
    }

    /// The wrapper `program` of an installed tree, in front of runc. The checkout is an empty folder for it,
    /// so that anything it still needs from there is missing.
    #[must_use]
    pub fn installed(program: &Path, node: &SimulatedNode) -> Self {
        let runtime = Self::wrapped(LowLevel::Runc, node);
        Self { program: program.to_owned(), hidden: Some(artifacts::checkout().to_owned()), ..runtime }
    }

    /// The low-level runtime alone: what a scenario is compared with.
    #[must_use]
    pub fn bare(low_level: LowLevel) -> Self {
        Self {
            scratch: Scratch::new("runtime"),
            program: PathBuf::from(low_level.program()),
            view: low_level.view(),
            namespace: None,
            config: PathBuf::new(),
            hidden: None,
        }
    }

    /// The low-level runtime alone, reached through `program`, for bundles that bring gpushare's hook;
    /// `config` is the node's.
    #[must_use]
    pub fn through(program: &Path, low_level: LowLevel, config: &Path) -> Self {
        Self { program: program.to_owned(), config: config.to_owned(), ..Self::bare(low_level) }
    }

    /// The folder of this runtime's own files, its root included.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// This runtime, in another view of the cgroups: one mount namespace for all its calls, as an engine has
    /// it.
    #[must_use]
    pub fn in_view(self, view: View) -> Self {
        Self { view, namespace: view.keep(), ..self }
    }

    /// A process in the mount namespace in which its calls are made.
    #[must_use]
    pub fn mounts_of(&self) -> u32 {
        self.namespace.as_ref().map_or_else(std::process::id, Namespace::pid)
    }

    /// The runtime root, `--root`.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.scratch.path().join("root")
    }

    /// The settings file the runtime works under.
    #[must_use]
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// A call of this runtime with the flags of containerd's shim before `args`, not yet started.
    pub fn command<S: AsRef<OsStr>>(&self, log: &Path, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.in_its_view();
        command
            .arg("--root")
            .arg(self.root())
            .arg("--log")
            .arg(log)
            .args(["--log-format", "json"])
            .args(args);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("GPUSHARE_CONFIG", &self.config);
        command
    }

    fn in_its_view(&self) -> Command {
        match (&self.hidden, &self.namespace) {
            (None, Some(namespace)) => view::beside(namespace.pid(), self.program.as_os_str()),
            (None, None) => self.view.command(self.program.as_os_str()),
            (Some(folder), _) => {
                let hide = format!("mount -t tmpfs none '{}'", folder.display());
                view::prepared(&hide, self.program.as_os_str())
            }
        }
    }

    fn create_command(&self, bundle: &Bundle) -> Command {
        let pid_file = bundle.path().join("init.pid");
        let args = [
            OsStr::new("create"),
            OsStr::new("--bundle"),
            bundle.path().as_os_str(),
            OsStr::new("--pid-file"),
        ];
        let mut command = self.command(&log_path(bundle), args);
        command.arg(pid_file).arg(bundle.id()).current_dir(bundle.path());
        command
    }

    /// `create`, from a config.json written anew.
    ///
    /// # Errors
    /// What the runtime said when it refused. Nothing more is called then, not even the engine's `delete
    /// --force`.
    ///
    /// # Panics
    /// When the call does not end.
    pub fn create<'t>(&'t self, bundle: &'t Bundle) -> Result<Container<'t>, Refusal> {
        bundle.write();
        self.create_as_it_is(bundle)
    }

    /// `create`, from whatever is in the bundle's folder.
    ///
    /// # Errors
    /// As [`Runtime::create`].
    ///
    /// # Panics
    /// As [`Runtime::create`].
    pub fn create_as_it_is<'t>(&'t self, bundle: &'t Bundle) -> Result<Container<'t>, Refusal> {
        // An engine's bundle has no log of an earlier start.
        let _ = fs::remove_file(log_path(bundle));
        let outcome = command::run_with_output_in(&mut self.create_command(bundle), bundle.path());
        if outcome.success() {
            Ok(Container { runtime: self, bundle })
        } else {
            Err(Refusal { log: log_line(&log_path(bundle)), outcome })
        }
    }

    /// Starts `create` and does not wait for it: for tests that kill it.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn spawn_create(&self, bundle: &Bundle) -> Child {
        bundle.write();
        command::spawn(&mut self.create_command(bundle), bundle.path())
    }

    /// `create` and `start`; the container is running, or has already ended.
    ///
    /// # Panics
    /// When either is refused.
    #[must_use]
    pub fn run<'t>(&'t self, bundle: &'t Bundle) -> Container<'t> {
        let container =
            self.create(bundle).unwrap_or_else(|refusal| panic!("create was refused: {refusal:?}"));
        container.start();
        container
    }

    /// Any other call about the container `id`: `SUBCOMMAND ARGS... ID`.
    ///
    /// # Panics
    /// When the call does not end.
    #[must_use]
    pub fn call(&self, args: &[&str], id: &str) -> Outcome {
        let log = self.scratch.path().join("log.json");
        command::run(self.command(&log, args).arg(id))
    }

    /// `exec ID ARGS...`, to its end.
    ///
    /// # Panics
    /// When the call does not end.
    #[must_use]
    pub fn exec(&self, id: &str, args: &[&str]) -> Outcome {
        let log = self.scratch.path().join("exec.json");
        command::run(self.command(&log, ["exec", id]).args(args))
    }

    /// The word that `state` gives: `created`, `running`, `paused`, `stopped`; `None` when the runtime does
    /// not know the container.
    #[must_use]
    pub fn status(&self, id: &str) -> Option<String> {
        let outcome = self.call(&["state"], id);
        let state: Value = serde_json::from_str(&outcome.stdout).ok()?;
        state["status"].as_str().map(str::to_owned)
    }

    /// Starts a call and does not wait for it: for tests that kill it.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn spawn(&self, args: &[&str], id: &str) -> Child {
        let folder = self.scratch.folder("spawned");
        command::spawn(self.command(&folder.join("log.json"), args).arg(id), &folder)
    }

    /// `delete --force ID`, the one call that engines make after a failed `create`.
    ///
    /// # Panics
    /// When it fails: with `--force` even an unknown id is no error.
    pub fn delete_force(&self, id: &str) {
        let _ = self.call(&["delete", "--force"], id).expect_success("delete --force");
    }
}

fn log_path(bundle: &Bundle) -> PathBuf {
    bundle.path().join("log.json")
}

/// The text that an engine takes from the runtime's log: the last line of level `error`. `None` when the file
/// holds none, or anything that is no JSON line.
fn log_line(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let lines: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>().ok()?;
    let error = lines.iter().rev().find(|line| line["level"] == "error")?;
    error["msg"].as_str().map(str::to_owned)
}

/// What a runtime said when it refused to create a container.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// How the call ended.
    pub outcome: Outcome,
    /// What the engine will show, from the `--log` file.
    pub log: Option<String>,
}

impl Refusal {
    /// The refusal's one line, once stderr and log are found to agree about it.
    ///
    /// # Panics
    /// When stderr is not exactly one line, or the log does not hold the same text.
    #[must_use]
    pub fn line(&self) -> String {
        let lines: Vec<&str> = self.outcome.stderr.lines().collect();
        let [line] = lines[..] else { panic!("stderr is not one line: {:?}", self.outcome.stderr) };
        let log = self.log.as_deref().unwrap_or_else(|| panic!("no error in the log; stderr: {line}"));
        assert!(line.contains(log) || log.contains(line), "stderr and log differ:\n{line}\n{log}");
        line.to_owned()
    }
}

/// A created container; `delete --force` on drop.
#[derive(Debug)]
pub struct Container<'t> {
    runtime: &'t Runtime,
    bundle: &'t Bundle,
}

impl Container<'_> {
    /// Leaves the container to the caller, who deletes it.
    pub fn leave(self) {
        std::mem::forget(self);
    }

    /// The container's id.
    #[must_use]
    pub fn id(&self) -> &str {
        self.bundle.id()
    }

    /// `start`.
    ///
    /// # Panics
    /// When it fails.
    pub fn start(&self) {
        let _ = self.runtime.call(&["start"], self.id()).expect_success("start");
    }

    /// The process id of the container's init on the host.
    ///
    /// # Panics
    /// When the runtime did not write it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.bundle.pid()
    }

    /// `exec ID ARGS...`, to its end.
    ///
    /// # Panics
    /// When the call does not end.
    #[must_use]
    pub fn exec(&self, args: &[&str]) -> Outcome {
        self.runtime.exec(self.id(), args)
    }

    /// What init has written to its standard output so far.
    #[must_use]
    pub fn stdout(&self) -> String {
        fs::read_to_string(self.bundle.path().join("stdout")).unwrap_or_default()
    }

    /// What init has written to its standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        fs::read_to_string(self.bundle.path().join("stderr")).unwrap_or_default()
    }

    /// As [`Runtime::status`].
    #[must_use]
    pub fn status(&self) -> Option<String> {
        self.runtime.status(self.id())
    }

    /// Waits until init has ended; false when it has not within `limit`.
    #[must_use]
    pub fn wait_stopped(&self, limit: Duration) -> bool {
        command::eventually(limit, || self.status().as_deref() == Some("stopped"))
    }

    /// SIGKILL to init, from outside the runtime, and waits for its end. Killed so early that it is still
    /// runc's own program, its threads may end a moment after its first one, which is all that runc asks
    /// about.
    ///
    /// # Panics
    /// When init does not die.
    pub fn kill_init(&self) {
        let limit = Duration::from_secs(20);
        let pid = self.pid();
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("init can be killed");
        assert!(self.wait_stopped(limit), "init outlived SIGKILL");
        let threads = || fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().count();
        assert!(command::eventually(limit, || threads() <= 1), "init's threads outlived SIGKILL");
    }

    /// `kill ID 9`, then `delete` once it has ended, as an engine stops a container.
    ///
    /// # Panics
    /// When a call fails.
    pub fn stop(&self) {
        let log = self.runtime.scratch.path().join("log.json");
        let _ = command::run(&mut self.runtime.command(&log, ["kill", self.id(), "9"]));
        assert!(self.wait_stopped(Duration::from_secs(20)), "the container outlived kill 9");
        let _ = self.runtime.call(&["delete"], self.id()).expect_success("delete");
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        // Best effort: a test that fails must not leave a container; one that deleted it has nothing left to
        // delete.
        let _ = self.runtime.call(&["delete", "--force"], self.id());
    }
}
