//! The calls that a scenario may make of any engine. Each engine translates them into its own flags or calls.

use std::fs;
use std::path::Path;
use std::time::Duration;

use gpushare_tests::command::{Outcome, eventually};
use gpushare_tests::probe::Report;

/// The user and group of [`With::User`].
pub const USER: u32 = 1000;
/// The first of the host's ids in [`With::UserNamespace`].
pub const FIRST_MAPPED: u32 = 300_000;
/// Bytes of [`With::LittleMemory`].
pub const LITTLE_MEMORY: u32 = 48 << 20;

/// How a container differs from an ordinary one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// Its root is read-only.
    ReadOnlyRoot,
    /// It runs as [`USER`].
    User,
    /// It has no capability.
    NoCapabilities,
    /// Its processes can gain no privileges.
    NoNewPrivileges,
    /// It sees the host's processes.
    HostPids,
    /// It may do what the host's root may.
    Privileged,
    /// Its root is nobody on the host.
    UserNamespace,
    /// It may use [`LITTLE_MEMORY`] of the host's memory.
    LittleMemory,
    /// No runtime is named: the engine takes its default one.
    DefaultRuntime,
    /// The engine's own runc is named.
    PlainRunc,
    /// docker's `--gpus all` is given too.
    Gpus,
}

/// A container as a scenario asks for it.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Its name, unique in its scenario.
    pub name: &'static str,
    /// Variables that the caller sets.
    pub env: Vec<(&'static str, String)>,
    /// Annotations that the caller sets.
    pub annotations: Vec<(&'static str, String)>,
    /// How it differs from an ordinary container.
    pub with: Vec<With>,
    /// Program and arguments of its first process.
    pub args: Vec<String>,
}

/// Waits for SIGTERM, as a service does. Without the trap, a shell that is the first process ignores it.
const WAIT: &str = "trap 'exit 0' TERM; sleep 1000 & wait";
/// Where the client of a container writes its report. The containers of a pod share the folder.
fn report_file(name: &str) -> String {
    format!("dev/shm/report-of-{name}")
}

impl Wanted {
    /// A container that waits until it is stopped.
    pub fn waiting(name: &'static str) -> Self {
        Self::shell(name, WAIT)
    }

    /// A container whose first process asks the driver for its GPU and allocates `sizes`, then waits; see
    /// [`report`].
    pub fn client(name: &'static str, sizes: &[&str]) -> Self {
        let allocate: String = sizes.iter().map(|size| format!(" --allocate {size}")).collect();
        Self::shell(
            name,
            &format!("gpushare-simulator probe --json{allocate} >/{} 2>&1; {WAIT}", report_file(name)),
        )
    }

    /// A container that runs `script`.
    pub fn shell(name: &'static str, script: &str) -> Self {
        let args = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        Self { name, env: Vec::new(), annotations: Vec::new(), with: Vec::new(), args }
    }

    /// Asks for `memory` on one GPU, by the environment.
    pub fn share(self, memory: &str) -> Self {
        self.env("GPUSHARE_MEMORY", memory)
    }

    /// Adds a variable.
    pub fn env(mut self, name: &'static str, value: &str) -> Self {
        self.env.push((name, value.to_owned()));
        self
    }

    /// Adds an annotation.
    pub fn annotation(mut self, name: &'static str, value: &str) -> Self {
        self.annotations.push((name, value.to_owned()));
        self
    }

    /// Adds what differs from the ordinary.
    pub fn with(mut self, with: With) -> Self {
        self.with.push(with);
        self
    }

    /// Whether `with` was asked for.
    pub fn has(&self, with: With) -> bool {
        self.with.contains(&with)
    }

    /// The flags of a command line that takes `NAME=VALUE` behind `flag`.
    pub fn pairs(pairs: &[(&str, String)], flag: &str) -> Vec<String> {
        pairs.iter().flat_map(|(name, value)| [flag.to_owned(), format!("{name}={value}")]).collect()
    }
}

/// What the client in a container that runs as [`Wanted::client`] reported. The host reads it from the
/// container's files.
pub fn report(engine: &dyn Engine, name: &str) -> Report {
    let path = format!("/proc/{}/root/{}", engine.pid(name), report_file(name));
    let mut text = String::new();
    let told = eventually(Duration::from_secs(20), || {
        text = fs::read_to_string(&path).unwrap_or_default();
        text.ends_with('\n')
    });
    assert!(told, "the client of {name} told nothing: {text:?}");
    // In a pod the file outlives the container, and must not pass for what its next life reports.
    fs::remove_file(&path).expect("the report can be removed");
    Report::parse(&text)
}

/// An engine, with gpushare as one of its runtimes. A call that the engine should fulfil and does not panics
/// with the engine's message.
pub trait Engine {
    /// The folder of all its files.
    fn folder(&self) -> &Path;

    /// Starts a container and returns while it runs.
    ///
    /// # Errors
    /// With what the engine's user is told when the container is refused.
    fn run(&mut self, wanted: &Wanted) -> Result<(), String>;

    /// Runs `args` in a running container, to its end.
    fn exec(&self, name: &str, args: &[&str]) -> Outcome;

    /// The id by which the runtime, and so gpushare, knows the container.
    fn id(&self, name: &str) -> String;

    /// The process id of a running container's init on the host.
    fn pid(&self, name: &str) -> i32;

    /// Stops a container as its user would, giving it time.
    fn stop(&mut self, name: &str);

    /// Kills a container as its user would.
    fn kill(&mut self, name: &str);

    /// Stops a container and starts it again, or does what comes nearest where the engine has no such call.
    fn restart(&mut self, name: &str);

    /// Removes a container, whatever its state.
    fn remove(&mut self, name: &str);

    /// Whether the engine says that the container runs.
    fn is_running(&self, name: &str) -> bool;

    /// Pauses a container.
    fn pause(&self, name: &str);

    /// Lets it go on.
    fn unpause(&self, name: &str);

    /// Changes the CPU shares of a running container.
    fn update(&self, _name: &str) {
        unreachable!("the table says that this engine has no such call");
    }

    /// Whether the engine says that the container was killed for memory; `None` where it does not tell.
    /// podman 4.3 calls it an ordinary end, under runc alone too.
    fn was_killed_for_memory(&self, _name: &str) -> Option<bool> {
        None
    }

    /// Whether gpushare is told of a start that fails. Otherwise the share is released when the next
    /// container needs the room.
    fn tells_of_a_failed_start(&self) -> bool {
        true
    }

    /// Name of the program of gpushare that a refusal begins with.
    fn refuses_as(&self) -> &'static str {
        "gpushare-runtime"
    }

    /// Kills the engine's daemon with SIGKILL, calls `meanwhile`, and starts the daemon on the state that it
    /// left.
    fn crash(&mut self, _meanwhile: &mut dyn FnMut()) {
        unreachable!("the table says that this engine has no daemon");
    }

    /// A process in the mount namespace in which the engine's mounts are made.
    fn mounts_of(&self) -> u32 {
        std::process::id()
    }
}
