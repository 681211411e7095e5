//! kubelet's service PodResources, simulated: tells which devices of plugins the containers have.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use gpushare_rpc::{self as rpc, Answer, Calls};
use prost::Message;
use tokio::runtime::Builder;
use tonic::body::Body;

/// The service, until the process ends.
#[derive(Clone, Default)]
pub struct PodResources(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Ids by resource, by namespace, pod and container.
    given: BTreeMap<(String, String, String), BTreeMap<String, Vec<String>>>,
    allocatable: BTreeMap<String, Vec<String>>,
    is_silent: bool,
    asked: usize,
}

impl PodResources {
    /// Serves below kubelet's folder `root`.
    pub fn start(root: &Path) -> Self {
        let this = Self::default();
        let (socket, calls) =
            (root.join("pod-resources/kubelet.sock"), rpc::Services::default().with(this.clone()));
        thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
            runtime.block_on(rpc::serve(&socket, calls, std::future::pending()))
        });
        this
    }

    /// Admits a container of the pod `team/NAME`: it has these devices from now on.
    pub fn give(&self, pod: &str, container: &str, resource: &str, ids: &[&str]) {
        let key = ("team".to_owned(), pod.to_owned(), container.to_owned());
        let mut state = self.state();
        let given = state.given.entry(key).or_default();
        if !ids.is_empty() {
            given.insert(resource.to_owned(), ids.iter().map(ToString::to_string).collect());
        }
    }

    /// The ids of a resource that containers have.
    #[must_use]
    pub fn given(&self, resource: &str) -> Vec<String> {
        let state = self.state();
        state.given.values().filter_map(|its| its.get(resource)).flatten().cloned().collect()
    }

    /// Has forgotten all of a pod.
    pub fn forget(&self, pod: &str) {
        self.state().given.retain(|(_, its, _), _| its != pod);
    }

    /// The devices of a resource that there are.
    pub fn set_allocatable(&self, resource: &str, ids: &[String]) {
        self.state().allocatable.insert(resource.to_owned(), ids.to_vec());
    }

    /// Whether it takes calls without an answer.
    pub fn set_silent(&self, is_silent: bool) {
        self.state().is_silent = is_silent;
    }

    /// How often it was asked for pods.
    #[must_use]
    pub fn asked(&self) -> usize {
        self.state().asked
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nobody panics while it is locked")
    }

    fn pods(&self) -> Listed {
        let mut state = self.state();
        state.asked += 1;
        let mut pods: BTreeMap<(&str, &str), Vec<Container>> = BTreeMap::new();
        for ((namespace, pod, container), given) in &state.given {
            let container = Container { name: container.clone(), devices: devices(given) };
            pods.entry((namespace, pod)).or_default().push(container);
        }
        let pod = |((namespace, name), containers): ((&str, &str), Vec<Container>)| Pod {
            name: name.into(),
            namespace: namespace.into(),
            containers,
        };
        Listed { pods: pods.into_iter().map(pod).collect() }
    }
}

fn devices(by_resource: &BTreeMap<String, Vec<String>>) -> Vec<Devices> {
    let of =
        |(resource, ids): (&String, &Vec<String>)| Devices { resource: resource.clone(), ids: ids.clone() };
    by_resource.iter().map(of).collect()
}

impl Calls for PodResources {
    const NAME: &'static str = "v1.PodResourcesLister";

    fn call(self, method: &str, request: http::Request<Body>) -> Answer {
        if self.state().is_silent {
            return Box::pin(async {
                tokio::time::sleep(Duration::from_secs(60)).await;
                rpc::unknown().await
            });
        }
        match method {
            "List" => rpc::answer(request, |_: Nothing| async move { Ok(self.pods()) }),
            "GetAllocatableResources" => rpc::answer(request, |_: Nothing| async move {
                Ok(Allocatable { devices: devices(&self.state().allocatable) })
            }),
            _ => rpc::unknown(),
        }
    }
}

#[derive(Clone, PartialEq, Message)]
struct Nothing {}

#[derive(Clone, PartialEq, Message)]
struct Listed {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<Pod>,
}

#[derive(Clone, PartialEq, Message)]
struct Allocatable {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Devices>,
}

#[derive(Clone, PartialEq, Message)]
struct Pod {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<Container>,
}

#[derive(Clone, PartialEq, Message)]
struct Container {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    devices: Vec<Devices>,
}

#[derive(Clone, PartialEq, Message)]
struct Devices {
    #[prost(string, tag = "1")]
    resource: String,
    #[prost(string, repeated, tag = "2")]
    ids: Vec<String>,
}
