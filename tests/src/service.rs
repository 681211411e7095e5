//! A command of `gpushare` that runs in the foreground until it is ended, as a service manager runs it.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use crate::artifacts;
use crate::command::{self, eventually};
use crate::scratch::Scratch;

/// An address of this machine at which nobody listens.
///
/// # Panics
/// When no port is free.
#[must_use]
pub fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.local_addr().expect("it has an address").to_string()
}

/// A running service; killed on drop.
#[derive(Debug)]
pub struct Service {
    scratch: Scratch,
    child: Child,
}

impl Service {
    /// Starts `gpushare ARGUMENTS` under the settings file `config`, and waits until it has logged `says`.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn start(arguments: &[&str], config: &Path, says: &str) -> Self {
        let service = Self::spawn(arguments, config);
        let started = eventually(Duration::from_secs(20), || service.log().contains(says));
        assert!(started, "{arguments:?} did not start: {}", service.log());
        service
    }

    /// As [`Service::start`], without waiting.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn spawn(arguments: &[&str], config: &Path) -> Self {
        Self::spawn_with(arguments, config, &[])
    }

    /// As [`Service::spawn`], with these variables in its environment.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn spawn_with(arguments: &[&str], config: &Path, variables: &[(&str, &str)]) -> Self {
        let scratch = Scratch::new("service");
        let mut command = Command::new(artifacts::cli());
        command.args(arguments).env("GPUSHARE_CONFIG", config).envs(variables.iter().copied());
        let child = command::spawn(&mut command, scratch.path());
        Self { scratch, child }
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("stderr")).unwrap_or_default()
    }

    /// Ends it at once, as a crash would.
    ///
    /// # Panics
    /// When it has ended by itself before.
    pub fn kill(mut self) {
        assert!(matches!(self.child.try_wait(), Ok(None)), "it ended by itself: {}", self.log());
        self.end();
    }

    fn end(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.end();
    }
}
