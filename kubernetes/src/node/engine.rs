//! Asks the node's engine whether it applies CDI devices. One that does not starts a claim's containers
//! without a GPU and without a word.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use prost::Message;
use serde_json::Value;

use super::Agent;
use gpushare_rpc as rpc;

/// Where engines listen for kubelet. The first that exists is asked.
const SOCKETS: [&str; 3] =
    ["/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock"];
/// How long an engine may take for an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Why it is not known that the engine applies CDI devices.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No engine listens where engines do.
    #[error("no engine listens at {}; name its socket by --engine-socket", SOCKETS.join(" or "))]
    NoSocket,
    /// It did not answer.
    #[error(
        "the engine at {path} cannot be asked whether it applies CDI devices: {why}; where kubelet has another one, name its socket \
         by --engine-socket"
    )]
    Silent {
        /// The engine's socket.
        path: PathBuf,
        /// What gRPC said.
        why: String,
    },
    /// It is too old.
    #[error(
        "{engine} applies no CDI devices, so a pod with a claim would start without its GPU; update it to containerd 1.7 or later"
    )]
    TooOld {
        /// Name and version.
        engine: String,
    },
    /// kubelet has another one.
    #[error(
        "{asked} answers at {path}, and kubelet's engine is {kubelets}: name its socket by --engine-socket; where that is none of \
         containerd and CRI-O, and it applies CDI devices, call the agent with --assume-cdi"
    )]
    Another {
        /// Name of the engine that was asked.
        asked: String,
        /// Its socket.
        path: PathBuf,
        /// Name of kubelet's engine.
        kubelets: String,
    },
    /// The API server does not tell kubelet's engine.
    #[error("the API server does not tell which engine kubelet has: {0}")]
    Untold(String),
    /// Whether it applies them is not known.
    #[error(
        "it is not known whether {engine} applies CDI devices; without it a pod with a claim would start without its GPU: if it \
         does, call the agent with --assume-cdi"
    )]
    Unknown {
        /// Name and version.
        engine: String,
    },
    /// It is told not to.
    #[error(
        "{engine} is told to apply no CDI devices, so a pod with a claim would start without its GPU; set enable_cdi = true in its \
         settings of CRI, and restart it"
    )]
    TurnedOff {
        /// Name and version.
        engine: String,
    },
}

/// Asks the engine whose socket the agent was told, or else the one that is found. It must be the one that
/// kubelet names in the node's status.
///
/// # Errors
/// When it applies no CDI devices, or that cannot be found out.
pub async fn check(agent: &Agent) -> Result<(), EngineError> {
    // What kubelet has not told yet is asked for again the next time.
    let kubelets = match agent.engine.get() {
        Some(known) => Some(known.clone()),
        None => kubelets(agent).await?.inspect(|name| drop(agent.engine.set(name.clone()))),
    };
    let found = || SOCKETS.iter().map(Path::new).find(|path| path.exists());
    let path = agent.options.engine_socket.as_deref().or_else(found).ok_or(EngineError::NoSocket)?;
    let asked = tokio::time::timeout(ANSWER, ask(path)).await;
    let silent = |why: String| EngineError::Silent { path: path.to_owned(), why };
    let (version, status) = asked
        .map_err(|_| silent("no answer".to_owned()))?
        .map_err(|status| silent(status.message().to_owned()))?;
    match kubelets.filter(|kubelets| *kubelets != version.name) {
        Some(kubelets) => {
            let asked = version.name;
            Err(EngineError::Another { asked, path: path.to_owned(), kubelets })
        }
        None => judge(&version, &status),
    }
}

/// The name of kubelet's engine; `None` where kubelet has not told it yet.
async fn kubelets(agent: &Agent) -> Result<Option<String>, EngineError> {
    let node = Api::<Node>::all(agent.api.clone()).get(&agent.options.node_name).await;
    let node = node.map_err(|error| EngineError::Untold(error.to_string()))?;
    let version = node.status.and_then(|status| status.node_info).map(|info| info.container_runtime_version);
    Ok(version.and_then(|text| text.split_once("://").map(|(name, _)| name.to_owned())))
}

async fn ask(path: &Path) -> Result<(Version, Status), tonic::Status> {
    let mut client = rpc::client(path)?;
    let version = rpc::call(&mut client, "/runtime.v1.RuntimeService/Version", Empty {}).await?;
    let verbose = StatusRequest { verbose: true };
    let status = rpc::call(&mut client, "/runtime.v1.RuntimeService/Status", verbose).await?;
    Ok((version, status))
}

/// containerd 1.7 knows CDI devices of kubelet's if it is told to, and containerd 2 unless it is told not to.
/// Its settings stand in its status, in JSON. Every version of CRI-O with this interface applies them.
fn judge(version: &Version, status: &Status) -> Result<(), EngineError> {
    let engine = format!("{} {}", version.name, version.version);
    match version.name.as_str() {
        "containerd" => {}
        "cri-o" => return Ok(()),
        _ => return Err(EngineError::Unknown { engine }),
    }
    let mut parts = version.version.trim_start_matches('v').split('.');
    let mut number = || parts.next().and_then(|part| part.parse::<u32>().ok()).unwrap_or(0);
    let release = (number(), number());
    if release < (1, 7) {
        return Err(EngineError::TooOld { engine });
    }
    let settings = status.info.get("config").and_then(|text| serde_json::from_str::<Value>(text).ok());
    match settings.as_ref().and_then(|settings| settings["enableCDI"].as_bool()) {
        Some(true) => Ok(()),
        None if release >= (2, 0) => Ok(()),
        _ => Err(EngineError::TurnedOff { engine }),
    }
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
struct Version {
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, tag = "3")]
    version: String,
}

#[derive(Clone, PartialEq, Message)]
struct StatusRequest {
    #[prost(bool, tag = "1")]
    verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_applies_cdi_devices_by_its_version_and_settings() {
        let (on, off, none) = (r#"{"enableCDI":true}"#, r#"{"enableCDI":false}"#, "{}");
        for (name, version, config, want) in [
            ("containerd", "1.6.20~ds1", none, Some("update it")),
            ("containerd", "1.6.20~ds1", on, Some("update it")),
            ("containerd", "v1.7.24", none, Some("enable_cdi")),
            ("containerd", "1.7.24", off, Some("enable_cdi")),
            ("containerd", "1.7.24", on, None),
            ("containerd", "v2.0.0", none, None),
            ("containerd", "2.3.1", on, None),
            ("containerd", "2.3.1", off, Some("enable_cdi")),
            ("containerd", "2.3.1", "not JSON", None),
            ("containerd", "", none, Some("update it")),
            ("cri-o", "1.34.0", none, None),
            ("docker", "28.0.0", on, Some("--assume-cdi")),
            ("", "", on, Some("--assume-cdi")),
        ] {
            let version = Version { name: name.into(), version: version.into() };
            let info = HashMap::from([("config".to_owned(), config.to_owned())]);
            let told = judge(&version, &Status { info }).err().map(|error| error.to_string());
            assert_eq!(told.is_some(), want.is_some(), "{version:?} {config}: {told:?}");
            assert!(want.is_none_or(|want| told.unwrap().contains(want)), "{version:?} {config}");
        }
    }
}
