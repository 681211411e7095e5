//! A simulated node with the files of a simulated RM, and helpers to test on it.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use gpushare_attackers::supervisors;
use gpushare_simulated_manager::serve;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use nix::mount::{MntFlags, umount2};
use serde_json::json;

const LONG: Duration = Duration::from_secs(60);
/// Where containers see RM's files.
pub const FILES: &str = "/rm";

/// A simulated node with one GPU, and a resource manager for it.
pub struct Node {
    // Dropped first, so that it is unmounted before the directory is removed.
    _session: Box<dyn Send>,
    pub node: SimulatedNode,
}

impl Node {
    pub fn new() -> Self {
        let node = SimulatedNode::one_gpu();
        let session = serve(&node.root()).expect("root may mount");
        Self { _session: Box::new(session), node }
    }

    /// Returns the wrapper in front of `low_level`, with a supervisor in this mode.
    pub fn runtime(&self, low_level: LowLevel, mode: &str) -> Runtime {
        Runtime::with_config(low_level, &self.config(low_level, mode, "library"))
    }

    /// Returns the wrapper with supervisors that also enforce compute.
    pub fn runtime_that_holds_compute(&self, low_level: LowLevel) -> Runtime {
        Runtime::with_config(low_level, &self.config(low_level, "required", "supervisor"))
    }

    /// Writes settings for such a wrapper. `compute` selects how compute is enforced.
    pub fn config(&self, low_level: LowLevel, mode: &str, compute: &str) -> PathBuf {
        let name = format!("{low_level:?}-{mode}-{compute}").to_lowercase();
        let config = self.node.config_with(&name, &low_level.settings());
        let more = config.with_extension("toml.d");
        fs::create_dir_all(&more).expect("a folder");
        let program = env!("CARGO_BIN_EXE_supervisor");
        let section = format!("[supervisor]\nmode = \"{mode}\"\ncompute = \"{compute}\"\n");
        let record = format!("[meter]\nrecord = \"{}\"\n", self.files().display());
        let text = format!("{section}[paths]\nsupervisor = \"{program}\"\n{record}");
        fs::write(more.join("supervisor.toml"), text).expect("a file");
        config
    }

    /// Returns the path of RM's files on the host.
    pub fn files(&self) -> PathBuf {
        self.node.shared().join("manager")
    }

    pub fn figures(&self) -> String {
        fs::read_to_string(self.files().join("figures")).expect("the manager answers")
    }

    /// Returns the bytes of the GPU in use, as counted by the manager itself.
    pub fn used(&self) -> u64 {
        let figures = self.figures();
        let used = figures.lines().find_map(|line| line.strip_prefix("gpu 0 used "));
        used.and_then(|used| used.parse().ok()).expect("there is a GPU")
    }

    pub fn eventually(&self, what: &str, holds: impl FnMut() -> bool) {
        assert!(eventually(LONG, holds), "{what}\n{}", self.figures());
    }

    /// Creates a container that runs `script` and has RM's files.
    pub fn bundle(&self, memory: &str, script: &str) -> Bundle {
        let files = self.files();
        let bundle = Bundle::host_root().args(&["/bin/sh", "-c", script]);
        let bundle = if memory.is_empty() { bundle } else { bundle.env("GPUSHARE_MEMORY", memory) };
        bundle
            .mount(json!({"destination": FILES, "type": "bind", "source": files, "options": ["rbind", "rw"]}))
    }

    /// Lists the PIDs of this node's keepers and workers.
    pub fn supervisors(&self) -> Vec<i32> {
        supervisors(&self.node.root()).expect("there is /proc")
    }

    /// Lists the supervisors' files in the state directory.
    pub fn left(&self) -> Vec<PathBuf> {
        let folders = ["supervised", "budgets"].map(|name| self.node.state().join(name));
        let entries = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Processes that are being killed may still have a file open.
        let _ = umount2(&self.files(), MntFlags::MNT_DETACH);
    }
}
