//! A private containerd, with all its files in a temporary folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::command::{self, Outcome};
use crate::daemon::{Daemon, environment, processes_naming};
use crate::scratch::Scratch;
use crate::view::{self, View};

/// What a containerd without CRI needs of settings.
pub const WITHOUT_CRI: &str = "disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n";

/// A running private containerd; stopped on drop, with every shim of it.
#[derive(Debug)]
pub struct Containerd {
    // The order is that of dropping: the daemon stops before its folder goes.
    daemon: Daemon,
    program: PathBuf,
    config: PathBuf,
    view: View,
    scratch: Scratch,
}

impl Containerd {
    /// Starts a containerd whose runtimes work under gpushare's settings file `config` and find the cgroups
    /// of `view`. `settings` are top-level keys of its own settings, then tables.
    ///
    /// # Panics
    /// When it does not come up; its log is in the message.
    #[must_use]
    pub fn start(config: &Path, view: View, settings: &str) -> Self {
        Self::of(Path::new("/usr/bin/containerd"), config, view, settings)
    }

    /// The same with another containerd than Debian's. It finds Debian's shim, unless its settings name
    /// another one.
    ///
    /// # Panics
    /// As [`Containerd::start`].
    #[must_use]
    pub fn of(program: &Path, config: &Path, view: View, settings: &str) -> Self {
        let scratch = Scratch::new("containerd");
        let base = scratch.path().display();
        let text = format!(
            "version = 2\nroot = \"{base}/root\"\nstate = \"{base}/state\"\n{settings}\n\
             [grpc]\naddress = \"{base}/containerd.sock\"\n\
             [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{base}/opt\"\n"
        );
        scratch.file("containerd.toml", text);
        let daemon = daemon(program, &scratch, config, view);
        Self { daemon, program: program.to_owned(), config: config.to_owned(), view, scratch }
    }

    /// The folder of all its files, which others may use for theirs.
    #[must_use]
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// The socket it listens on.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        socket(&self.scratch)
    }

    /// The daemon's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// A command that runs `program` in the mount namespace of this containerd, with its environment.
    #[must_use]
    pub fn beside(&self, program: &str) -> Command {
        let mut command = view::beside(self.daemon.pid(), program.as_ref());
        environment(&mut command, &self.config);
        command
    }

    /// `ctr --namespace NAMESPACE ARGS...`, to its end.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn ctr(&self, namespace: &str, args: &[&str]) -> Outcome {
        let mut ctr = self.beside("/usr/bin/ctr");
        ctr.arg("--address").arg(self.socket()).args(["--namespace", namespace]).args(args);
        command::run(&mut ctr)
    }

    /// The shims of this containerd.
    #[must_use]
    pub fn shims(&self) -> Vec<i32> {
        processes_naming(&self.socket(), "containerd-shim")
    }

    /// SIGKILL to the daemon; its shims go on.
    pub fn kill(&mut self) {
        self.daemon.kill();
    }

    /// Starts the daemon again after [`Containerd::kill`], on the state that it left.
    ///
    /// # Panics
    /// When it does not come up; its log is in the message.
    pub fn start_again(&mut self) {
        self.daemon = daemon(&self.program, &self.scratch, &self.config, self.view);
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.daemon.stop();
        for shim in self.shims() {
            // A shim outlives its containerd by design; it may just have ended.
            let _ = kill(Pid::from_raw(shim), Signal::SIGKILL);
        }
    }
}

fn socket(scratch: &Scratch) -> PathBuf {
    scratch.path().join("containerd.sock")
}

fn daemon(program: &Path, scratch: &Scratch, config: &Path, view: View) -> Daemon {
    let mut containerd = view.command(program.as_os_str());
    environment(&mut containerd, config).arg("--config").arg(scratch.path().join("containerd.toml"));
    let mut client = Command::new("/usr/bin/ctr");
    client.arg("--address").arg(socket(scratch)).args(["--connect-timeout", "1s", "version"]);
    let answers = || command::run(&mut client).success();
    Daemon::start(&mut containerd, &scratch.folder("containerd-log"), answers)
}
