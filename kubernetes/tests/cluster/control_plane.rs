//! A real control plane on loopback: Debian's etcd, and API server, scheduler and the controllers of claims
//! from the folder that `KUBE_BIN` names.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use gpushare_tests::cluster::kubelet::NODE;
use gpushare_tests::cluster::{ETCD, OPENSSL};
use gpushare_tests::command::eventually;
use gpushare_tests::scratch::Scratch;
use http::Request;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

/// How long a part may take to come up.
const UP: Duration = Duration::from_secs(60);
/// The path of the API's group of claims and slices.
pub const GROUP: &str = "/apis/resource.k8s.io/v1";

/// The control plane, until it is dropped, as its administrator sees it.
pub struct ControlPlane {
    runtime: Runtime,
    client: Client,
    address: String,
    scratch: Scratch,
    /// Its programs, by name, with how each is started again.
    children: Vec<(String, Child, Command)>,
}

impl ControlPlane {
    /// Starts it from the programs in `folder`. It has no node yet.
    pub fn start(folder: &Path) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
        let scratch = Scratch::new("kube");
        let [etcd, peer, api, scheduler] = ports();
        let address = format!("https://127.0.0.1:{api}");
        scratch.file("tokens.csv", "of-the-administrator,admin,1,system:masters\n");
        let kubeconfig = kubeconfig(&scratch, "admin", &address, "of-the-administrator");
        let client = client(&runtime, &kubeconfig);
        let mut this = Self { runtime, client, address: address.clone(), scratch, children: Vec::new() };
        let certificates = this.scratch.folder("certificates");
        let key = this.key();
        let etcd_address = format!("http://127.0.0.1:{etcd}");
        let mut command = Command::new(ETCD);
        command.arg("--data-dir").arg(this.scratch.folder("etcd"));
        command.args(["--listen-client-urls", &etcd_address, "--advertise-client-urls", &etcd_address]);
        command.args(["--listen-peer-urls", &format!("http://127.0.0.1:{peer}")]);
        this.spawn("etcd", command);
        let mut command = Command::new(folder.join("kube-apiserver"));
        command.args([
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--authorization-mode=RBAC",
            // As every cluster has it: the agent is such a pod.
            "--allow-privileged=true",
        ]);
        command.args([format!("--etcd-servers={etcd_address}"), format!("--secure-port={api}")]);
        command.args(["--service-cluster-ip-range=10.0.0.0/24", "--endpoint-reconciler-type=none"]);
        command.args(["--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"]);
        command.arg(format!("--service-account-issuer={address}"));
        command.arg(option("--cert-dir=", &certificates));
        command.arg(option("--token-auth-file=", &this.scratch.path().join("tokens.csv")));
        command.arg(option("--service-account-key-file=", &key));
        command.arg(option("--service-account-signing-key-file=", &key));
        // What programs beside it ask for under accounts of their own.
        let audit = json!({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}]});
        command.arg(option("--audit-policy-file=", &this.scratch.file("audit.json", audit.to_string())));
        command.arg(option("--audit-log-path=", &this.scratch.path().join("audit.log")));
        this.spawn("kube-apiserver", command);
        assert!(
            eventually(UP, || this.try_call("GET", "/readyz", None).is_ok()),
            "{}",
            this.log("kube-apiserver")
        );
        for (name, more) in [
            ("kube-scheduler", vec![format!("--secure-port={scheduler}")]),
            (
                "kube-controller-manager",
                vec![
                    "--secure-port=0".to_owned(),
                    "--controllers=resourceclaim-controller,garbage-collector-controller".to_owned(),
                ],
            ),
        ] {
            let mut command = Command::new(folder.join(name));
            command.arg(option("--kubeconfig=", &kubeconfig)).arg("--leader-elect=false");
            command.args(["--bind-address=127.0.0.1", "--authentication-skip-lookup=true"]).args(more);
            command.arg(option("--cert-dir=", &certificates));
            this.spawn(name, command);
        }
        this
    }

    /// A file by which the administrator finds the API server.
    pub fn kubeconfig(&self) -> PathBuf {
        self.scratch.path().join("admin.kubeconfig")
    }

    /// The API server's port on loopback, and the certificate by which it is known.
    pub fn endpoint(&self) -> (String, String) {
        let port = self.address.rsplit(':').next().unwrap_or_default().to_owned();
        let certificate = self.scratch.path().join("certificates/apiserver.crt");
        (port, fs::read_to_string(certificate).expect("the API server has made it"))
    }

    /// A file by which the agent finds the API server, with a token of its own service account that is bound
    /// to the node.
    pub fn kubeconfig_of_agent(&self) -> PathBuf {
        self.kubeconfig_of_agent_in("gpushare")
    }

    /// The same where the agent is installed in another namespace.
    pub fn kubeconfig_of_agent_in(&self, namespace: &str) -> PathBuf {
        let uid = self.get(&format!("/api/v1/nodes/{NODE}"))["metadata"]["uid"].clone();
        let node = json!({"kind": "Node", "apiVersion": "v1", "name": NODE, "uid": uid});
        self.kubeconfig_of(namespace, "gpushare-node", &node)
    }

    /// The same for a service account, whose token is bound to an object; null is none.
    pub fn kubeconfig_of(&self, namespace: &str, account: &str, bound_to: &Value) -> PathBuf {
        let asked = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": [self.address], "boundObjectRef": bound_to}});
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let token = self.post(&path, &asked)["status"]["token"].as_str().expect("it is made").to_owned();
        kubeconfig(&self.scratch, account, &self.address, &token)
    }

    /// The object at `path`.
    pub fn get(&self, path: &str) -> Value {
        self.try_call("GET", path, None).unwrap_or_else(|why| panic!("GET {path}: {why}"))
    }

    /// Makes an object.
    pub fn post(&self, path: &str, object: &Value) -> Value {
        self.try_call("POST", path, Some(object)).unwrap_or_else(|why| panic!("POST {path}: {why}"))
    }

    /// Gives the object at `path` these annotations.
    pub fn annotate(&self, path: &str, annotations: &Value) {
        // A controller may have written it since it was read.
        let write = || {
            let mut object = self.get(path);
            object["metadata"]["annotations"] = annotations.clone();
            self.try_call("PUT", path, Some(&object)).is_ok()
        };
        assert!(eventually(UP, write), "{path} cannot be annotated");
    }

    /// Deletes an object at once.
    pub fn delete(&self, path: &str) {
        let now = json!({"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0});
        self.try_call("DELETE", path, Some(&now)).unwrap_or_else(|why| panic!("DELETE {path}: {why}"));
    }

    /// Deletes an object as its owner does: a pod is there until kubelet has ended it.
    pub fn end(&self, path: &str) {
        self.try_call("DELETE", path, None).unwrap_or_else(|why| panic!("DELETE {path}: {why}"));
    }

    /// One call as the administrator.
    pub fn try_call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, String> {
        self.call_by(&self.client, method, path, body)
    }

    /// The agent of the node, as the API server knows it by its token.
    pub fn as_agent(&self) -> Client {
        client(&self.runtime, &self.kubeconfig_of_agent())
    }

    /// One call of `client`. A patch is a merge patch.
    pub fn call_by(
        &self,
        client: &Client,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, String> {
        let body = body.map(|body| serde_json::to_vec(body).expect("it is JSON")).unwrap_or_default();
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let request = Request::builder().method(method).uri(path).header("Content-Type", kind);
        let request = request.body(body).expect("it is a request");
        let text = self.runtime.block_on(client.request_text(request)).map_err(|why| why.to_string())?;
        Ok(serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// The node, as kubelet would have registered it.
    pub fn add_node(&self) {
        let metadata =
            json!({"name": NODE, "labels": {"gpushare.node-restriction.kubernetes.io/node": "true"}});
        let mut node =
            self.post("/api/v1/nodes", &json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
        let room = json!({"cpu": "64", "memory": "256Gi", "pods": "1000"});
        let ready = json!([{"type": "Ready", "status": "True"}]);
        node["status"] = json!({"capacity": room, "allocatable": room, "conditions": ready});
        let path = format!("/api/v1/nodes/{NODE}/status");
        self.try_call("PUT", &path, Some(&node)).expect("the node is ready");
    }

    /// A key for service accounts' tokens.
    fn key(&self) -> PathBuf {
        let key = self.scratch.path().join("service-accounts.key");
        let mut command = Command::new(OPENSSL);
        command.args(["genrsa", "-out"]).arg(&key).arg("2048").stderr(Stdio::null());
        assert!(command.status().expect("openssl is there").success());
        key
    }

    fn spawn(&mut self, name: &str, mut command: Command) {
        let log = |file: &File| file.try_clone().expect("a log can be written");
        let path = self.scratch.path().join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(path).expect("a log can be made");
        command.stdin(Stdio::null()).stdout(log(&file)).stderr(log(&file));
        let child = command.spawn().unwrap_or_else(|why| panic!("{name}: {why}"));
        self.children.push((name.to_owned(), child, command));
    }

    /// Kills one of its programs at once.
    pub fn kill(&mut self, program: &str) {
        for (_, child, _) in self.children.iter_mut().filter(|(name, ..)| name == program) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts a program again that was killed.
    pub fn revive(&mut self, program: &str) {
        for (_, child, command) in self.children.iter_mut().filter(|(name, ..)| name == program) {
            *child = command.spawn().unwrap_or_else(|why| panic!("{program}: {why}"));
        }
    }

    /// Waits until the API server answers.
    pub fn wait(&self) {
        let answers = || self.try_call("GET", "/readyz", None).is_ok();
        assert!(eventually(UP, answers), "{}", self.log("kube-apiserver"));
    }

    /// Runs another kube-scheduler with this configuration, which finds the API server by `kubeconfig`.
    pub fn add_scheduler(&mut self, folder: &Path, kubeconfig: &Path, mut configuration: Value) {
        configuration["clientConnection"] = json!({"kubeconfig": kubeconfig});
        configuration["leaderElection"] = json!({"leaderElect": false});
        let path = self.scratch.file("scheduler.json", configuration.to_string());
        let [port, ..] = ports();
        let mut command = Command::new(folder.join("kube-scheduler"));
        command
            .arg(option("--config=", &path))
            .args(["--bind-address=127.0.0.1", "--authentication-skip-lookup=true"]);
        command.arg(format!("--secure-port={port}"));
        command.arg(option("--cert-dir=", &self.scratch.folder("scheduler-certificates")));
        self.spawn("kube-scheduler-2", command);
    }

    /// What a service account has asked for until now: each as namespace, resource and verb, and whether it was
    /// allowed to.
    pub fn calls_of(&self, namespace: &str, account: &str) -> BTreeMap<(String, String, String), bool> {
        let log = fs::read_to_string(self.scratch.path().join("audit.log")).unwrap_or_default();
        let user = format!("system:serviceaccount:{namespace}:{account}");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut calls = BTreeMap::new();
        // The last line may be half written.
        for event in log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            let object = &event["objectRef"];
            if event["user"]["username"] != json!(user) || object.is_null() {
                continue;
            }
            let parts = [&object["resource"], &object["subresource"]].map(text);
            let parts = parts.iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join("/");
            let group = text(&object["apiGroup"]);
            let resource = if group.is_empty() { parts } else { format!("{parts}.{group}") };
            // A policy refuses what a role allows.
            let is_allowed = event["annotations"]["authorization.k8s.io/decision"] == "allow"
                && event["responseStatus"]["code"] != 403;
            let call = (text(&object["namespace"]), resource, text(&event["verb"]));
            *calls.entry(call).or_insert(true) &= is_allowed;
        }
        calls
    }

    /// A folder of its own.
    pub fn folder(&self, name: &str) -> PathBuf {
        self.scratch.folder(name)
    }

    /// What one of its programs has logged.
    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.scratch.path().join(format!("{name}.log"))).unwrap_or_default()
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        for (_, child, _) in self.children.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Ports of loopback that are free now.
fn ports() -> [u16; 4] {
    let listeners = [(); 4].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port is free"));
    listeners.map(|listener| listener.local_addr().expect("it is bound").port())
}

fn option(name: &str, path: &Path) -> std::ffi::OsString {
    let mut option = std::ffi::OsString::from(name);
    option.push::<&OsStr>(path.as_ref());
    option
}

fn kubeconfig(scratch: &Scratch, name: &str, address: &str, token: &str) -> PathBuf {
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": address, "insecure-skip-tls-verify": true}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "users": [{"name": "it", "user": {"token": token}}],
    });
    scratch.file(&format!("{name}.kubeconfig"), text.to_string())
}

fn client(runtime: &Runtime, kubeconfig: &Path) -> Client {
    let read = Kubeconfig::read_from(kubeconfig).expect("it was written so");
    runtime.block_on(async {
        let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
        Client::try_from(config.expect("it is a configuration")).expect("a client can be made")
    })
}
