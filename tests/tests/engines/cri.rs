//! containerd's CRI service, called as a kubelet calls it: a pod's sandbox first, then containers in it.
//! Every container of a scenario is alone in a pod on the node's network, so that no network plugin is
//! needed.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use gpushare_tests::command::{Outcome, eventually};
use gpushare_tests::containerd::Containerd;
use gpushare_tests::image::{self, IMAGE, PAUSE};
use gpushare_tests::view::View;
use serde_json::Value;

use crate::cri_client::{
    Capabilities, Client, ContainerAnswer, ContainerConfig, ContainerMetadata, ContainerStatus,
    CreateContainer, EXITED, Empty, ExecSync, Executed, Id, Image, LinuxContainer, LinuxSandbox,
    NamespaceOption, Number, RUNNING, Resources, RunPodSandbox, SandboxAnswer, SandboxConfig,
    SandboxMetadata, SandboxSecurity, Security, UpdateContainer, Variable, namespace,
};
use crate::engine::{Engine, LITTLE_MEMORY, USER, Wanted, With};

/// A private containerd with CRI, whose handler `gpushare` is as we ship it.
pub struct Cri {
    // Declared first, so that it is dropped before its containerd.
    client: Client,
    containerd: Containerd,
    pods: BTreeMap<&'static str, Pod>,
}

/// A sandbox and the one container in it.
struct Pod {
    config: SandboxConfig,
    sandbox: String,
    container: ContainerConfig,
    id: String,
}

impl Cri {
    /// Starts containerd with gpushare as its default runtime and as the handler `gpushare`, and loads the
    /// images.
    pub fn start(wrapper: &Path, config: &Path) -> Self {
        let containerd = Containerd::start(config, View::AsItIs, &settings(wrapper));
        let archive = image::archive(containerd.scratch());
        let import = ["image", "import", &archive.to_string_lossy()].map(str::to_owned);
        let _ = containerd
            .ctr("k8s.io", &import.each_ref().map(String::as_str))
            .expect_success("ctr image import");
        let client = Client::new(&containerd.socket());
        let cri = Self { client, containerd, pods: BTreeMap::new() };
        // The service is registered a little after the socket listens.
        let up =
            eventually(Duration::from_secs(20), || cri.client.call::<_, Empty>("Version", Empty {}).is_ok());
        assert!(up, "containerd has no CRI service");
        cri
    }

    /// Runs the sandbox of a pod under the runtime handler `handler`, with `annotations` of the pod's author.
    /// Returns the sandbox's id.
    ///
    /// # Errors
    /// With what the pod's event would say.
    pub fn sandbox(
        &self,
        name: &str,
        handler: &str,
        annotations: &[(&str, &str)],
        with: &[With],
    ) -> Result<(String, SandboxConfig), String> {
        let namespaces = Some(namespaces(with));
        let privileged = with.contains(&With::Privileged);
        let config = SandboxConfig {
            metadata: Some(SandboxMetadata {
                name: name.into(),
                uid: format!("uid-{name}"),
                namespace: "default".into(),
            }),
            annotations: annotations.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
            linux: Some(LinuxSandbox { security: Some(SandboxSecurity { namespaces, privileged }) }),
        };
        let request = RunPodSandbox { config: Some(config.clone()), runtime_handler: handler.into() };
        let answer: Id =
            self.client.call("RunPodSandbox", request).map_err(|status| status.message().to_owned())?;
        Ok((answer.id, config))
    }

    /// Pid of a sandbox's process on the host.
    pub fn sandbox_pid(&self, sandbox: &str) -> i32 {
        let answer: SandboxAnswer =
            self.client.done("PodSandboxStatus", Id { id: sandbox.into(), number: 1 });
        pid(answer.info.get("info"))
    }

    /// Stops a sandbox with all its containers, and removes it.
    pub fn remove_sandbox(&self, sandbox: &str) {
        for method in ["StopPodSandbox", "RemovePodSandbox"] {
            let _: Empty = self.client.done(method, Id { id: sandbox.into(), number: 0 });
        }
    }

    /// Runs `wanted` in a pod under `handler`, whose author wrote `pod_annotations`.
    ///
    /// # Errors
    /// With what the pod's event would say.
    pub fn run_under(
        &mut self,
        wanted: &Wanted,
        handler: &str,
        pod_annotations: &[(&str, &str)],
    ) -> Result<(), String> {
        let (sandbox, config) = self.sandbox(wanted.name, handler, pod_annotations, &wanted.with)?;
        let pod = Pod { config, sandbox, container: container(wanted), id: String::new() };
        self.pods.insert(wanted.name, pod);
        self.start_container(wanted.name)
    }

