//! What each container of a pod was allocated, from what the API server and kubelet say.

use std::collections::{BTreeMap, BTreeSet};

use gpushare_inventory::Gpu;
use gpushare_request::{Allocated, AllocatedPart, Cores, kubernetes_quantity};
use k8s_openapi::api::core::v1::{Container, Pod, PodExtendedResourceClaimStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::claims::Claims;
use super::devices::{amounts, parts};
use crate::node::podresources::Devices;

/// What is known of a pod.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// All, by container.
    All(BTreeMap<String, Allocated>),
    /// Not all, for this reason.
    NotYet(String),
}

/// The UID by which the engine knows the pod. A pod that kubelet reads from a file has one of kubelet's, and
/// the API server has its mirror under another. Anybody may write such annotations: kubelet's has no hyphen,
/// and so is never the UID of a pod of the API server's.
pub fn uid(pod: &Pod) -> Option<String> {
    let mirrored = |key| pod.metadata.annotations.as_ref()?.get(key).cloned();
    let of_file = mirrored("kubernetes.io/config.mirror").and(mirrored("kubernetes.io/config.hash"));
    of_file.filter(|uid| !uid.contains('-')).or_else(|| pod.metadata.uid.clone())
}

/// `NAMESPACE/NAME`.
pub fn name(pod: &Pod) -> String {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", text(&pod.metadata.namespace), text(&pod.metadata.name))
}

/// Whether nothing has changed that says what it was allocated.
pub fn is_same(one: &Pod, other: &Pod) -> bool {
    let is_admitted = |pod: &Pod| pod.status.as_ref().is_some_and(|status| status.start_time.is_some());
    is_admitted(one) == is_admitted(other)
        && claims(one) == claims(other)
        && extended_claim(one) == extended_claim(other)
}

/// Whether a container of the pod has resources that a device plugin may give.
pub fn has_devices(pod: &Pod) -> bool {
    containers(pod).any(|container| extended(container).next().is_some())
}

/// The names of all claims of the pod, also of the one that the scheduler made for its extended resources.
pub fn claims(pod: &Pod) -> Vec<String> {
    let spec = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    let named: BTreeSet<String> = spec.filter_map(|claim| claim_name(pod, &claim.name)).collect();
    let extended = extended_claim(pod).map(|status| status.resource_claim_name.clone());
    named.into_iter().chain(extended).collect()
}

/// What each container was allocated.
pub fn found(pod: &Pod, devices: Result<&Devices, &String>, claims: &Claims, gpus: &[Gpu]) -> Found {
    let mut found = BTreeMap::new();
    for container in containers(pod) {
        match of_container(pod, container, devices, claims, gpus) {
            Ok(parts) if parts.is_empty() => {}
            Ok(parts) => drop(found.insert(container.name.clone(), Allocated(merged(parts)))),
            Err(why) => return Found::NotYet(why),
        }
    }
    Found::All(found)
}

fn of_container(
    pod: &Pod,
    container: &Container,
    devices: Result<&Devices, &String>,
    claims: &Claims,
    gpus: &[Gpu],
) -> Result<Vec<AllocatedPart>, String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let mut found = Vec::new();
    let named = container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
    for named in named {
        let name =
            claim_name(pod, &named.name).ok_or_else(|| format!("claim {} is not made yet", named.name))?;
        let is_pods = uses(pod, &named.name) > 1;
        let parts = claims.parts(namespace, &name, named.request.as_deref(), gpus)?;
        found.extend(parts.into_iter().map(|part| AllocatedPart { is_pods, ..part }));
    }
    let mut by_claim = BTreeSet::new();
    if let Some(status) = extended_claim(pod) {
        for mapping in status.request_mappings.iter().filter(|its| its.container_name == container.name) {
            by_claim.insert(mapping.resource_name.as_str());
            let request = Some(mapping.request_name.as_str());
            found.extend(claims.parts(namespace, &status.resource_claim_name, request, gpus)?);
        }
    }
    let mut of_plugins = extended(container).filter(|(name, _)| !by_claim.contains(name)).peekable();
    if of_plugins.peek().is_none() {
        return Ok(found);
    }
    let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
    let is_admitted = pod.status.as_ref().is_some_and(|status| status.start_time.is_some());
    let its = devices?.of(namespace, pod_name, &container.name);
    let its = its.filter(|its| is_admitted || !its.is_empty()).ok_or("kubelet has not admitted it")?;
    let given: Vec<AllocatedPart> =
        its.iter().flat_map(|its| parts(its, devices.unwrap_or(&Devices::default()), gpus)).collect();
    if let Some(count) = given.iter().map(|part| part.count).max() {
        found.extend(given);
        found.extend(amounts(of_plugins, count, gpus));
    }
    Ok(found)
}

/// All containers that kubelet gives devices to. Ephemeral ones get none.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.as_ref();
    let init = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
    init.chain(spec.into_iter().flat_map(|spec| &spec.containers))
}

