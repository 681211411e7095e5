//! A node with one simulated GPU, an installed gpushare, and the settings that both sides read.

use std::fs;
use std::path::PathBuf;

use gpushare_tests::artifacts::Installed;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::regions;
use gpushare_tests::runtime::LowLevel;

/// The node and what is installed on it.
pub struct Place {
    /// The settings file, which the wrapper reads at every call.
    pub config: PathBuf,
    /// The installed gpushare.
    pub installed: Installed,
    node: SimulatedNode,
}

impl Place {
    /// A node whose low-level runtime is `low_level`.
    pub fn new(low_level: LowLevel) -> Self {
        let node = SimulatedNode::one_gpu();
        let config = node.config_with("engine", &low_level.settings());
        Self { config, installed: Installed::new(), node }
    }

    /// The folder of the node's files.
    pub fn folder(&self) -> PathBuf {
        self.node.root()
    }

    /// How many region folders the node has.
    pub fn regions(&self) -> usize {
        regions::ids(&self.node.state()).len()
    }

    /// Runs `act` while `additions` (TOML) are at the end of the settings.
    pub fn under<T>(&self, additions: &str, act: impl FnOnce() -> T) -> T {
        let before = fs::read_to_string(&self.config).expect("the settings can be read");
        let write = |text: &str| fs::write(&self.config, text).expect("the settings can be written");
        write(&format!("{before}\n{additions}\n"));
        let done = act();
        write(&before);
        done
    }
}
