//! The host's meter, `gpushare meter`, beside the containers of a node.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use gpushare_tests::artifacts;
use gpushare_tests::node::SimulatedNode;

/// A running meter; ends with this value.
pub struct Meter(Child);

impl Meter {
    /// Starts it under the settings of `node`.
    ///
    /// # Errors
    /// When it cannot be started, or ends at once.
    pub fn start(node: &SimulatedNode) -> Result<Self> {
        let mut command = Command::new(artifacts::cli());
        command.arg("meter").env("GPUSHARE_CONFIG", node.config());
        let mut child = command.stdin(Stdio::null()).spawn().context("cannot start the meter")?;
        std::thread::sleep(Duration::from_millis(300));
        if let Some(status) = child.try_wait()? {
            bail!("the meter ended at once with {status}");
        }
        Ok(Self(child))
    }

    /// Processor time that it has used so far.
    ///
    /// # Errors
    /// When it has ended.
    pub fn processor_time(&self) -> Result<Duration> {
        let text = fs::read_to_string(format!("/proc/{}/schedstat", self.0.id())).context("no meter")?;
        let nanoseconds = text.split(' ').next().unwrap_or_default().parse().context("schedstat")?;
        Ok(Duration::from_nanos(nanoseconds))
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
