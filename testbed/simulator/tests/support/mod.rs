//! What the tests of simulated nodes share: nodes in a folder of their own, and a CUDA client in a child
//! process.
//!
//! A client is this test program again, run with a script that has one step on each line. It prints one line
//! for each answer.

// Each test program uses a part of this.
#![allow(dead_code)]

pub mod client;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

/// The program under test, with both libraries beside it. They are built here, because cargo builds only the
/// program for these tests.
pub fn program() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let program = PathBuf::from(env!("CARGO_BIN_EXE_gpushare-simulator"));
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "gpushare-simulator-cuda", "-p", "gpushare-simulator-nvml"]);
        let folder = program.parent().expect("a program lies in a folder");
        cargo.arg("--target-dir").arg(folder.parent().expect("cargo's folder for a profile lies in another"));
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo runs").success(), "the libraries build");
        program
    })
}

/// Version and library folder of NVIDIA's own driver, if `tests/setup/driver-libraries.sh` has fetched it.
pub fn real_driver() -> Option<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/driver-libraries/root");
    let folder = root.join("usr/lib/x86_64-linux-gnu/nvidia/current");
    let names = std::fs::read_dir(&folder).ok()?.flatten().map(|entry| entry.file_name());
    let version = names
        .filter_map(|name| Some(name.to_str()?.strip_prefix("libcuda.so.")?.to_owned()))
        .find(|version| version.contains('.'))?;
    Some((version, folder))
}

/// A node that is removed when the test ends.
pub struct Node {
    folder: tempfile::TempDir,
}

impl Node {
    /// A node with ordinary files in place of device nodes, so that root is not needed. Its physics are ideal where
    /// the arguments name no profile.
    pub fn new(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let node = Self { folder };
        let output = Command::new(program())
            .arg("create")
            .arg(node.path(""))
            .args(["--profile", "ideal"])
            .args(arguments)
            .arg("--plain-nodes")
            .output()
            .expect("the program runs");
        assert!(output.status.success(), "create: {}", String::from_utf8_lossy(&output.stderr));
        node
    }

    /// A path inside the node.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("node").join(name)
    }

    /// `command` with the environment of a client of this node's driver.
    pub fn client(&self, mut command: Command) -> Command {
        command
            .env("GPUSHARE_SIMULATOR", self.path("shared"))
            .env("LD_LIBRARY_PATH", self.path("driver/usr/lib/x86_64-linux-gnu"));
        command
    }

    /// The program's `probe` on this node.
    pub fn probe(&self, arguments: &[&str]) -> Command {
        let mut command = self.client(Command::new(program()));
        command.arg("probe").args(arguments);
        command
    }

    /// Starts a client process with this script.
    pub fn run(&self, script: &str) -> Running {
        self.run_with(script, &[])
    }

    /// Starts a client process with this script and these environment variables.
    pub fn run_with(&self, script: &str, variables: &[(&str, &str)]) -> Running {
        self.run_under(&[], script, variables)
    }

    /// Starts a client process through another program, `starter`.
    pub fn run_under(&self, starter: &[&str], script: &str, variables: &[(&str, &str)]) -> Running {
        let own = std::env::current_exe().expect("a test has a path");
        let words: Vec<_> = starter.iter().map(std::ffi::OsString::from).chain([own.into()]).collect();
        let mut command = self.client(Command::new(&words[0]));
        command
            .args(&words[1..])
            .args(["--exact", "client", "--ignored", "--nocapture", "--quiet"])
            .env("SCRIPT", script);
        command.envs(variables.iter().copied());
        Running::start(command)
    }
}

/// A running client, which is killed on drop.
pub struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Running {
    /// Starts `command`.
    pub fn start(mut command: Command) -> Self {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the client starts");
        let output = child.stdout.take().expect("the output is a pipe");
        Self { child, lines: BufReader::new(output).lines() }
    }

    /// The value of the next line `key: value`; other lines are skipped.
    pub fn value(&mut self, key: &str) -> String {
        let prefix = format!("{key}: ");
        for line in self.lines.by_ref() {
            if let Some(value) = line.expect("readable output").strip_prefix(&prefix) {
                return value.to_owned();
            }
        }
        panic!("the client ended without {key}");
    }

    /// The value of the next line `key: value`, as a number.
    pub fn number(&mut self, key: &str) -> u64 {
        self.value(key).parse().expect("a number")
    }

    /// Lets a client go on that waits for a line on its standard input.
    pub fn send(&mut self) {
        use std::io::Write;
        let input = self.child.stdin.as_mut().expect("the input is a pipe");
        input.write_all(b"\n").expect("the client reads");
    }

    /// The client's pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it with SIGKILL.
    pub fn kill(self) {
        drop(self);
    }

    /// Waits for a client that kills itself, and checks that it did.
    pub fn killed(mut self) {
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(self.child.wait().expect("the client is ours").signal(), Some(libc::SIGKILL));
    }

    /// Waits until the client ends, and checks that it succeeded.
    pub fn finish(mut self) {
        assert!(self.child.wait().expect("the client is ours").success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A client that has ended cannot be killed; that is no failure.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
