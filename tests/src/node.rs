//! A node with simulated GPUs, and the settings under which gpushare works on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::artifacts;
use crate::command;
use crate::scratch::Scratch;

/// The GPU model that most scenarios use.
pub const MODEL: &str = "NVIDIA H100 80GB HBM3";

/// The driver version of simulated nodes: that of the nvidia-smi which the tests run, since nvidia-smi
/// refuses any other.
#[must_use]
pub fn driver_version() -> String {
    let libraries = artifacts::nvidia_libraries();
    let names = fs::read_dir(libraries).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names
        .filter_map(|name| name.to_str()?.strip_prefix("libcuda.so.").map(str::to_owned))
        .find(|version| version.contains('.'))
        .unwrap_or_else(|| "535.309.01".to_owned())
}

/// The environment variable with which all scenarios run under supervisors: a value of `supervisor.mode`.
const SUPERVISOR: &str = "GPUSHARE_TESTS_SUPERVISOR";

/// A simulated node; its folder is removed on drop.
#[derive(Debug)]
pub struct SimulatedNode {
    scratch: Scratch,
    config: PathBuf,
}

/// The file with the leases in a state folder.
#[must_use]
pub fn ledger_in(state: &Path) -> PathBuf {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("the kernel tells it");
    state.join(format!("leases-{}", boot.trim()))
}

impl SimulatedNode {
    /// Lays out a node of `gpus` GPUs called `model` with `memory` (such as `80GiB`) each. It has NVIDIA's
    /// own nvidia-smi where that could be fetched.
    ///
    /// # Panics
    /// When the simulator fails.
    #[must_use]
    pub fn create(gpus: usize, model: &str, memory: &str) -> Self {
        Self::with(gpus, model, memory, &[])
    }

    /// As [`SimulatedNode::create`], with `more` arguments of `gpushare-simulator create`.
    ///
    /// # Panics
    /// When the simulator fails.
    #[must_use]
    pub fn with(gpus: usize, model: &str, memory: &str, more: &[&str]) -> Self {
        let scratch = Scratch::new("node");
        let mut create = Command::new(artifacts::simulator());
        create.arg("create").arg(scratch.path().join("node"));
        create.args(["--gpus", &gpus.to_string(), "--model", model, "--memory", memory]);
        create.args(["--driver", &driver_version()]).args(more);
        if artifacts::nvidia_smi().exists() {
            create.arg("--nvidia-smi").arg(artifacts::nvidia_smi());
        }
        let outcome = command::run(&mut create).expect_success("gpushare-simulator create");
        let config = PathBuf::from(outcome.stdout.lines().last().unwrap_or_default());
        assert!(config.is_file(), "the simulator's last line is no settings file: {:?}", outcome.stdout);
        if let Ok(mode) = std::env::var(SUPERVISOR) {
            let settings = fs::read_to_string(&config).expect("the simulator's settings can be read");
            let program = format!("supervisor = {:?}", artifacts::supervisor().display().to_string());
            let is_program = |line: &&str| line.starts_with("supervisor = ");
            let line = settings.lines().find(is_program).expect("the simulator names a supervisor");
            let settings = settings.replace(line, &program);
            fs::write(&config, format!("{settings}\n[supervisor]\nmode = \"{mode}\"\n"))
                .expect("they can be written");
        }
        Self { scratch, config }
    }

    /// One GPU of 80 GiB.
    #[must_use]
    pub fn one_gpu() -> Self {
        Self::create(1, MODEL, "80GiB")
    }

    /// One GPU of 80 GiB with ideal physics: NVML measures what each process uses, exactly and at once. It is for tests
    /// that assert GPU time within seconds, which a real driver's samples cannot show:
    ///
    /// - `meter`: the time of each container, over a restart of the meter
    /// - `top`, which makes its own such node: how busy containers and GPUs are
    #[must_use]
    pub fn ideal() -> Self {
        Self::with(1, MODEL, "80GiB", &["--profile", "ideal"])
    }

    /// The settings file that the simulator wrote.
    #[must_use]
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// A copy of the node's settings, named `name`, with `additions` (TOML) behind them.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn config_with(&self, name: &str, additions: &str) -> PathBuf {
        let settings = fs::read_to_string(&self.config).expect("the simulator's settings can be read");
        self.scratch.file(&format!("{name}.toml"), format!("{settings}\n{additions}\n"))
    }

    /// The folder that the simulator laid out.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.scratch.path().join("node")
    }

    /// The folder of the GPUs' state, which all processes of the node share.
    #[must_use]
    pub fn shared(&self) -> PathBuf {
        self.root().join("shared")
    }

    /// The folder of the driver's libraries.
    #[must_use]
    pub fn libraries(&self) -> PathBuf {
        self.root().join("driver/usr/lib/x86_64-linux-gnu")
    }

    /// Where gpushare keeps the state of this node, as the simulator's settings say.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.root().join("run")
    }

    /// The file with the node's leases.
    #[must_use]
    pub fn ledger(&self) -> PathBuf {
        ledger_in(&self.state())
    }

    /// The kernel's list of GPUs, one folder each.
    #[must_use]
    pub fn proc_driver(&self) -> PathBuf {
        self.root().join("proc/driver/nvidia")
    }
}
