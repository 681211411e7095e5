//! Names the driver to kubelet, which finds the socket in its folder of plugins
//! (pkg/apis/pluginregistration/v1/api.proto).

use http::Request;
use tonic::body::Body;

use super::{Agent, DRIVER};
use gpushare_rpc::{self as rpc, Answer, Calls};

/// The driver's name, socket and versions.
#[derive(Clone)]
pub struct Registration(PluginInfo);

impl Registration {
    /// The driver of this agent.
    pub fn of(agent: &Agent) -> Self {
        Self(PluginInfo {
            kind: "DRAPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: agent.socket().to_string_lossy().into_owned(),
            supported_versions: vec!["v1.DRAPlugin".to_owned()],
        })
    }
}

impl Calls for Registration {
    const NAME: &'static str = "pluginregistration.Registration";

    fn call(self, method: &str, request: Request<Body>) -> Answer {
        match method {
            "GetInfo" => rpc::answer(request, |_: Empty| async move { Ok(self.0) }),
            "NotifyRegistrationStatus" => rpc::answer(request, |status: RegistrationStatus| async move {
                match status.registered {
                    true => tracing::info!("kubelet knows the driver"),
                    false => tracing::error!(error = status.error, "kubelet refuses the driver"),
                }
                Ok(Empty {})
            }),
            _ => rpc::unknown(),
        }
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct PluginInfo {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, tag = "3")]
    endpoint: String,
    #[prost(string, repeated, tag = "4")]
    supported_versions: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RegistrationStatus {
    #[prost(bool, tag = "1")]
    registered: bool,
    #[prost(string, tag = "2")]
    error: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Empty {}
