//! A real node of the cluster: kubelet and containerd 2 from the folder that `KUBE_BIN` names, and the agent.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use gpushare_tests::cluster::kubelet::NODE;
use gpushare_tests::cluster::{Settings, agent, beside_the_release};
use gpushare_tests::command::eventually;
use gpushare_tests::containerd::Containerd;
use gpushare_tests::daemon::{Daemon, environment};
use gpushare_tests::image::{self, PAUSE};
use gpushare_tests::leases::leases;
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::view::View;
use gpushare_tests::{artifacts, regions};
use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, GROUP};

/// Where kubelet and device plugins meet, whatever kubelet's own folder is.
pub const DEVICE_PLUGINS: &str = "/var/lib/kubelet/device-plugins";
/// How long a part may take to come up.
const UP: Duration = Duration::from_secs(60);

/// The node, until it is dropped.
pub struct Worker {
    // The order is that of dropping.
    agent: Option<Daemon>,
    kubelet: Option<Daemon>,
    containerd: Containerd,
    programs: PathBuf,
    config: PathBuf,
    kubeconfig: PathBuf,
    /// Its GPUs.
    pub node: SimulatedNode,
    scratch: Scratch,
}

impl Worker {
    /// A node of `gpus` GPUs of 80 GiB under these settings of gpushare, which kubelet has registered and
    /// whose GPUs the scheduler sees.
    pub fn start(cluster: &ControlPlane, programs: &Path, gpus: usize, settings: &str) -> Self {
        let mut this = Self::without_agent(cluster, programs, gpus, settings);
        this.start_agent(cluster, &|| shows(cluster, gpus));
        this
    }

    /// Starts the agent, and waits until the cluster sees what it shows.
    pub fn start_agent(&mut self, cluster: &ControlPlane, is_seen: &dyn Fn() -> bool) {
        // Its token is bound to the node, which is there now.
        let settings = Settings {
            period: 1,
            engine: Some(self.containerd.socket()),
            device_plugins: Some(DEVICE_PLUGINS.into()),
            kubeconfig: Some(cluster.kubeconfig_of_agent()),
            ..Settings::default()
        };
        let mut command = agent(self.agent_program(), &self.config, &self.folder(), &self.cdi(), &settings);
        self.agent = Some(Daemon::start(&mut command, &self.scratch.folder("agent-log"), is_seen));
    }

    /// The same without an agent.
    pub fn without_agent(cluster: &ControlPlane, programs: &Path, gpus: usize, settings: &str) -> Self {
        let node = SimulatedNode::create(gpus, MODEL, "80GiB");
        let config = beside_the_release(&node.config_with("worker", settings));
        let scratch = Scratch::new("w");
        let _ = (scratch.folder("cdi"), scratch.folder("cni"));
        scratch.file("cni/none.conflist", NETWORK);
        let containerd =
            Containerd::of(&programs.join("containerd"), &config, View::AsItIs, &engine(programs, &scratch));
        let archive = image::archive(containerd.scratch());
        let import = ["image", "import", &archive.to_string_lossy()].map(str::to_owned);
        let import = import.each_ref().map(String::as_str);
        let _ = containerd.ctr("k8s.io", &import).expect_success("ctr image import");
        let mut this = Self {
            agent: None,
            kubelet: None,
            containerd,
            programs: programs.to_owned(),
            config,
            kubeconfig: cluster.kubeconfig(),
            node,
            scratch,
        };
        this.start_kubelet(cluster);
        this
    }