    /// Runs `wanted` in the pod of the container `other`. With `among` it is in that container's pid
    /// namespace, as an ephemeral container of `kubectl debug --target` is. The pod is removed with whichever
    /// of them is removed first.
    ///
    /// # Errors
    /// With what the pod's event would say.
    pub fn run_beside(&mut self, other: &str, wanted: &Wanted, among: bool) -> Result<(), String> {
        let pod = &self.pods[other];
        let mut container = container(wanted);
        container.metadata = Some(ContainerMetadata { name: wanted.name.into(), attempt: 0 });
        let security = container.linux.as_mut().and_then(|linux| linux.security.as_mut());
        if let Some(namespaces) = security.and_then(|security| security.namespaces.as_mut()).filter(|_| among)
        {
            namespaces.pid = namespace::TARGET;
            namespaces.target.clone_from(&pod.id);
        }
        let pod =
            Pod { config: pod.config.clone(), sandbox: pod.sandbox.clone(), container, id: String::new() };
        self.pods.insert(wanted.name, pod);
        self.start_container(wanted.name)
    }

    /// Creates and starts the pod's container, as a kubelet does at each restart.
    fn start_container(&mut self, name: &str) -> Result<(), String> {
        let pod = self.pods.get_mut(name).expect("the pod was made before");
        let request = CreateContainer {
            sandbox: pod.sandbox.clone(),
            config: Some(pod.container.clone()),
            sandbox_config: Some(pod.config.clone()),
        };
        let said = |status: tonic::Status| status.message().to_owned();
        pod.id = self.client.call::<_, Id>("CreateContainer", request).map_err(said)?.id;
        let start = Id { id: pod.id.clone(), number: 0 };
        self.client.call::<_, Empty>("StartContainer", start).map(drop).map_err(said)
    }

    fn status(&self, name: &str) -> ContainerStatus {
        let answer: ContainerAnswer =
            self.client.done("ContainerStatus", Id { id: self.id(name), number: 0 });
        answer.status.unwrap_or_default()
    }

    /// What the pod's event says of the container's end.
    pub fn message(&self, name: &str) -> String {
        let status = self.status(name);
        format!("{}: {}", status.reason, status.message)
    }

    fn end(&self, name: &str, seconds: i64) {
        let _: Empty = self.client.done("StopContainer", Id { id: self.id(name), number: seconds });
        let ended = eventually(Duration::from_secs(20), || self.status(name).state == EXITED);
        assert!(ended, "{name} outlived StopContainer");
    }
}

/// containerd's settings: the handler as `packaging/containerd.toml` has it, and as the default.
fn settings(wrapper: &Path) -> String {
    let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
    format!(
        "[{cri}]\nsandbox_image = \"{PAUSE}\"\ndisable_apparmor = true\nrestrict_oom_score_adj = true\n\
         [{cri}.containerd]\ndefault_runtime_name = \"gpushare\"\nsnapshotter = \"native\"\n\
         [{cri}.containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n\
         [{cri}.containerd.runtimes.gpushare]\nruntime_type = \"io.containerd.runc.v2\"\n\
         {}\
         [{cri}.containerd.runtimes.gpushare.options]\nBinaryName = \"{}\"\n",
        annotations(),
        wrapper.display()
    )
}

/// Whether the shipped handler takes this annotation only from the container's own annotations, which kubelet
/// writes.
pub fn is_containers(annotation: &str) -> bool {
    let starts = |pattern: &str| match pattern.strip_suffix('*') {
        Some(head) => annotation.starts_with(head),
        None => annotation == pattern,
    };
    shipped("container_annotations").split('"').skip(1).step_by(2).any(starts)
}

/// Both lists of annotations, as we ship them.
fn annotations() -> String {
    let list = |name| format!("{name} = [{}]\n", shipped(name).replace('\n', " "));
    list("pod_annotations") + &list("container_annotations")
}

/// The items of a list of `packaging/containerd.toml`.
fn shipped(list: &str) -> &'static str {
    let file = include_str!("../../../packaging/containerd.toml");
    let rest = file.split_once(&format!("\n{list} = [")).expect("the file has both lists").1;
    rest.split_once(']').expect("a list ends").0
}

fn namespaces(with: &[With]) -> NamespaceOption {
    let pid = if with.contains(&With::HostPids) { namespace::NODE } else { namespace::CONTAINER };
    NamespaceOption { network: namespace::NODE, pid, target: String::new() }
}

