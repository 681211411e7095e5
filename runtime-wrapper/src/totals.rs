//! What a creation only looks up, and the CLI prepares: GPU memory sizes, which NVML tells and a static program cannot
//! ask, and our libraries' copies for the driver.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gpushare_config::{Config, ENVIRONMENT, Paths};
use gpushare_inject::Fitted;
use gpushare_inventory::{Node, Totals, boot_id};

/// NVML can take seconds without persistence mode; the engine hangs as long.
const DEADLINE: Duration = Duration::from_secs(20);

/// The node with its GPUs' sizes. What is of another boot, driver or set of GPUs is renewed first.
pub fn known(node: Node, state: &Path, config: &Config) -> Result<Node> {
    let boot = boot_id()?;
    let fitting = || {
        let totals = Totals::load(&Totals::path(state));
        totals.filter(|totals| totals.fits(&boot, &node.driver.version, &node.gpus))
    };
    let Paths { cache, libraries, cli, .. } = &config.paths;
    let is_fitted = Fitted { cache, libraries, driver: &node.driver }.is_complete();
    if let Some(totals) = fitting().filter(|_| is_fitted) {
        return Ok(node.with_totals(&totals));
    }
    refresh(cli).context("cannot take stock of the node")?;
    let totals =
        fitting().context("NVML and /proc/driver/nvidia name different GPUs; see `gpushare doctor`")?;
    Ok(node.with_totals(&totals))
}

/// Runs `gpushare inventory refresh` with nothing of the caller's: no environment, no descriptors, a deadline.
fn refresh(cli: &Path) -> Result<()> {
    let mut command = Command::new(cli);
    command.args(["inventory", "refresh"]).env_clear().current_dir("/");
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    if let Some(path) = std::env::var_os(ENVIRONMENT) {
        command.env(ENVIRONMENT, path);
    }
    let (mut answer, writer) = std::io::pipe()?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot run {}; install gpushare completely", cli.display()))?;
    drop(command); // our copy of the writing end
    let start = Instant::now();
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if start.elapsed() > DEADLINE => {
                child.kill()?;
                child.wait()?;
                bail!(
                    "NVML gave no answer for {} seconds; turn on persistence mode (nvidia-smi -pm 1)",
                    DEADLINE.as_secs()
                );
            }
            None => thread::sleep(Duration::from_millis(2)),
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut text = String::new();
    let _ = std::io::Read::by_ref(&mut answer).take(4096).read_to_string(&mut text);
    bail!("{}", text.lines().last().unwrap_or("gpushare inventory refresh ended without a word"));
}
