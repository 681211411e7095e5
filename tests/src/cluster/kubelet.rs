//! A simulated kubelet: finds the driver by its socket, calls it for claims, and hands CDI devices to an
//! engine, which puts them into bundles as the Container Device Interface says.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::podresources::PodResources;
use crate::bundle::Bundle;
use crate::grpc::Client;
use prost::Message;
use serde_json::Value;
use tonic::Status;

/// The node's name in the cluster.
pub const NODE: &str = "node-a";

/// kubelet, with its folder and that of CDI files.
#[derive(Clone)]
pub struct Kubelet {
    /// Its folder.
    pub root: PathBuf,
    /// The folder of CDI files.
    pub cdi: PathBuf,
    /// What its device plugins gave.
    pub devices: PodResources,
}

impl Kubelet {
    /// What the driver says of itself.
    pub fn driver(&self) -> Result<PluginInfo, Status> {
        let socket = self.root.join("plugins_registry/gpu.gpushare.io-reg.sock");
        let client = Client::new(&socket);
        let info = client.call("/pluginregistration.Registration/GetInfo", Empty {})?;
        let status = RegistrationStatus { registered: true, error: String::new() };
        let _: Empty = client.call("/pluginregistration.Registration/NotifyRegistrationStatus", status)?;
        Ok(info)
    }

    fn call<A: Message + Default + 'static>(&self, method: &str, name: &str, uid: &str) -> Result<A, Status> {
        let socket = self.root.join("plugins/gpu.gpushare.io/dra.sock");
        let claim = Claim { namespace: "team".into(), uid: uid.into(), name: name.into() };
        let path = format!("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{method}");
        Client::new(&socket).call(&path, Claims { claims: vec![claim] })
    }

    /// Has the claim prepared.
    ///
    /// # Errors
    /// With the text of the pod's event.
    pub fn prepare(&self, name: &str, uid: &str) -> Result<Vec<Device>, String> {
        let answer: Prepared =
            self.call("NodePrepareResources", name, uid).map_err(|status| status.to_string())?;
        let claim =
            answer.claims.into_iter().find(|(known, _)| known == uid).expect("each claim is answered").1;
        if claim.error.is_empty() { Ok(claim.devices) } else { Err(claim.error) }
    }

    /// Has the claim unprepared.
    ///
    /// # Errors
    /// As [`Kubelet::prepare`].
    pub fn unprepare(&self, name: &str, uid: &str) -> Result<(), String> {
        let answer: Unprepared =
            self.call("NodeUnprepareResources", name, uid).map_err(|status| status.to_string())?;
        let claim =
            answer.claims.into_iter().find(|(known, _)| known == uid).expect("each claim is answered").1;
        if claim.error.is_empty() { Ok(()) } else { Err(claim.error) }
    }

    /// Shows `look` the driver's reports of health until that says enough, or the driver ends: of each device
    /// its name, whether it is unknown (0), healthy (1) or not (2), and why.
    ///
    /// # Errors
    /// With the driver's answer.
    pub fn watch_health(
        &self,
        mut look: impl FnMut(Vec<(String, i32, String)>) -> bool,
    ) -> Result<(), Status> {
        let client = Client::new(&self.root.join("plugins/gpu.gpushare.io/dra.sock"));
        let path = "/v1alpha1.DRAResourceHealth/NodeWatchResources";
        client.watch(path, Empty {}, |report: HealthReport| {
            let told = |device: DeviceHealth| {
                let its = device.device.unwrap_or_default();
                assert_eq!(its.pool_name, NODE);
                assert!(device.last_updated_time > 0, "kubelet drops a report without a time");
                (its.device_name, device.health, device.message)
            };
            look(report.devices.into_iter().map(told).collect())
        })
    }

    /// The CDI files that are there.
    pub fn cdi_files(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.cdi).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    }

    /// The bundle of a container of the pod `pod` that gets these devices, as an engine with CDI writes it.
    /// `with_hooks`: also with the devices' hooks.
    pub fn bundle(&self, bundle: Bundle, pod: &str, devices: &[Device], with_hooks: bool) -> Bundle {
        let mut bundle = in_pod(bundle, pod, "team");
        for id in devices.iter().flat_map(|device| &device.cdi_device_ids) {
            let (kind, name) = id.split_once('=').expect("a qualified name");
            let (spec, device) = self.find(kind, name);
            for variable in
                device["containerEdits"]["env"].as_array().expect("a claim's device has a variable")
            {
                let variable = variable.as_str().expect("it is text");
                let (key, value) = variable.split_once('=').expect("it has a value");
                bundle = bundle.env(key, value);
            }
            for hook in
                spec["containerEdits"]["hooks"].as_array().into_iter().flatten().filter(|_| with_hooks)
            {
                let text = |key: &str| hook[key].as_str().expect("it is text");
                let args: Vec<&str> = hook["args"]
                    .as_array()
                    .expect("a list")
                    .iter()
                    .skip(1)
                    .filter_map(Value::as_str)
                    .collect();
                bundle = bundle.hook(text("hookName"), Path::new(text("path")), &args);
            }
        }
        bundle
    }

    fn find(&self, kind: &str, name: &str) -> (Value, Value) {
        let specs = self.cdi_files().into_iter().map(|path| fs::read(path).expect("root reads it"));
        let specs = specs.map(|text| serde_json::from_slice::<Value>(&text).expect("it is JSON"));
        let mut found = specs.filter(|spec| spec["kind"] == kind).filter_map(|spec| {
            let device = spec["devices"].as_array()?.iter().find(|device| device["name"] == name)?.clone();
            Some((spec, device))
        });
        found.next().unwrap_or_else(|| panic!("no CDI device {kind}={name}"))
    }
}