/// How many containers of the pod name the claim that the pod knows by this name.
fn uses(pod: &Pod, name: &str) -> usize {
    let names = |container: &&Container| {
        let claims = container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
        claims.into_iter().any(|claim| claim.name == name)
    };
    containers(pod).filter(names).count()
}

/// The extended resources of a container: a domain that is not Kubernetes' own, and a whole number.
fn extended(container: &Container) -> impl Iterator<Item = (&str, u64)> + Clone {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    limits.into_iter().flatten().filter_map(|(name, Quantity(number))| {
        let (domain, _) = name.split_once('/')?;
        let is_own = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
        Some((name.as_str(), kubernetes_quantity(number).filter(|number| *number > 0 && !is_own)?))
    })
}

/// The claim that the pod knows by this name; `None` if it is not made yet.
fn claim_name(pod: &Pod, name: &str) -> Option<String> {
    let spec = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    let direct = spec.into_iter().flatten().find(|claim| claim.name == name)?;
    let made = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
    let made = made.into_iter().flatten().find(|status| status.name == name);
    direct.resource_claim_name.clone().or_else(|| made?.resource_claim_name.clone())
}

fn extended_claim(pod: &Pod) -> Option<&PodExtendedResourceClaimStatus> {
    pod.status.as_ref()?.extended_resource_claim_status.as_ref()
}

/// One part for each GPU: where several claims give parts of one, the container has their sum.
fn merged(parts: Vec<AllocatedPart>) -> Vec<AllocatedPart> {
    let mut merged: Vec<AllocatedPart> = Vec::new();
    for part in parts {
        match merged.iter_mut().find(|known| known.gpu.is_some() && known.gpu == part.gpu) {
            None => merged.push(part),
            Some(known) => {
                known.by = format!("{}, {}", known.by, part.by);
                known.memory = known.memory.zip(part.memory).map(|(one, other)| one.saturating_add(other));
                known.is_pods |= part.is_pods;
                known.cores = known.cores.zip(part.cores).map(|(one, other)| sum(one, other));
            }
        }
    }
    merged
}

fn sum(one: Cores, other: Cores) -> Cores {
    let percent = one.percent().saturating_add(other.percent());
    Cores::new(percent.min(Cores::ALL.percent())).unwrap_or(Cores::ALL)
}

#[cfg(test)]
pub mod tests {
    use gpushare_inventory::DeviceMemory;
    use serde_json::{Value, json};

    use super::*;
    use crate::node::allotment::tests::gpu;

    const GIB: u64 = 1 << 30;

    /// Two GPUs of 80 GiB.
    pub fn gpus() -> Vec<Gpu> {
        vec![gpu(1), gpu(2)]
    }

