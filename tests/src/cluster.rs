//! A node of a Kubernetes cluster: a simulated kubelet and API server around the agent under test.

pub mod api;
pub mod device_manager;
pub mod extender;
pub mod kubelet;
pub mod podresources;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::artifacts;
use crate::command::eventually;
use crate::leases::{self, cli};
use crate::needs::Need;
use crate::node::{MODEL, SimulatedNode};
use crate::regions;
use crate::scratch::Scratch;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use api::Api;
use kubelet::{Kubelet, NODE};
use podresources::PodResources;

/// What tests of the agent need that run no container.
pub const NEEDS: &[Need] = &[Need::Root];

/// Kubernetes' programs that a real control plane needs.
const PROGRAMS: [&str; 3] = ["kube-apiserver", "kube-scheduler", "kube-controller-manager"];

/// The folder with Kubernetes' own programs; `None` where `KUBE_BIN` names none.
#[must_use]
pub fn programs() -> Option<PathBuf> {
    env::var_os("KUBE_BIN").filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// What a real node needs besides: kubelet, and an engine that applies CDI devices, which Debian's does not.
const NODE_PROGRAMS: [&str; 3] = ["kubelet", "containerd", "containerd-shim-runc-v2"];

/// Why there is no real control plane on this machine, with a real kubelet if `with_node`; `None` where there
/// is.
pub(crate) fn missing_programs(with_node: bool) -> Option<String> {
    let mut programs = PROGRAMS.to_vec();
    programs.extend(NODE_PROGRAMS.iter().filter(|_| with_node));
    let Some(folder) = self::programs() else {
        return Some(format!("KUBE_BIN names no folder with {}", programs.join(", ")));
    };
    let absent = |program: &&&str| !folder.join(program).exists();
    let missing = programs.iter().find(absent).map(|program| format!("{program} is not in KUBE_BIN"));
    let others = [ETCD, OPENSSL].into_iter().find(|program| !Path::new(program).exists());
    missing.or_else(|| {
        others.map(|program| format!("{program} is missing: apt-get install etcd-server openssl"))
    })
}

/// etcd, as Debian has it.
pub const ETCD: &str = "/usr/bin/etcd";
/// openssl, as Debian has it.
pub const OPENSSL: &str = "/usr/bin/openssl";

/// How long anything may take that the agent does by itself.
pub const SOON: Duration = Duration::from_secs(20);

/// How the agent is called.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Seconds between its looks at GPUs and claims.
    pub period: u64,
    /// The engine's socket; `None` for an engine that is known to apply CDI devices.
    pub engine: Option<PathBuf>,
    /// The address of its metrics.
    pub metrics: Option<SocketAddr>,
    /// Where device plugins are, if not below kubelet's folder.
    pub device_plugins: Option<PathBuf>,
    /// By which file it finds the API server, if it is not the simulated one.
    pub kubeconfig: Option<PathBuf>,
    /// The namespace of its ConfigMap, if not the usual one.
    pub namespace: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            period: 1,
            engine: None,
            metrics: None,
            device_plugins: None,
            kubeconfig: None,
            namespace: None,
        }
    }
}

/// A node of a cluster: simulated GPUs, kubelet and API server, and the real agent.
pub struct ClusterNode {
    /// Its GPUs and settings.
    pub node: SimulatedNode,
    /// The cluster's API server.
    pub api: Api,
    /// Its kubelet.
    pub kubelet: Kubelet,
    program: PathBuf,
    config: PathBuf,
    /// How the agent is called.
    pub settings: Settings,
    agent: Option<Child>,
    _scratch: Scratch,
}

impl ClusterNode {
    /// A node of `gpus` GPUs of 80 GiB whose agent, `program`, is up.
    ///
    /// # Panics
    /// When it does not come up.
    #[must_use]
    pub fn start(program: &Path, gpus: usize, settings: Settings) -> Self {
        Self::on(SimulatedNode::create(gpus, MODEL, "80GiB"), program, settings)
    }