/// The container `main` of the pod `pod`, as containerd's CRI marks it.
pub fn in_pod(bundle: Bundle, pod: &str, namespace: &str) -> Bundle {
    bundle
        .annotation("io.kubernetes.cri.container-type", "container")
        .annotation("io.kubernetes.cri.container-name", "main")
        .annotation("io.kubernetes.cri.sandbox-id", pod)
        .annotation("io.kubernetes.cri.sandbox-name", pod)
        .annotation("io.kubernetes.cri.sandbox-namespace", namespace)
        .annotation("io.kubernetes.cri.sandbox-uid", &format!("uid-of-{pod}"))
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

/// The driver's name, socket and versions.
#[derive(Clone, PartialEq, Message)]
pub struct PluginInfo {
    /// `DRAPlugin`.
    #[prost(string, tag = "1")]
    pub kind: String,
    /// The driver's name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The socket on which it is called.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    /// The services that it offers, with their versions.
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct RegistrationStatus {
    #[prost(bool, tag = "1")]
    registered: bool,
    #[prost(string, tag = "2")]
    error: String,
}

#[derive(Clone, PartialEq, Message)]
struct Claims {
    #[prost(message, repeated, tag = "1")]
    claims: Vec<Claim>,
}

#[derive(Clone, PartialEq, Message)]
struct Claim {
    #[prost(string, tag = "1")]
    namespace: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Prepared {
    #[prost(map = "string, message", tag = "1")]
    claims: HashMap<String, PreparedClaim>,
}

#[derive(Clone, PartialEq, Message)]
struct PreparedClaim {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Device>,
    #[prost(string, tag = "2")]
    error: String,
}

/// A share that containers of the claim may get.
#[derive(Clone, PartialEq, Message)]
pub struct Device {
    /// The claim's requests that it is for.
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    /// The device's pool.
    #[prost(string, tag = "2")]
    pub pool_name: String,
    /// The device's name in the pool.
    #[prost(string, tag = "3")]
    pub device_name: String,
    /// Qualified names of its CDI devices.
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Unprepared {
    #[prost(map = "string, message", tag = "1")]
    claims: HashMap<String, UnpreparedClaim>,
}

#[derive(Clone, PartialEq, Message)]
struct UnpreparedClaim {
    #[prost(string, tag = "1")]
    error: String,
}

#[derive(Clone, PartialEq, Message)]
struct HealthReport {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<DeviceHealth>,
}

#[derive(Clone, PartialEq, Message)]
struct DeviceHealth {
    #[prost(message, optional, tag = "1")]
    device: Option<DeviceIdentifier>,
    #[prost(int32, tag = "2")]
    health: i32,
    #[prost(int64, tag = "3")]
    last_updated_time: i64,
    #[prost(string, tag = "5")]
    message: String,
}

#[derive(Clone, PartialEq, Message)]
struct DeviceIdentifier {
    #[prost(string, tag = "1")]
    pool_name: String,
    #[prost(string, tag = "2")]
    device_name: String,
}
