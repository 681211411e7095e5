//! Running a program to its end, with its output in files: a container keeps the descriptors of `create` for
//! its whole life, so reading a pipe to its end would wait for the container.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long any one call may take; far more than a loaded machine needs.
pub const DEADLINE: Duration = Duration::from_secs(90);

/// How a program ended, and what it printed.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output until its end.
    pub stdout: String,
    /// Its standard error until its end.
    pub stderr: String,
}

impl Outcome {
    /// Whether the program ended with 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.status.success()
    }

    /// This outcome, if the program ended with 0.
    ///
    /// # Panics
    /// With both outputs when it did not.
    #[must_use]
    pub fn expect_success(self, what: &str) -> Self {
        assert!(self.success(), "{what}: {}\nstdout: {}\nstderr: {}", self.status, self.stdout, self.stderr);
        self
    }
}

/// Runs `command` with stdin closed; its output goes to the files `stdout` and `stderr` of a folder of its
/// own.
///
/// # Panics
/// When it cannot be started or does not end within [`DEADLINE`].
#[must_use]
pub fn run(command: &mut Command) -> Outcome {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    run_with_output_in(command, folder.path())
}

/// As [`run`], with the two output files in `folder`, where a container goes on writing to them.
///
/// # Panics
/// When it cannot be started or does not end within [`DEADLINE`].
#[must_use]
pub fn run_with_output_in(command: &mut Command, folder: &Path) -> Outcome {
    let mut child = spawn(command, folder);
    let status = wait(&mut child, DEADLINE).unwrap_or_else(|| {
        // It may just have ended.
        let _ = child.kill();
        panic!("{command:?} did not end within {DEADLINE:?}: {}", read(&folder.join("stderr")));
    });
    Outcome { status, stdout: read(&folder.join("stdout")), stderr: read(&folder.join("stderr")) }
}

/// Starts `command` with its output in the files `stdout` and `stderr` of `folder`.
///
/// # Panics
/// When it cannot be started.
#[must_use]
pub fn spawn(command: &mut Command, folder: &Path) -> Child {
    let output = |name| File::create(folder.join(name)).expect("an output file can be made");
    command
        .stdin(Stdio::null())
        .stdout(output("stdout"))
        .stderr(output("stderr"))
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"))
}

/// The status of `child` once it has ended; `None` when it has not within `limit`.
///
/// # Panics
/// When the child cannot be waited for.
pub fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return Some(status);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Asks `done` every few milliseconds until it is true; false after `limit`.
pub fn eventually(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !done() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Whether the process `pid` still runs. One that has ended and that nobody has waited for does not: where no
/// init reaps, it stays in /proc for ever.
#[must_use]
pub fn alive(pid: u64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the state is in parentheses and may contain any character.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}
