//! `gpushare meter` of a node, as its service manager runs it.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use serde_json::Value;

use crate::artifacts;
use crate::command::{self, eventually};
use crate::leases::cli;
use crate::scratch::Scratch;

/// A running meter; killed on drop.
#[derive(Debug)]
pub struct Meter {
    scratch: Scratch,
    child: Child,
}

impl Meter {
    /// Starts the meter under the settings file `config`, and waits until it says that it runs.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn start(config: &Path) -> Self {
        let scratch = Scratch::new("meter");
        let mut meter = Command::new(artifacts::cli());
        let child = command::spawn(meter.arg("meter").env("GPUSHARE_CONFIG", config), scratch.path());
        let meter = Self { scratch, child };
        let started = eventually(Duration::from_secs(20), || meter.log().contains("meter started"));
        assert!(started, "the meter did not start: {}", meter.log());
        meter
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
        assert!(matches!(self.child.try_wait(), Ok(None)), "the meter ended by itself: {}", self.log());
        self.end();
    }

    fn end(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.end();
    }
}

/// What `gpushare ps --json` says of the container `id` on its GPU number `line`.
///
/// # Panics
/// When it is not listed.
#[must_use]
pub fn listed(config: &Path, id: &str, line: usize) -> Value {
    let outcome = cli(config, &["ps", "--json"]).expect_success("gpushare ps --json");
    let listing: Value = serde_json::from_str(&outcome.stdout).expect("gpushare ps --json prints JSON");
    let found = listing.as_array().into_iter().flatten().find(|lease| lease["id"] == id);
    found.unwrap_or_else(|| panic!("{id} is not in {listing}"))["gpus"][line].clone()
}