fn container(wanted: &Wanted) -> ContainerConfig {
    let security = Security {
        capabilities: wanted.has(With::NoCapabilities).then(|| Capabilities { drop: vec!["ALL".into()] }),
        privileged: wanted.has(With::Privileged),
        namespaces: Some(namespaces(&wanted.with)),
        run_as_user: wanted.has(With::User).then(|| Number { value: i64::from(USER) }),
        readonly_root: wanted.has(With::ReadOnlyRoot),
        no_new_privileges: wanted.has(With::NoNewPrivileges),
        run_as_group: wanted.has(With::User).then(|| Number { value: i64::from(USER) }),
    };
    let resources = wanted
        .has(With::LittleMemory)
        .then(|| Resources { cpu_shares: 0, memory_limit: i64::from(LITTLE_MEMORY) });
    let variable = |(key, value): &(&str, String)| Variable { key: (*key).into(), value: value.clone() };
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: "main".into(), attempt: 0 }),
        image: Some(Image { image: IMAGE.into() }),
        command: wanted.args.clone(),
        envs: wanted.env.iter().map(variable).collect(),
        annotations: wanted.annotations.iter().map(|(name, value)| ((*name).into(), value.clone())).collect(),
        linux: Some(LinuxContainer { resources, security: Some(security) }),
    }
}

fn pid(info: Option<&String>) -> i32 {
    let info: Value = serde_json::from_str(info.expect("a verbose status has info")).expect("info is JSON");
    info["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("info names the process")
}

impl Engine for Cri {
    fn folder(&self) -> &Path {
        self.containerd.scratch().path()
    }

    fn run(&mut self, wanted: &Wanted) -> Result<(), String> {
        let handler = if wanted.has(With::DefaultRuntime) {
            ""
        } else if wanted.has(With::PlainRunc) {
            "runc"
        } else {
            "gpushare"
        };
        // What a caller without trust writes comes as the pod's annotations.
        let by_pod = |(name, _): &&(&str, String)| !name.starts_with("alloc.");
        let pod: Vec<(&str, &str)> =
            wanted.annotations.iter().filter(by_pod).map(|(name, value)| (*name, value.as_str())).collect();
        let mut wanted = wanted.clone();
        wanted.annotations.retain(|(name, _)| name.starts_with("alloc."));
        self.run_under(&wanted, handler, &pod)
    }

    fn exec(&self, name: &str, args: &[&str]) -> Outcome {
        let command = args.iter().map(|&word| word.to_owned()).collect();
        let request = ExecSync { container: self.id(name), command, timeout: 30 };
        let done: Executed = self.client.done("ExecSync", request);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Outcome {
            status: ExitStatus::from_raw(done.exit_code << 8),
            stdout: text(&done.stdout),
            stderr: text(&done.stderr),
        }
    }

    fn id(&self, name: &str) -> String {
        self.pods[name].id.clone()
    }

    fn pid(&self, name: &str) -> i32 {
        let answer: ContainerAnswer =
            self.client.done("ContainerStatus", Id { id: self.id(name), number: 1 });
        pid(answer.info.get("info"))
    }

    fn stop(&mut self, name: &str) {
        self.end(name, 10);
    }

    fn kill(&mut self, name: &str) {
        self.end(name, 0);
    }

    fn restart(&mut self, name: &str) {
        self.end(name, 10);
        let old = self.id(name);
        let pod = self.pods.get_mut(name).expect("the pod was made before");
        if let Some(metadata) = &mut pod.container.metadata {
            metadata.attempt += 1;
        }
        self.start_container(name).unwrap_or_else(|said| panic!("{name} does not start again: {said}"));
        let _: Empty = self.client.done("RemoveContainer", Id { id: old, number: 0 });
    }

    fn remove(&mut self, name: &str) {
        if let Some(pod) = self.pods.remove(name) {
            self.remove_sandbox(&pod.sandbox);
        }
    }

    fn is_running(&self, name: &str) -> bool {
        self.status(name).state == RUNNING
    }

    fn pause(&self, _name: &str) {
        unreachable!("the table says that CRI cannot pause");
    }

    fn unpause(&self, _name: &str) {
        unreachable!("the table says that CRI cannot pause");
    }

    fn update(&self, name: &str) {
        let linux = Some(Resources { cpu_shares: 512, memory_limit: 0 });
        let _: Empty =
            self.client.done("UpdateContainerResources", UpdateContainer { container: self.id(name), linux });
    }

    fn was_killed_for_memory(&self, name: &str) -> Option<bool> {
        Some(self.status(name).reason == "OOMKilled")
    }

    fn crash(&mut self, meanwhile: &mut dyn FnMut()) {
        self.containerd.kill();
        meanwhile();
        self.containerd.start_again();
        let up =
            eventually(Duration::from_secs(20), || self.client.call::<_, Empty>("Version", Empty {}).is_ok());
        assert!(up, "containerd came back without its CRI service");
    }
}