    /// The agent's program, as it was built for this test.
    pub fn agent_program(&self) -> &'static Path {
        Path::new(env!("CARGO_BIN_EXE_gpushare-kube"))
    }

    /// The arguments by which an agent finds this node's parts, and its settings file.
    pub fn agent_arguments(&self) -> (Vec<String>, PathBuf) {
        let option = |name: &str, path: &Path| format!("--{name}={}", path.display());
        let arguments = vec![
            option("kubelet-dir", &self.folder()),
            option("cdi-dir", &self.cdi()),
            option("engine-socket", &self.containerd.socket()),
            "--period=1".to_owned(),
        ];
        (arguments, self.config.clone())
    }

    /// The folder of CDI files.
    fn cdi(&self) -> PathBuf {
        self.scratch.path().join("cdi")
    }

    /// Starts kubelet, and waits until the node is ready.
    pub fn start_kubelet(&mut self, cluster: &ControlPlane) {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let port = port.expect("a port is free").port();
        let settings = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "address": "127.0.0.1", "port": port, "healthzPort": 0, "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": format!("unix://{}", self.containerd.socket().display()),
            // This machine's cgroups are of version 1, and nothing of it is to be limited.
            "failCgroupV1": false, "cgroupDriver": "cgroupfs", "cgroupsPerQOS": false,
            "enforceNodeAllocatable": [], "failSwapOn": false, "localStorageCapacityIsolation": false,
            "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "1Mi"},
            "podLogsDir": self.scratch.folder("logs"), "resolvConf": "",
            "syncFrequency": "1s", "nodeStatusUpdateFrequency": "1s", "shutdownGracePeriod": "0s",
        });
        let settings = self.scratch.file("kubelet.json", settings.to_string());
        let mut command = Command::new(self.programs.join("kubelet"));
        environment(&mut command, &self.config);
        command.arg("--config").arg(settings).arg("--kubeconfig").arg(&self.kubeconfig);
        command.arg("--root-dir").arg(self.folder()).args(["--hostname-override", NODE]);
        let is_ready = || {
            let node = cluster.try_call("GET", &format!("/api/v1/nodes/{NODE}"), None).unwrap_or_default();
            let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True")
        };
        let log = self.scratch.folder("kubelet-log");
        self.kubelet = Some(Daemon::start(&mut command, &log, is_ready));
    }

    /// Kills kubelet at once; its pods go on.
    pub fn kill_kubelet(&mut self) {
        self.kubelet.take().expect("it runs").kill();
    }

    /// A process in the node's own namespaces.
    pub fn pid(&self) -> u32 {
        self.containerd.pid()
    }

    /// kubelet's folder.
    pub fn folder(&self) -> PathBuf {
        self.scratch.folder("k")
    }

    /// What a container of the pod `name` of the namespace `team` has printed.
    pub fn printed(&self, uid: &str, name: &str, container: &str) -> String {
        self.printed_in("team", uid, name, container)
    }

    /// The same of another namespace.
    pub fn printed_in(&self, namespace: &str, uid: &str, name: &str, container: &str) -> String {
        let pod = format!("{namespace}_{name}_{uid}");
        let folder = self.scratch.path().join("logs").join(pod).join(container);
        // One file for each start.
        let log: String =
            (0..9).filter_map(|start| fs::read_to_string(folder.join(format!("{start}.log"))).ok()).collect();
        // Each line has a time, the stream and a mark before what was printed.
        log.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).collect::<Vec<_>>().join("\n")
    }

    /// All that the claims and containers have left: leases, CDI files and regions.
    pub fn left(&self) -> (usize, usize, usize) {
        let cdi = fs::read_dir(self.cdi()).expect("it is there").count();
        (leases(&self.config).len(), cdi, regions::left(&self.node.state()).len())
    }

    /// The memory of each lease, in bytes.
    pub fn held(&self) -> Vec<u64> {
        leases(&self.config).into_iter().flat_map(|lease| lease.memory).collect()
    }

    /// How often the agent has logged this.
    pub fn logged(&self, text: &str) -> usize {
        self.agent.as_ref().map(Daemon::log).unwrap_or_default().matches(text).count()
    }

    /// What kubelet and agent have logged, of which the last lines say what went wrong.
    pub fn logs(&self) -> String {
        let end = |daemon: &Option<Daemon>| {
            let log = daemon.as_ref().map(Daemon::log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            lines[lines.len().saturating_sub(25)..].join("\n")
        };
        format!("kubelet:\n{}\nagent:\n{}", end(&self.kubelet), end(&self.agent))
    }

    /// Waits until nothing is left on the node.
    pub fn assert_empty(&self) {
        assert!(eventually(UP, || self.left() == (0, 0, 0)), "{:?}\n{}", self.left(), self.logs());
    }
}

/// Whether the scheduler sees all GPUs.
pub fn shows(cluster: &ControlPlane, gpus: usize) -> bool {
    let slices = cluster.get(&format!("{GROUP}/resourceslices"));
    slices["items"][0]["spec"]["devices"].as_array().is_some_and(|devices| devices.len() == gpus)
}

/// All pods are on the node's network: containerd wants to see that there is another one.
const NETWORK: &str = r#"{"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}"#;

/// containerd's settings. Its handlers are runc, the default, and gpushare.
fn engine(programs: &Path, scratch: &Scratch) -> String {
    let (cri, shim) = ("plugins.\"io.containerd.grpc.v1.cri\"", programs.join("containerd-shim-runc-v2"));
    let of = |name: &str| {
        format!(
            "[{cri}.containerd.runtimes.{name}]\nruntime_type = \"io.containerd.runc.v2\"\nruntime_path = {shim:?}\n"
        )
    };
    format!(
        "[{cri}]\nsandbox_image = \"{PAUSE}\"\ndisable_apparmor = true\nrestrict_oom_score_adj = true\n\
         enable_cdi = true\ncdi_spec_dirs = [{:?}]\n\
         [{cri}.cni]\nbin_dir = \"/usr/lib/cni\"\nconf_dir = {:?}\n\
         [{cri}.containerd]\ndefault_runtime_name = \"runc\"\nsnapshotter = \"native\"\n{}{}\
         {}\n\
         [{cri}.containerd.runtimes.gpushare.options]\nBinaryName = {:?}\n",
        scratch.path().join("cdi"),
        scratch.path().join("cni"),
        of("runc"),
        of("gpushare"),
        passed_on(),
        artifacts::wrapper(),
    )
}

/// The annotations that reach the runtime, as the packaged settings have them.
fn passed_on() -> String {
    let packaged = include_str!("../../../packaging/containerd.toml");
    let start = packaged.find("pod_annotations").expect("it has them");
    let end = packaged[start..].rfind("]\n\n[plugins").expect("a list ends") + start;
    packaged[start..=end].to_owned()
}

/// The states of a pod's containers, by name.
pub fn states(pod: &Value) -> Vec<(String, Value)> {
    let all = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
    all.iter().map(|it| (it["name"].as_str().unwrap_or_default().to_owned(), it["state"].clone())).collect()
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(mut kubelet) = self.kubelet.take() {
            kubelet.stop();
        }
        // kubelet makes it, and leaves it.
        for name in ["kubelet.sock", "kubelet_internal_checkpoint"] {
            let _ = fs::remove_file(Path::new(DEVICE_PLUGINS).join(name));
        }
    }
}
