//! Daemons that a test starts and stops again. Only what was started here is stopped; one that serves this
//! machine is never touched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::command;

/// How long a daemon may take until it answers.
pub const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// A daemon started here; stopped on drop.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    logs: PathBuf,
}

impl Daemon {
    /// Starts `command`, with its log in the folder `logs`, and waits until it `answers`.
    ///
    /// # Panics
    /// When it does not come up; its log is in the message.
    #[must_use]
    pub fn start(command: &mut Command, logs: &Path, mut answers: impl FnMut() -> bool) -> Self {
        let mut daemon = Self { child: command::spawn(command, logs), logs: logs.to_owned() };
        let up = command::eventually(STARTS_WITHIN, || answers() || !daemon.is_running());
        assert!(up && daemon.is_running(), "{command:?}: {}", daemon.log());
        daemon
    }

    /// What it has logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.logs.join("stderr")).unwrap_or_default()
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    /// Ends it at once, as a crash would.
    pub fn kill(&mut self) {
        // It may just have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Ends it as its service manager would.
    pub fn stop(&mut self) {
        let Ok(pid) = i32::try_from(self.child.id()) else { return };
        if !self.is_running() {
            return;
        }
        // It may have ended since.
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        if command::wait(&mut self.child, Duration::from_secs(20)).is_none() {
            self.kill();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The environment in which a daemon or an engine's client runs: it finds its parts, and the runtime its
/// settings.
pub fn environment<'c>(command: &'c mut Command, config: &Path) -> &'c mut Command {
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("GPUSHARE_CONFIG", config)
}

/// The processes whose command line holds a word that begins with `path` and whose program's name contains
/// `program`.
#[must_use]
pub fn processes_naming(path: &Path, program: &str) -> Vec<i32> {
    let wanted = path.as_os_str().as_encoded_bytes();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split(|&byte| byte == 0);
            let named = words.next().is_some_and(|first| String::from_utf8_lossy(first).contains(program));
            named && words.any(|word| word.starts_with(wanted))
        })
        .collect()
}
