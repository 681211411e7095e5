//! kubelet's device manager, simulated: plugins register with it, and it calls them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use gpushare_rpc::{self as rpc, Answer, Calls};
use prost::Message;
use tokio::runtime::Builder;
use tonic::Status;
use tonic::body::Body;

use crate::command::eventually;
use crate::grpc::Client;

/// The device manager, until the process ends.
#[derive(Clone)]
pub struct DeviceManager {
    folder: PathBuf,
    registered: Arc<Mutex<HashMap<String, String>>>,
    stop: Arc<Mutex<Option<tokio::sync::oneshot::Sender<()>>>>,
}

impl DeviceManager {
    /// Listens below kubelet's folder `root`.
    pub fn start(root: &Path) -> Self {
        let folder = root.join("device-plugins");
        let this = Self { folder, registered: Arc::default(), stop: Arc::default() };
        this.listen();
        this
    }

    fn listen(&self) {
        let (socket, calls) = (self.folder.join("kubelet.sock"), rpc::Services::default().with(self.clone()));
        let (stop, stopped) = tokio::sync::oneshot::channel();
        *self.stop.lock().expect("nobody panics while it is locked") = Some(stop);
        let path = socket.clone();
        thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
            runtime.block_on(rpc::serve(&path, calls, async { drop(stopped.await) }))
        });
        assert!(eventually(Duration::from_secs(20), || socket.exists()), "it listens");
    }

    /// Starts anew, as kubelet does: all sockets of its folder go, and no plugin is known.
    pub fn restart(&self) {
        drop(self.stop.lock().expect("nobody panics while it is locked").take());
        for entry in std::fs::read_dir(&self.folder).expect("the folder is there").flatten() {
            std::fs::remove_file(entry.path()).expect("a socket can be removed");
        }
        self.known().clear();
        self.listen();
    }

    /// The socket of the plugin that registered the resource, once it has.
    pub fn plugin(&self, resource: &str) -> Option<Client> {
        self.known().get(resource).map(|endpoint| Client::new(&self.folder.join(endpoint)))
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.registered.lock().expect("nobody panics while it is locked")
    }

    /// The plugin's devices, by health.
    ///
    /// # Errors
    /// With the plugin's answer.
    pub fn devices(&self, resource: &str) -> Result<Vec<(String, String)>, Status> {
        let plugin = self.plugin(resource).ok_or_else(|| Status::not_found(resource))?;
        let mut found = Vec::new();
        plugin.watch("/v1beta1.DevicePlugin/ListAndWatch", Empty {}, |listed: Listed| {
            found = listed.devices.into_iter().map(|device| (device.id, device.health)).collect();
            true
        })?;
        Ok(found)
    }

    /// Allocates `count` of a resource as kubelet does: asks for advice, then allocates what was advised.
    ///
    /// # Errors
    /// With the text of the pod's event.
    pub fn allocate(&self, resource: &str, available: &[String], count: usize) -> Result<Allocated, Status> {
        let plugin = self.plugin(resource).ok_or_else(|| Status::not_found(resource))?;
        let asked = Preferred {
            container_requests: vec![ContainerPreferred {
                available: available.to_vec(),
                must_include: Vec::new(),
                size: i32::try_from(count).expect("it fits"),
            }],
        };
        let advised: Ids = plugin.call("/v1beta1.DevicePlugin/GetPreferredAllocation", asked)?;
        let allocate = Ids { containers: advised.containers };
        let ids = allocate.containers[0].ids.clone();
        let answer: AllocatedAll = plugin.call("/v1beta1.DevicePlugin/Allocate", allocate)?;
        let one = answer.containers.into_iter().next().expect("each container is answered");
        Ok(Allocated { ids, envs: one.envs, annotations: one.annotations })
    }
}

/// What a container gets.
#[derive(Clone, Debug)]
pub struct Allocated {
    /// Its devices.
    pub ids: Vec<String>,
    /// Its variables.
    pub envs: HashMap<String, String>,
    /// Its annotations.
    pub annotations: HashMap<String, String>,
}

impl Calls for DeviceManager {
    const NAME: &'static str = "v1beta1.Registration";

    fn call(self, method: &str, request: http::Request<Body>) -> Answer {
        match method {
            "Register" => rpc::answer(request, |told: Register| async move {
                if told.version != "v1beta1" || !told.endpoint.ends_with(".sock") {
                    return Err(Status::invalid_argument("kubelet takes no such plugin"));
                }
                self.known().insert(told.resource_name, told.endpoint);
                Ok(Empty {})
            }),
            _ => rpc::unknown(),
        }
    }
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
struct Register {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(string, tag = "2")]
    endpoint: String,
    #[prost(string, tag = "3")]
    resource_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Listed {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Device>,
}

#[derive(Clone, PartialEq, Message)]
struct Device {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    health: String,
}

#[derive(Clone, PartialEq, Message)]
struct Preferred {
    #[prost(message, repeated, tag = "1")]
    container_requests: Vec<ContainerPreferred>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerPreferred {
    #[prost(string, repeated, tag = "1")]
    available: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    must_include: Vec<String>,
    #[prost(int32, tag = "3")]
    size: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Ids {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<ContainerIds>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerIds {
    #[prost(string, repeated, tag = "1")]
    ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct AllocatedAll {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<AllocatedOne>,
}

#[derive(Clone, PartialEq, Message)]
struct AllocatedOne {
    #[prost(map = "string, string", tag = "1")]
    envs: HashMap<String, String>,
    #[prost(map = "string, string", tag = "4")]
    annotations: HashMap<String, String>,
}
