//! The agent under test, with everything around it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::cli;
use gpushare_tests::needs::Need;
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::regions;
use gpushare_tests::scratch::Scratch;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::api::Api;
use crate::kubelet::{Kubelet, NODE};

/// What tests of the agent need that run no container.
pub const NEEDS: &[Need] = &[Need::Root];

/// How long anything may take that the agent does by itself.
pub const SOON: Duration = Duration::from_secs(20);

/// A node of a cluster: simulated GPUs, kubelet and API server, and the real agent.
pub struct ClusterNode {
    pub node: SimulatedNode,
    pub api: Api,
    pub kubelet: Kubelet,
    config: PathBuf,
    agent: Option<Child>,
    _scratch: Scratch,
}

impl ClusterNode {
    /// A node of `gpus` GPUs of 80 GiB whose agent is up.
    pub fn start(gpus: usize) -> Self {
        let node = SimulatedNode::create(gpus, MODEL, "80GiB");
        let config = node.config().to_owned();
        Self::with(node, config)
    }

    /// The same of `node`, whose agent has the settings file `config`.
    pub fn with(node: SimulatedNode, config: PathBuf) -> Self {
        let scratch = Scratch::new("kubelet");
        let config = beside_the_release(&config);
        let kubelet = Kubelet { root: scratch.folder("kubelet"), cdi: scratch.folder("cdi") };
        let mut this = Self { node, api: Api::start(NODE), kubelet, config, agent: None, _scratch: scratch };
        this.start_agent();
        this
    }

    /// Starts the agent, and waits until kubelet can call it.
    pub fn start_agent(&mut self) {
        self.spawn_agent();
        assert!(eventually(SOON, || self.kubelet.driver().is_ok()), "the agent does not answer");
    }

    /// Starts the agent.
    pub fn spawn_agent(&mut self) {
        self.kill_agent();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpushare-kube"));
        command.args(["node", "--node-name", NODE, "--period", "1"]);
        command.arg("--kubelet-dir").arg(&self.kubelet.root).arg("--cdi-dir").arg(&self.kubelet.cdi);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("GPUSHARE_CONFIG", &self.config).env("KUBECONFIG", self.api.kubeconfig());
        command.stdin(Stdio::null());
        self.agent = Some(command.spawn().expect("the agent can be started"));
    }

    /// The agent's pid.
    pub fn pid(&self) -> i32 {
        let agent = self.agent.as_ref().expect("it was started");
        i32::try_from(agent.id()).expect("a pid fits")
    }

    /// Kills the agent at once.
    pub fn kill_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }

    /// Ends the agent as a cluster does, and returns whether it ended in order.
    pub fn end_agent(&mut self) -> bool {
        let mut agent = self.agent.take().expect("it runs");
        let pid = Pid::from_raw(i32::try_from(agent.id()).expect("a pid fits"));
        kill(pid, Signal::SIGTERM).expect("it can be signalled");
        agent.wait().expect("it can be waited for").success()
    }

    /// Starts the agent anew with other settings.
    pub fn configure(&mut self, config: &Path) {
        self.config = beside_the_release(config);
        self.start_agent();
    }

    /// The UUIDs of the node's GPUs, by index.
    pub fn gpus(&self) -> Vec<String> {
        let told = cli(&self.config, &["devices", "--json"]).expect_success("gpushare devices").stdout;
        let listing: Value = serde_json::from_str(&told).expect("it is JSON");
        let gpus = listing["gpus"].as_array().expect("it is a list").iter();
        gpus.map(|gpu| gpu["uuid"].as_str().expect("a GPU has a UUID").to_owned()).collect()
    }

    /// One share of an allocation: `memory` (as `30Gi`) and `cores` of the GPU number `gpu`, for `request`.
    pub fn share(&self, request: &str, gpu: usize, memory: &str, cores: &str) -> Value {
        json!({
            "request": request, "driver": "gpu.gpushare.io", "pool": NODE,
            "device": self.gpus()[gpu].to_lowercase(), "shareID": format!("share-of-{request}"),
            "consumedCapacity": {"memory": memory, "cores": cores},
        })
    }

    /// All that the agent and its claims have left: leases, CDI files and regions.
    pub fn left(&self) -> (usize, usize, usize) {
        let leases = gpushare_tests::leases::leases(&self.config).len();
        (leases, self.kubelet.cdi_files().len(), regions::left(&self.node.state()).len())
    }
}

/// A copy of the settings that says where gpushare's programs are: not beside the agent of a test build.
fn beside_the_release(config: &Path) -> PathBuf {
    let text = fs::read_to_string(config).expect("the settings can be read");
    let libraries = artifacts::library("libcuda.so.1");
    let libraries = libraries.parent().expect("it lies in a folder");
    let programs = format!(
        "[paths]\nhook = {:?}\ncli = {:?}\nlibraries = {libraries:?}\n",
        artifacts::hook(),
        artifacts::cli()
    );
    let copy = config.with_extension("agent.toml");
    fs::write(&copy, text.replacen("[paths]\n", &programs, 1)).expect("the settings can be written");
    copy
}

impl Drop for ClusterNode {
    fn drop(&mut self) {
        self.kill_agent();
    }
}
