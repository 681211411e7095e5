//! Processes that keep containers, and others that have their name.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};

use crate::command;
use crate::machine::Machine;
use crate::scratch::Scratch;

/// A process that keeps a container as a shim of containerd does: it works in the container's folder, where `notes`
/// are. Ended on drop.
#[derive(Debug)]
pub struct Shim {
    process: Child,
}

impl Shim {
    /// In the container `pod-1` of `machine`. It runs outside of the machine.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(scratch: &Scratch, machine: &Machine, notes: &[(&str, String)]) -> Self {
        let folder = machine.path("run/anywhere/io.containerd.runtime.v2.task/k8s.io/pod-1");
        fs::create_dir_all(&folder).expect("a folder can be made in an overlay");
        for (name, text) in notes {
            fs::write(folder.join(name), text).expect("a file can be written in an overlay");
        }
        Self::started(Command::new(Self::program(scratch)).arg("1000").current_dir(folder))
    }

    /// A process that somebody else than the machine's root calls so, who has root in a container or is `user`. Its
    /// folder lies beside one that names `needs`, and beside what keeps readers waiting.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn false_one(scratch: &Scratch, needs: &str, user: Option<u32>) -> Self {
        let beside = scratch.folder(&format!("false {}", user.unwrap_or_default()));
        for name in ["own", "named", "waits", "it's \"odd\"\nname"] {
            fs::create_dir_all(beside.join(name)).expect("a folder can be made");
        }
        fs::write(beside.join("named/config.json"), needs).expect("a file can be written");
        let pipe = beside.join("waits/config.json");
        let _ = command::run(Command::new("mkfifo").arg(pipe)).expect_success("mkfifo");
        let program = Self::program(scratch);
        let mut command = Command::new(match user {
            Some(_) => program.as_os_str(),
            None => "unshare".as_ref(),
        });
        match user {
            Some(user) => command.uid(user),
            None => command.args(["--pid", "--fork", "--kill-child"]).arg(program),
        };
        Self::started(command.arg("1000").current_dir(beside.join("own")))
    }

    fn program(scratch: &Scratch) -> PathBuf {
        let program = scratch.path().join("containerd-shim-runc-v2");
        if !program.exists() {
            let _ = fs::copy("/usr/bin/sleep", &program).expect("a program can be copied");
        }
        program
    }

    fn started(command: &mut Command) -> Self {
        Self { process: command.spawn().expect("it starts") }
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        self.process.kill().expect("one's own child can be ended");
        let _ = self.process.wait().expect("and waited for");
    }
}