    fn pod(spec: Value, status: Value) -> Pod {
        let metadata = json!({"name": "pod", "namespace": "team", "uid": "uid-of-pod"});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).unwrap()
    }

    fn with_limits(limits: Value) -> Value {
        json!({"containers": [{"name": "main", "resources": {"limits": limits}}, {"name": "thief"}]})
    }

    fn all(found: Found) -> BTreeMap<String, Allocated> {
        match found {
            Found::All(containers) => containers,
            Found::NotYet(why) => panic!("not yet: {why}"),
        }
    }

    fn is_waiting(found: &Found) -> bool {
        matches!(found, Found::NotYet(_))
    }

    #[test]
    fn a_container_has_what_kubelet_lists_for_it_alone() {
        let gpus = gpus();
        let id = gpus[1].uuid.to_string();
        let devices = Devices::told(&[("main", "nvidia.com/gpu", &[&id])], &[("nvidia.com/gpu", &[&id])]);
        let pod = pod(with_limits(json!({"nvidia.com/gpu": "1", "cpu": "2"})), json!({}));
        let found = all(found(&pod, Ok(&devices), &Claims::default(), &gpus));
        assert_eq!(found.keys().collect::<Vec<_>>(), ["main"]);
        assert_eq!(found["main"].0.len(), 1);
        assert_eq!((found["main"].0[0].gpu, found["main"].0[0].memory), (Some(gpus[1].uuid), None));
    }

    #[test]
    fn a_pod_is_noted_when_kubelet_has_admitted_it() {
        let (gpus, claims) = (gpus(), Claims::default());
        let limits = || with_limits(json!({"nvidia.com/gpu": 1}));
        let empty = Devices::told(&[], &[]);
        let none = String::from("kubelet does not answer");
        let new = pod(limits(), json!({}));
        assert!(is_waiting(&found(&new, Ok(&empty), &claims, &gpus)), "no device yet");
        assert!(is_waiting(&found(&new, Ok(&Devices::default()), &claims, &gpus)), "no such pod");
        assert!(is_waiting(&found(&new, Err(&none), &claims, &gpus)));
        let started = pod(limits(), json!({"startTime": "2026-11-23T00:00:00Z"}));
        assert!(is_waiting(&found(&started, Ok(&Devices::default()), &claims, &gpus)));
        assert!(all(found(&started, Ok(&empty), &claims, &gpus)).is_empty(), "it got none");
        // What asks for nothing needs no answer.
        let thief = pod(with_limits(json!({"cpu": "2", "hugepages-2Mi": "2Mi"})), json!({}));
        assert!(!has_devices(&thief) && has_devices(&new));
        assert!(all(found(&thief, Err(&none), &claims, &gpus)).is_empty());
    }

    #[test]
    fn amounts_count_beside_devices_that_kubelet_lists() {
        let gpus = gpus();
        let slot = format!("{}-3", gpus[0].uuid);
        let devices = Devices::told(&[("main", "nvidia.com/gpu", &[&slot])], &[]);
        let limits = json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000});
        let found = all(found(&pod(with_limits(limits), json!({})), Ok(&devices), &Claims::default(), &gpus));
        let memory: Vec<_> = found["main"].0.iter().map(|part| part.memory).collect();
        assert_eq!(memory, [None, Some(DeviceMemory::from_bytes(3000 << 20))]);
    }

    #[test]
    fn a_pod_of_a_file_has_kubelets_uid() {
        let mut pod = pod(json!({"containers": []}), json!({}));
        assert_eq!(uid(&pod).as_deref(), Some("uid-of-pod"));
        let annotation = |key: &str, value: &str| (format!("kubernetes.io/config.{key}"), value.to_owned());
        pod.metadata.annotations = Some([annotation("hash", "abc")].into());
        assert_eq!(uid(&pod).as_deref(), Some("uid-of-pod"), "anybody may write it");
        for (hash, want) in [("abc", "abc"), ("0b5c1f6e-8e0f-4c7d-9a51-3f6f2b8f1a10", "uid-of-pod")] {
            pod.metadata.annotations = Some([annotation("hash", hash), annotation("mirror", hash)].into());
            assert_eq!(uid(&pod).as_deref(), Some(want));
        }
    }

    #[test]
    fn claims_of_other_drivers_give_what_their_status_says() {
        let gpus = gpus();
        let consumed = |gpu: usize, memory: &str| {
            json!({"request": format!("r{gpu}"), "driver": "gpu.nvidia.com", "pool": "node-a",
                "device": format!("gpu-{gpu}"), "consumedCapacity": {"memory": memory}})
        };
        let claims = Claims::told(
            &json!({"metadata": {"name": "made", "namespace": "team"}, "spec": {}, "status": {"allocation": {
                "devices": {"results": [consumed(0, "30Gi"), consumed(1, "20Gi"),
                    {"request": "nic", "driver": "nic.example.com", "pool": "node-a", "device": "eth0"}]}}}}),
            &json!({"metadata": {}, "spec": {"driver": "gpu.nvidia.com", "pool": {"name": "node-a",
                "generation": 1, "resourceSliceCount": 1}, "nodeName": "node-a", "devices": [
                {"name": "gpu-0", "attributes": {"uuid": {"string": gpus[0].uuid.to_string()}}},
                {"name": "gpu-1", "attributes": {"uuid": {"string": gpus[1].uuid.to_string()}}}]}}),
        );
        let spec = |requests: &[Value]| {
            let claim = |claim: &Value| json!({"name": "both", "request": claim});
            let container = |(number, named): (usize, &Value)| {
                let claims = [match named {
                    Value::Null => json!({"name": "both"}),
                    named => claim(named),
                }];
                json!({"name": format!("c{number}"), "resources": {"claims": claims}})
            };
            let containers: Vec<Value> = requests.iter().enumerate().map(container).collect();
            json!({"containers": containers,
                "resourceClaims": [{"name": "both", "resourceClaimTemplateName": "template"}]})
        };
        let made = json!({"resourceClaimStatuses": [{"name": "both", "resourceClaimName": "made"}]});
        let devices = Devices::default();
        let read = |requests: &[Value]| {
            let found = all(found(&pod(spec(requests), made.clone()), Ok(&devices), &claims, &gpus));
            let part = |part: &AllocatedPart| {
                (part.gpu, part.memory.map(|memory| memory.bytes() / GIB), part.is_pods)
            };
            found.values().map(|its| its.0.iter().map(part).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        let (first, second) = (Some(gpus[0].uuid), Some(gpus[1].uuid));
        assert_eq!(read(&[Value::Null]), [[(first, Some(30), false), (second, Some(20), false)]]);
        assert_eq!(read(&[json!("r1")]), [[(second, Some(20), false)]]);
        assert!(read(&[json!("nic")]).is_empty(), "no GPU");
        assert_eq!(
            read(&[json!("r0"), json!("r0")]),
            [[(first, Some(30), true)], [(first, Some(30), true)]],
            "together"
        );
        let unmade = pod(spec(&[Value::Null]), json!({}));
        assert!(is_waiting(&found(&unmade, Ok(&devices), &claims, &gpus)));
    }
}
