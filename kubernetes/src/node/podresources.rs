//! Asks kubelet what its device plugins gave to pods (pkg/kubelet/podresources, v1/api.proto). Names of
//! fields are the file's.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::timeout;

use gpushare_rpc as rpc;

/// Where kubelet answers, below its folder.
pub const SOCKET: &str = "pod-resources/kubelet.sock";
/// How long an answer may take. kubelet's own takes milliseconds.
const ANSWER: Duration = Duration::from_secs(3);

/// Devices by pod, container and resource, and all that there are.
#[derive(Clone, Debug, Default)]
pub struct Devices {
    pods: Vec<PodResources>,
    allocatable: Vec<ContainerDevices>,
}

/// Devices of one resource.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerDevices {
    #[prost(string, tag = "1")]
    pub resource_name: String,
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PodResources {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<ContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ContainerResources {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    devices: Vec<ContainerDevices>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
struct Listed {
    #[prost(message, repeated, tag = "1")]
    pod_resources: Vec<PodResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Allocatable {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<ContainerDevices>,
}

impl Devices {
    /// What kubelet says now.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn asked(kubelet: &Path) -> Result<Self> {
        let socket = kubelet.join(SOCKET);
        let asking = async {
            let mut client = rpc::client(&socket)?;
            let listed: Listed = rpc::call(&mut client, "/v1.PodResourcesLister/List", Nothing {}).await?;
            let all = "/v1.PodResourcesLister/GetAllocatableResources";
            // Without it, only what is counted in parts of a GPU is not known.
            let allocatable: Allocatable = rpc::call(&mut client, all, Nothing {}).await.unwrap_or_default();
            anyhow::Ok(Self { pods: listed.pod_resources, allocatable: allocatable.devices })
        };
        let told = timeout(ANSWER, asking).await.map_err(anyhow::Error::from).and_then(|told| told);
        told.with_context(|| format!("kubelet's PodResources does not answer on {}", socket.display()))
    }

    /// What a container has; `None` where kubelet lists no such pod, or two of them: one that ends and one that
    /// was made anew under its name, which its answer does not tell apart.
    pub fn of(&self, namespace: &str, pod: &str, container: &str) -> Option<Vec<&ContainerDevices>> {
        let mut its = self.pods.iter().filter(|known| known.namespace == namespace && known.name == pod);
        let (Some(pod), None) = (its.next(), its.next()) else { return None };
        let containers = pod.containers.iter().filter(|known| known.name == container);
        Some(containers.flat_map(|container| &container.devices).collect())
    }

    /// The ids of a resource that pods have.
    pub fn given(&self, resource: &str) -> impl Iterator<Item = &str> {
        let containers = self.pods.iter().flat_map(|pod| &pod.containers);
        let its = containers.flat_map(|container| &container.devices);
        let its = its.filter(move |devices| devices.resource_name == resource);
        its.flat_map(|devices| &devices.device_ids).map(String::as_str)
    }

    /// The ids of all healthy devices of a resource.
    pub fn allocatable(&self, resource: &str) -> impl Iterator<Item = &str> {
        let its = self.allocatable.iter().filter(move |known| known.resource_name == resource);
        its.flat_map(|known| &known.device_ids).map(String::as_str)
    }

    /// Kubelet's answer, as a test has it: all devices of the container `main` of the pod `team/pod`.
    #[cfg(test)]
    pub fn of_main(resources: &[(&str, &[&str])]) -> Self {
        let mut told = Self::told(&[("main", "", &[])], &[]);
        let devices = |(resource, ids): &(&str, &[&str])| ContainerDevices {
            resource_name: (*resource).into(),
            device_ids: ids.iter().map(ToString::to_string).collect(),
        };
        told.pods[0].containers[0].devices = resources.iter().map(devices).collect();
        told
    }

    /// Kubelet's answer, as a test has it: resource and ids by container of the pod `team/pod`.
    #[cfg(test)]
    pub fn told(pod: &[(&str, &str, &[&str])], allocatable: &[(&str, &[&str])]) -> Self {
        let devices = |(resource, ids): (&str, &[&str])| ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(ToString::to_string).collect(),
        };
        let container = |(name, resource, ids): &(&str, &str, &[&str])| ContainerResources {
            name: (*name).into(),
            devices: vec![devices((resource, ids))],
        };
        let containers = pod.iter().map(container).collect();
        Self {
            pods: vec![PodResources { name: "pod".into(), namespace: "team".into(), containers }],
            allocatable: allocatable.iter().copied().map(devices).collect(),
        }
    }
}
