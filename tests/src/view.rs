//! Which cgroups a program finds at `/sys/fs/cgroup`. A machine that mixes v1 and v2 can show either alone in
//! a private mount namespace; others have one view.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::command::eventually;

/// What a program finds at `/sys/fs/cgroup`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// What this machine has.
    AsItIs,
    /// As it is, without cgroup v2 where both are mounted: crun refuses the mixture.
    Unmixed,
    /// cgroup v2 alone. On a machine that mixes, it has no controller but device programs.
    V2,
}

/// Whether v1 hierarchies and v2 are both mounted.
fn is_mixed() -> bool {
    Path::new("/sys/fs/cgroup/unified").is_dir()
}

/// Whether only v2 is mounted.
fn is_unified() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").is_file()
}

impl View {
    /// The shell commands that make this view in a mount namespace of one's own; `None` where nothing has to
    /// be done.
    fn script(self) -> Option<&'static str> {
        match self {
            Self::Unmixed if is_mixed() => Some("umount /sys/fs/cgroup/unified"),
            Self::V2 if !is_unified() => {
                Some("umount --recursive /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup")
            }
            _ => None,
        }
    }

    /// A command that runs `program` in this view. Each program on the way executes the next, so the process
    /// id stays.
    #[must_use]
    pub fn command(self, program: &OsStr) -> Command {
        match self.script() {
            None => Command::new(program),
            Some(script) => prepared(script, program),
        }
    }

    /// Keeps one mount namespace with this view, for all calls about a container; `None` where nothing has to
    /// be changed.
    ///
    /// # Panics
    /// When it cannot be made.
    #[must_use]
    pub fn keep(self) -> Option<Namespace> {
        let script = self.script()?;
        let mut holder = prepared(script, "/bin/cat".as_ref());
        // It waits for the end of its input, which comes with the end of this process at the latest.
        let holder = holder.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("unshare can be run");
        let namespace = Namespace(holder);
        let made = eventually(Duration::from_secs(20), || {
            std::fs::read(format!("/proc/{}/cmdline", namespace.pid()))
                .is_ok_and(|line| line == b"/bin/cat\0")
        });
        assert!(made, "no mount namespace with {self:?}");
        Some(namespace)
    }

    /// Whether it is cgroup v2 alone.
    #[must_use]
    pub fn is_v2(self) -> bool {
        self == Self::V2 || is_unified()
    }

    /// Whether the view has a controller, `memory` or `cpu`, so that an engine can limit it.
    #[must_use]
    pub fn has_controller(self, name: &str) -> bool {
        let controllers = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
        let unified = controllers.split_whitespace().any(|other| other == name);
        let v1 = self != Self::V2 && Path::new("/sys/fs/cgroup").join(name).is_dir();
        v1 || unified
    }
}

/// A mount namespace that lives as long as this value.
#[derive(Debug)]
pub struct Namespace(Child);

impl Namespace {
    /// The process that keeps it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command that runs `program` in the mount namespace of the process `pid`. The process id stays.
#[must_use]
pub fn beside(pid: u32, program: &OsStr) -> Command {
    let mut command = Command::new("/usr/bin/nsenter");
    command.arg(format!("--mount=/proc/{pid}/ns/mnt")).arg(program);
    command
}

/// A command that runs `program` in a private mount namespace, once the shell commands `script` have changed
/// it.
#[must_use]
pub fn prepared(script: &str, program: &OsStr) -> Command {
    let mut command = Command::new("/usr/bin/unshare");
    command.args(["--mount", "--propagation", "private", "/bin/sh", "-c"]);
    command.arg(format!("{script} && exec \"$@\"")).arg("sh").arg(program);
    command
}
