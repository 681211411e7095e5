//! Starts `gpushare meter` on the node for the sections that need it, and measures the processor time that it
//! takes.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};

use crate::table::{Row, Table};

const SHARES: usize = 50;
const WATCHED: Duration = Duration::from_secs(20);

/// Measures the section.
///
/// # Errors
/// If a container or the meter fails.
pub fn section() -> Result<Table> {
    crate::need_runtime()?;
    let mut table = Table::default();
    for (held, is_supervised) in [("libraries", false), ("supervisors", true)] {
        let node = SimulatedNode::one_gpu();
        let runtime = runtime(&node, is_supervised)?;
        let bundles: Vec<Bundle> = (0..SHARES).map(|_| bundle()).collect();
        let _containers: Vec<Container<'_>> = bundles.iter().map(|bundle| runtime.run(bundle)).collect();
        let meter = Meter::start(&node)?;
        sleep(Duration::from_secs(2));
        let (before, start) = (meter.processor_time()?, Instant::now());
        sleep(WATCHED);
        let used = meter.processor_time()?.checked_sub(before).context("time ran backwards")?;
        let percent = used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
        table.push(
            Row::plain(
                &format!("the meter, {SHARES} shares that {held} hold, with a GPU process each"),
                format!("{percent:.2} %"),
            )
            .spread(format!("of a core, over {} s", WATCHED.as_secs()))
            .target("<= 1 %", percent <= 1.0),
        );
    }
    Ok(table)
}

/// Returns the wrapper in front of runc. The simulated GPUs' memory does not come from the resource manager,
/// so supervisors have nothing to do.
fn runtime(node: &SimulatedNode, is_supervised: bool) -> Result<Runtime> {
    let config = node.config_with("meter", &LowLevel::Runc.settings());
    if is_supervised {
        let more = config.with_extension("toml.d");
        fs::create_dir_all(&more)?;
        let program = artifacts::supervisor();
        let text =
            format!("[supervisor]\nmode = \"required\"\n[paths]\nsupervisor = \"{}\"\n", program.display());
        fs::write(more.join("supervisor.toml"), text)?;
    }
    Ok(Runtime::with_config(LowLevel::Runc, &config))
}

fn bundle() -> Bundle {
    let program = ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "64MiB", "--hold", "10000"];
    Bundle::with_client().env("GPUSHARE_MEMORY", "1GiB").env("GPUSHARE_CORES", "2").args(&program)
}

/// A running meter, which is killed on drop.
pub struct Meter(Child);

impl Meter {
    /// Starts the meter with the settings of `node`.
    ///
    /// # Errors
    /// If it cannot be started, or ends at once.
    pub fn start(node: &SimulatedNode) -> Result<Self> {
        let mut command = Command::new(artifacts::cli());
        command.arg("meter").env("GPUSHARE_CONFIG", node.config());
        let mut child = command.stdin(Stdio::null()).spawn().context("cannot start the meter")?;
        sleep(Duration::from_millis(300));
        if let Some(status) = child.try_wait()? {
            bail!("the meter ended at once with {status}");
        }
        Ok(Self(child))
    }

    /// Returns the processor time that the meter has used so far.
    ///
    /// # Errors
    /// If it has ended.
    pub fn processor_time(&self) -> Result<Duration> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.0.id())).context("no meter")?;
        let mut sum = Duration::ZERO;
        for thread in threads {
            let text = fs::read_to_string(thread?.path().join("schedstat"))?;
            let nanoseconds = text.split(' ').next().unwrap_or_default().parse().context("schedstat")?;
            sum += Duration::from_nanos(nanoseconds);
        }
        Ok(sum)
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
