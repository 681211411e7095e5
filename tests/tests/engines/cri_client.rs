//! The part of Kubernetes' Container Runtime Interface (`runtime.v1`) that the scenarios call. The numbers
//! are the tags of its api.proto. Fields that nobody here needs are left out; a reader skips unknown fields.

use std::collections::HashMap;
use std::path::Path;

use gpushare_tests::grpc;
use prost::Message;
use tonic::Status;

/// Whose namespace a container gets.
pub mod namespace {
    /// The container's own.
    pub const CONTAINER: i32 = 1;
    /// The node's.
    pub const NODE: i32 = 2;
    /// Another container's of the pod.
    pub const TARGET: i32 = 3;
}

/// CONTAINER_RUNNING of ContainerState.
pub const RUNNING: i32 = 1;
/// CONTAINER_EXITED of ContainerState.
pub const EXITED: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub struct SandboxMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub namespace: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct NamespaceOption {
    #[prost(int32, tag = "1")]
    pub network: i32,
    #[prost(int32, tag = "2")]
    pub pid: i32,
    #[prost(string, tag = "4")]
    pub target: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxSecurity {
    #[prost(message, optional, tag = "1")]
    pub namespaces: Option<NamespaceOption>,
    #[prost(bool, tag = "6")]
    pub privileged: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct LinuxSandbox {
    #[prost(message, optional, tag = "2")]
    pub security: Option<SandboxSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxConfig {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<SandboxMetadata>,
    #[prost(map = "string, string", tag = "7")]
    pub annotations: HashMap<String, String>,
    #[prost(message, optional, tag = "8")]
    pub linux: Option<LinuxSandbox>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RunPodSandbox {
    #[prost(message, optional, tag = "1")]
    pub config: Option<SandboxConfig>,
    #[prost(string, tag = "2")]
    pub runtime_handler: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Image {
    #[prost(string, tag = "1")]
    pub image: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Variable {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Resources {
    #[prost(int64, tag = "3")]
    pub cpu_shares: i64,
    #[prost(int64, tag = "4")]
    pub memory_limit: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Capabilities {
    #[prost(string, repeated, tag = "2")]
    pub drop: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Number {
    #[prost(int64, tag = "1")]
    pub value: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Security {
    #[prost(message, optional, tag = "1")]
    pub capabilities: Option<Capabilities>,
    #[prost(bool, tag = "2")]
    pub privileged: bool,
    #[prost(message, optional, tag = "3")]
    pub namespaces: Option<NamespaceOption>,
    #[prost(message, optional, tag = "5")]
    pub run_as_user: Option<Number>,
    #[prost(bool, tag = "7")]
    pub readonly_root: bool,
    #[prost(bool, tag = "11")]
    pub no_new_privileges: bool,
    #[prost(message, optional, tag = "12")]
    pub run_as_group: Option<Number>,
}

#[derive(Clone, PartialEq, Message)]
pub struct LinuxContainer {
    #[prost(message, optional, tag = "1")]
    pub resources: Option<Resources>,
    #[prost(message, optional, tag = "2")]
    pub security: Option<Security>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    pub image: Option<Image>,
    #[prost(string, repeated, tag = "3")]
    pub command: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    pub envs: Vec<Variable>,
    #[prost(map = "string, string", tag = "10")]
    pub annotations: HashMap<String, String>,
    #[prost(message, optional, tag = "15")]
    pub linux: Option<LinuxContainer>,
}

#[derive(Clone, PartialEq, Message)]
pub struct CreateContainer {
    #[prost(string, tag = "1")]
    pub sandbox: String,
    #[prost(message, optional, tag = "2")]
    pub config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    pub sandbox_config: Option<SandboxConfig>,
}

/// The answer of RunPodSandbox and CreateContainer, and the request of calls that need nothing but an id.
#[derive(Clone, PartialEq, Message)]
pub struct Id {
    #[prost(string, tag = "1")]
    pub id: String,
    /// In StopContainer the seconds that the container gets to end; in the status calls 1 for the verbose
    /// answer.
    #[prost(int64, tag = "2")]
    pub number: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct ExecSync {
    #[prost(string, tag = "1")]
    pub container: String,
    #[prost(string, repeated, tag = "2")]
    pub command: Vec<String>,
    #[prost(int64, tag = "3")]
    pub timeout: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Executed {
    #[prost(bytes = "vec", tag = "1")]
    pub stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    pub exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct UpdateContainer {
    #[prost(string, tag = "1")]
    pub container: String,
    #[prost(message, optional, tag = "2")]
    pub linux: Option<Resources>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerStatus {
    #[prost(int32, tag = "3")]
    pub state: i32,
    #[prost(int32, tag = "7")]
    pub exit_code: i32,
    #[prost(string, tag = "10")]
    pub reason: String,
    #[prost(string, tag = "11")]
    pub message: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerAnswer {
    #[prost(message, optional, tag = "1")]
    pub status: Option<ContainerStatus>,
    /// JSON texts by name. That of `info` has the pid.
    #[prost(map = "string, string", tag = "2")]
    pub info: HashMap<String, String>,
}

/// The answer of PodSandboxStatus, without the status itself.
#[derive(Clone, PartialEq, Message)]
pub struct SandboxAnswer {
    #[prost(map = "string, string", tag = "2")]
    pub info: HashMap<String, String>,
}

/// An answer without fields.
#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

/// A connection to a CRI socket, for one thread.
pub struct Client(grpc::Client);

impl Client {
    /// Connects to `socket` at the first call, and again after the other side was restarted.
    pub fn new(socket: &Path) -> Self {
        Self(grpc::Client::new(socket))
    }

    /// One call of the runtime service.
    ///
    /// # Errors
    /// With the engine's answer, the text that a kubelet would put into an event.
    pub fn call<Q, A>(&self, method: &str, request: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.0.call(&format!("/runtime.v1.RuntimeService/{method}"), request)
    }

    /// As [`Client::call`], of a call that the engine has to fulfil.
    pub fn done<Q, A>(&self, method: &str, request: Q) -> A
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.call(method, request).unwrap_or_else(|status| panic!("{method}: {}", status.message()))
    }
}