    /// The same with a node of one's own.
    ///
    /// # Panics
    /// When the agent does not come up.
    #[must_use]
    pub fn on(node: SimulatedNode, program: &Path, settings: Settings) -> Self {
        let config = node.config().to_owned();
        // Short names: a socket's path has at most 107 bytes.
        let scratch = Scratch::new("k");
        let config = beside_the_release(&config);
        let root = scratch.folder("k");
        let devices = PodResources::start(&root);
        let kubelet = Kubelet { root, cdi: scratch.folder("cdi"), devices };
        let mut this = Self {
            node,
            api: Api::start(NODE),
            kubelet,
            program: program.to_owned(),
            config,
            settings,
            agent: None,
            _scratch: scratch,
        };
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
        let kubeconfig = self.settings.kubeconfig.clone().unwrap_or_else(|| self.api.kubeconfig());
        let settings = Settings { kubeconfig: Some(kubeconfig), ..self.settings.clone() };
        let mut command =
            agent(&self.program, &self.config, &self.kubelet.root, &self.kubelet.cdi, &settings);
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

    /// Whether the agent has the settings file `config`.
    #[must_use]
    pub fn is_configured(&self, config: &Path) -> bool {
        self.config == agents(config)
    }

    /// The settings file.
    #[must_use]
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// The UUIDs of the node's GPUs, by index.
    pub fn gpus(&self) -> Vec<String> {
        let told = cli(&self.config, &["devices", "--json"]).expect_success("gpushare devices").stdout;
        let listing: Value = serde_json::from_str(&told).expect("it is JSON");
        let gpus = listing["gpus"].as_array().expect("it is a list").iter();
        gpus.map(|gpu| gpu["uuid"].as_str().expect("a GPU has a UUID").to_owned()).collect()
    }

    /// One share of an allocation: `memory` (as `30Gi`) and `cores` of the GPU number `gpu`, for `request`.
    #[must_use]
    pub fn share(&self, request: &str, gpu: usize, memory: &str, cores: &str) -> Value {
        Self::share_of(request, &self.gpus()[gpu], memory, cores)
    }

    /// The same, of the GPU with this UUID.
    #[must_use]
    pub fn share_of(request: &str, gpu: &str, memory: &str, cores: &str) -> Value {
        json!({
            "request": request, "driver": "gpu.gpushare.io", "pool": NODE,
            "device": gpu.to_lowercase(), "shareID": format!("share-of-{request}"),
            "consumedCapacity": {"memory": memory, "cores": cores},
        })
    }

    /// All that the agent and its claims have left: leases, CDI files and regions.
    pub fn left(&self) -> (usize, usize, usize) {
        let leases = leases::leases(&self.config).len();
        (leases, self.kubelet.cdi_files().len(), regions::left(&self.node.state()).len())
    }
}

/// How the agent `program` is called on a node with the settings file `config`, whose kubelet has the folder
/// `kubelet` and whose engine looks for CDI files in `cdi`.
#[must_use]
pub fn agent(program: &Path, config: &Path, kubelet: &Path, cdi: &Path, settings: &Settings) -> Command {
    let mut command = Command::new(program);
    command.args(["node", "--node-name", NODE, "--period", &settings.period.to_string()]);
    command.args(engine_arguments(settings.engine.as_deref()));
    if let Some(address) = settings.metrics {
        command.arg(format!("--metrics-address={address}"));
    }
    command.args(settings.namespace.iter().map(|namespace| format!("--namespace={namespace}")));
    command.arg("--kubelet-dir").arg(kubelet).arg("--cdi-dir").arg(cdi);
    let plugins = settings.device_plugins.clone().unwrap_or_else(|| kubelet.join("device-plugins"));
    command.arg("--device-plugin-dir").arg(plugins);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("GPUSHARE_CONFIG", config);
    command.envs(settings.kubeconfig.as_ref().map(|file| ("KUBECONFIG", file)));
    command.stdin(Stdio::null());
    command
}

fn engine_arguments(socket: Option<&Path>) -> Vec<OsString> {
    match socket {
        Some(socket) => vec!["--engine-socket".into(), socket.into()],
        None => vec!["--assume-cdi".into()],
    }
}

/// Where the agent's copy of a settings file is.
fn agents(config: &Path) -> PathBuf {
    config.with_extension("agent.toml")
}

/// A copy of the settings that says where gpushare's programs are: not beside the agent of a test build.
///
/// # Panics
/// When it cannot be written.
#[must_use]
pub fn beside_the_release(config: &Path) -> PathBuf {
    let text = fs::read_to_string(config).expect("the settings can be read");
    let libraries = artifacts::library("libcuda.so.1");
    let libraries = libraries.parent().expect("it lies in a folder");
    let programs = format!(
        "[paths]\nhook = {:?}\ncli = {:?}\nlibraries = {libraries:?}\n",
        artifacts::hook(),
        artifacts::cli()
    );
    let copy = agents(config);
    fs::write(&copy, text.replacen("[paths]\n", &programs, 1)).expect("the settings can be written");
    copy
}

impl Drop for ClusterNode {
    fn drop(&mut self) {
        self.kill_agent();
    }
}
