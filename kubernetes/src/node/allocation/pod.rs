//! What each container of a pod was allocated, from what the API server and kubelet say.

use std::collections::{BTreeMap, BTreeSet};

use gpushare_inventory::Gpu;
use gpushare_quota::Admission;
use gpushare_request::{Allocated, AllocatedPart, Cores, kubernetes_quantity};
use k8s_openapi::api::core::v1::{
    Container, ContainerExtendedResourceRequest, Pod, PodExtendedResourceClaimStatus, PodSpec, PodStatus,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::ObjectMeta;

use super::claims::Claims;
use super::devices::{amounts, parts};
use super::own::own_parts;
use crate::asks;
use crate::node::podresources::{ContainerDevices, Devices};
use crate::resource::Resource;

/// What is known of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// All of it.
    All(Noted),
    /// Not all, for this reason.
    NotYet(String),
}

/// What is noted of a pod, by container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// What the containers got that got anything.
    pub containers: BTreeMap<String, Allocated>,
    /// Why what a container got cannot be held.
    pub refused: BTreeMap<String, String>,
}

/// `NAMESPACE/NAME`.
pub fn name(pod: &Pod) -> String {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", text(&pod.metadata.namespace), text(&pod.metadata.name))
}

/// The pod without what nobody asks for here: a node has many, and users may write much into them.
pub fn trimmed(pod: Pod) -> Pod {
    let trim = |container: Container| Container {
        name: container.name,
        resources: container.resources,
        ..Container::default()
    };
    let all = |containers: Vec<Container>| containers.into_iter().map(trim).collect::<Vec<_>>();
    let metadata = ObjectMeta {
        name: pod.metadata.name,
        namespace: pod.metadata.namespace,
        uid: pod.metadata.uid,
        labels: pod.metadata.labels,
        ..ObjectMeta::default()
    };
    let spec = pod.spec.map(|spec| PodSpec {
        containers: all(spec.containers),
        init_containers: spec.init_containers.map(all),
        resource_claims: spec.resource_claims,
        ..PodSpec::default()
    });
    let status = pod.status.map(|status| PodStatus {
        start_time: status.start_time,
        resource_claim_statuses: status.resource_claim_statuses,
        extended_resource_claim_status: status.extended_resource_claim_status,
        ..PodStatus::default()
    });
    Pod { metadata, spec, status }
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
    let named: BTreeSet<String> = spec.filter_map(|claim| claim_name(pod, &claim.name)?).collect();
    let extended = extended_claim(pod).map(|status| status.resource_claim_name.clone());
    named.into_iter().chain(extended).collect()
}

/// What each container was allocated.
pub fn found(pod: &Pod, devices: Result<&Devices, &String>, claims: &Claims, node: &OfNode<'_>) -> Found {
    read(pod, devices, claims, node).map_or_else(Found::NotYet, Found::All)
}

/// What is of the node.
#[derive(Clone, Copy, Debug)]
pub struct OfNode<'a> {
    /// Its GPUs.
    pub gpus: &'a [Gpu],
    /// The resources that its own device plugin serves.
    pub resources: &'a [Resource],
    /// What shares may have of a GPU.
    pub rules: &'a Admission,
}

fn read(
    pod: &Pod,
    devices: Result<&Devices, &String>,
    claims: &Claims,
    node: &OfNode<'_>,
) -> Result<Noted, String> {
    let mut by_claims = Vec::new();
    for container in containers(pod) {
        by_claims.push((container, of_claims(pod, container, claims)?));
    }
    let mut noted = Noted::default();
    for (container, parts) in &by_claims {
        let mut found = Vec::new();
        for (claim, number, part) in parts {
            // What several containers name they hold together, as far as it is an amount.
            let is_its = |(other, its, _): &(String, usize, AllocatedPart)| other == claim && its == number;
            let holders = by_claims.iter().filter(|(_, parts)| parts.iter().any(is_its)).count();
            let is_amount = part.memory.is_some() || part.cores.is_some();
            if is_amount && claims.is_shared(claim) {
                let why = format!(
                    "claim {claim} of another driver is shared by several pods, which cannot hold one share \
                     together; give each pod a claim of its own"
                );
                noted.refused.insert(container.name.clone(), why);
            }
            found.push(AllocatedPart { is_pods: is_amount && holders > 1, ..part.clone() });
        }
        let (given, refusal) = of_plugins(pod, container, devices, node)?;
        found.extend(given);
        if let Some(why) = refusal {
            noted.refused.insert(container.name.clone(), why);
        }
        if !found.is_empty() {
            noted.containers.insert(container.name.clone(), Allocated(merged(found)));
        }
    }
    Ok(noted)
}

/// What the claims that a container names give it: claim, number in the claim, and part. A claim that it
/// names twice counts once.
fn of_claims(
    pod: &Pod,
    container: &Container,
    claims: &Claims,
) -> Result<Vec<(String, usize, AllocatedPart)>, String> {
    let mut named: BTreeMap<String, Vec<Option<&str>>> = BTreeMap::new();
    for its in container.resources.iter().flat_map(|resources| resources.claims.iter().flatten()) {
        let name = claim_name(pod, &its.name).ok_or_else(|| format!("claim {} is not made yet", its.name))?;
        if let Some(name) = name {
            named.entry(name).or_default().push(its.request.as_deref());
        }
    }
    for mapping in mappings(pod, container) {
        let name = extended_claim(pod).map(|status| status.resource_claim_name.clone()).unwrap_or_default();
        named.entry(name).or_default().push(Some(&mapping.request_name));
    }
    let mut found = Vec::new();
    for (name, requests) in named {
        let parts = claims.parts(pod, &name, &requests)?;
        found.extend(parts.into_iter().map(|its| (name.clone(), its.number, its.part)));
    }
    Ok(found)
}

/// What device plugins gave the container, or why it cannot have that.
fn of_plugins(
    pod: &Pod,
    container: &Container,
    devices: Result<&Devices, &String>,
    node: &OfNode<'_>,
) -> Result<(Vec<AllocatedPart>, Option<String>), String> {
    let by_claim: BTreeSet<&str> = mappings(pod, container).map(|its| its.resource_name.as_str()).collect();
    let mut limits = Vec::new();
    for (name, number) in extended(container).filter(|(name, _)| !by_claim.contains(name)) {
        limits.push((name, number.ok_or_else(|| format!("the amount of {name} cannot be read"))?));
    }
    if limits.is_empty() {
        return Ok((Vec::new(), None));
    }
    // Before that, kubelet may still list the pod that had its name before.
    if pod.status.as_ref().is_none_or(|status| status.start_time.is_none()) {
        return Err("kubelet has not admitted it".to_owned());
    }
    let devices = devices?;
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let its = devices.of(namespace, name, &container.name).ok_or("kubelet does not list it")?;
    let is_own =
        |its: &&&ContainerDevices| node.resources.iter().any(|known| known.name == its.resource_name);
    let (own, others): (Vec<&ContainerDevices>, Vec<_>) = its.iter().partition(is_own);
    let mut given = Vec::new();
    for its in others {
        given.extend(parts(its, devices, node.gpus)?);
    }
    let counted = amounts(limits.iter().copied(), &given, node.gpus);
    given.extend(counted);
    match own_parts(&own, &asks::of(pod, container, node.resources), node) {
        Ok(parts) => {
            given.extend(parts);
            Ok((given, None))
        }
        Err(why) => Ok((given, Some(why))),
    }
}

/// All containers that kubelet gives devices to. Ephemeral ones get none.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.as_ref();
    let init = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
    init.chain(spec.into_iter().flat_map(|spec| &spec.containers))
}

/// The extended resources of a container: a domain that is not Kubernetes' own, and a number, `None` if it
/// cannot be read.
fn extended(container: &Container) -> impl Iterator<Item = (&str, Option<u64>)> + Clone {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    let all = limits.into_iter().flatten().filter_map(|(name, Quantity(number))| {
        let (domain, _) = name.split_once('/')?;
        let is_own = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
        (!is_own).then(|| (name.as_str(), kubernetes_quantity(number)))
    });
    all.filter(|(_, number)| *number != Some(0))
}

/// The claim that the pod knows by this name: `None` if it is not made yet, `Some(None)` if the pod needs
/// none.
fn claim_name(pod: &Pod, name: &str) -> Option<Option<String>> {
    let spec = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    let direct = spec.into_iter().flatten().find(|claim| claim.name == name)?;
    if direct.resource_claim_name.is_some() {
        return Some(direct.resource_claim_name.clone());
    }
    let made = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
    let made = made.into_iter().flatten().find(|status| status.name == name)?;
    Some(made.resource_claim_name.clone())
}

fn extended_claim(pod: &Pod) -> Option<&PodExtendedResourceClaimStatus> {
    pod.status.as_ref()?.extended_resource_claim_status.as_ref()
}

/// Which extended resources of the container are requests of the pod's claim for them.
fn mappings<'a>(
    pod: &'a Pod,
    container: &'a Container,
) -> impl Iterator<Item = &'a ContainerExtendedResourceRequest> {
    let all = extended_claim(pod).into_iter().flat_map(|status| &status.request_mappings);
    all.filter(|its| its.container_name == container.name)
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
    use std::sync::LazyLock;

    use gpushare_inventory::DeviceMemory;
    use serde_json::{Value, json};

    use super::*;
    use crate::node::allotment::tests::gpu;
    use crate::node::device_plugin::offer::id;
    use crate::resource::{System, Unit};

    const GIB: u64 = 1 << 30;

    static RULES: LazyLock<Admission> = LazyLock::new(Admission::default);

    /// Two GPUs of 80 GiB.
    pub fn gpus() -> Vec<Gpu> {
        vec![gpu(1), gpu(2)]
    }

    /// A node whose device plugin serves nothing.
    fn node(gpus: &[Gpu]) -> OfNode<'_> {
        OfNode { gpus, resources: &[], rules: &RULES }
    }

    fn pod(spec: Value, status: Value) -> Pod {
        let metadata = json!({"name": "pod", "namespace": "team", "uid": "uid-of-pod"});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).unwrap()
    }

    fn started() -> Value {
        json!({"startTime": "2026-11-23T00:00:00Z"})
    }

    fn with_limits(limits: Value) -> Value {
        json!({"containers": [{"name": "main", "resources": {"limits": limits}}, {"name": "thief"}]})
    }

    fn all(found: Found) -> BTreeMap<String, Allocated> {
        match found {
            Found::All(noted) => noted.containers,
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
        let pod = pod(with_limits(json!({"nvidia.com/gpu": "1", "cpu": "2"})), started());
        let found = all(found(&pod, Ok(&devices), &Claims::default(), &node(&gpus)));
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
        assert!(is_waiting(&found(&new, Ok(&empty), &claims, &node(&gpus))), "no device yet");
        assert!(is_waiting(&found(&new, Ok(&Devices::default()), &claims, &node(&gpus))), "no such pod");
        assert!(is_waiting(&found(&new, Err(&none), &claims, &node(&gpus))));
        let id = gpus[1].uuid.to_string();
        let earlier = Devices::told(&[("main", "nvidia.com/gpu", &[&id])], &[]);
        assert!(is_waiting(&found(&new, Ok(&earlier), &claims, &node(&gpus))), "of a pod before it");
        let unread = pod(with_limits(json!({"nvidia.com/gpu": "1e99"})), started());
        assert!(has_devices(&unread) && is_waiting(&found(&unread, Ok(&earlier), &claims, &node(&gpus))));
        let started = pod(limits(), started());
        assert!(is_waiting(&found(&started, Ok(&Devices::default()), &claims, &node(&gpus))));
        assert!(all(found(&started, Ok(&empty), &claims, &node(&gpus))).is_empty(), "it got none");
        // What asks for nothing needs no answer.
        let thief = pod(with_limits(json!({"cpu": "2", "hugepages-2Mi": "2Mi"})), json!({}));
        assert!(!has_devices(&thief) && has_devices(&new));
        assert!(all(found(&thief, Err(&none), &claims, &node(&gpus))).is_empty());
    }

    #[test]
    fn amounts_count_beside_devices_that_kubelet_lists() {
        let gpus = gpus();
        let slot = format!("{}-3", gpus[0].uuid);
        let devices = Devices::told(&[("main", "nvidia.com/gpu", &[&slot])], &[]);
        let limits = json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000});
        let found =
            all(found(&pod(with_limits(limits), started()), Ok(&devices), &Claims::default(), &node(&gpus)));
        let memory: Vec<_> = found["main"].0.iter().map(|part| part.memory).collect();
        assert_eq!(memory, [None, Some(DeviceMemory::from_bytes(3000 << 20))]);
    }

    /// A claim of another driver with 30 GiB of the first GPU, 20 GiB of the second and a network card, for
    /// these pods.
    fn claims_for(pods: &[&str]) -> Claims {
        let gpus = gpus();
        let consumed = |gpu: usize, memory: &str| {
            json!({"request": format!("r{gpu}"), "driver": "gpu.nvidia.com", "pool": "node-a",
                "device": format!("gpu-{gpu}"), "consumedCapacity": {"memory": memory}})
        };
        let nic = json!({"request": "nic", "driver": "gpu.nvidia.com", "pool": "node-a", "device": "eth0"});
        let results = json!([consumed(0, "30Gi"), consumed(1, "20Gi"), nic]);
        let pods: Vec<Value> =
            pods.iter().map(|uid| json!({"resource": "pods", "name": uid, "uid": uid})).collect();
        let status = json!({"allocation": {"devices": {"results": results}}, "reservedFor": pods});
        let device = |gpu: usize| {
            json!({"name": format!("gpu-{gpu}"),
                "attributes": {"uuid": {"string": gpus[gpu].uuid.to_string()}}})
        };
        let pool = json!({"name": "node-a", "generation": 1, "resourceSliceCount": 1});
        Claims::told(
            &json!({"metadata": {"name": "made", "namespace": "team"}, "spec": {}, "status": status}),
            &json!({"metadata": {}, "spec": {"driver": "gpu.nvidia.com", "pool": pool, "nodeName": "node-a",
                "devices": [device(0), device(1), {"name": "eth0"}]}}),
        )
    }

    /// A container for each of `requests`; null names the whole claim.
    fn naming(requests: &[Value]) -> Pod {
        let container = |(number, request): (usize, &Value)| {
            let claim = match request {
                Value::Null => json!({"name": "both"}),
                request => json!({"name": "both", "request": request}),
            };
            // The same claim under another name is the same.
            let again = json!({"name": "again", "request": request.as_str().unwrap_or("r0")});
            json!({"name": format!("c{number}"), "resources": {"claims": [claim, again]}})
        };
        let containers: Vec<Value> = requests.iter().enumerate().map(container).collect();
        let spec = json!({"containers": containers, "resourceClaims": [
            {"name": "both", "resourceClaimTemplateName": "template"},
            {"name": "again", "resourceClaimName": "made"}]});
        pod(spec, json!({"resourceClaimStatuses": [{"name": "both", "resourceClaimName": "made"}]}))
    }

    #[test]
    fn claims_of_other_drivers_give_what_their_status_says() {
        let gpus = gpus();
        let devices = Devices::default();
        let read = |requests: &[Value]| {
            let found =
                all(found(&naming(requests), Ok(&devices), &claims_for(&["uid-of-pod"]), &node(&gpus)));
            let part = |part: &AllocatedPart| {
                (part.gpu, part.memory.map(|memory| memory.bytes() / GIB), part.is_pods)
            };
            found.values().map(|its| its.0.iter().map(part).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        let (first, second) = (Some(gpus[0].uuid), Some(gpus[1].uuid));
        assert_eq!(read(&[Value::Null]), [[(first, Some(30), false), (second, Some(20), false)]], "once");
        assert_eq!(read(&[json!("r0")]), [[(first, Some(30), false)]]);
        assert_eq!(
            read(&[json!("r0"), json!("r0")]),
            [[(first, Some(30), true)], [(first, Some(30), true)]],
            "together"
        );
    }

    #[test]
    fn a_claim_counts_for_its_one_pod_when_it_is_allocated_and_shown() {
        let gpus = gpus();
        let devices = Devices::default();
        let read = |claims: &Claims| found(&naming(&[Value::Null]), Ok(&devices), claims, &node(&gpus));
        assert!(is_waiting(&read(&claims_for(&[]))), "not reserved");
        assert!(is_waiting(&read(&claims_for(&["another"]))), "another pod's");
        assert!(is_waiting(&read(&Claims::default())), "not known");
        let pool = json!({"name": "node-a", "generation": 1, "resourceSliceCount": 1});
        let unshown = Claims::told(
            &serde_json::to_value(claims_for(&["uid-of-pod"]).claim("made")).unwrap(),
            &json!({"metadata": {}, "spec": {"driver": "gpu.nvidia.com", "pool": pool}}),
        );
        assert!(is_waiting(&read(&unshown)), "its driver is away");
        match read(&claims_for(&["uid-of-pod", "another"])) {
            Found::All(noted) => assert!(noted.refused["c0"].contains("shared by several pods"), "{noted:?}"),
            Found::NotYet(why) => panic!("{why}"),
        }
    }

    #[test]
    fn what_the_nodes_own_plugin_gave_is_memory_and_compute_of_one_gpu() {
        let (gpus, started) = (gpus(), started());
        let memory = Unit::Memory(256 << 20);
        let resource = |name: &str, unit| Resource { name: name.to_owned(), unit, system: System::Own };
        let resources =
            [resource("gpushare.io/gpu-memory", memory), resource("gpushare.io/gpu-core", Unit::Percent)];
        let node = OfNode { gpus: &gpus, resources: &resources, ..node(&gpus) };
        let limits = json!({"gpushare.io/gpu-memory": "16", "gpushare.io/gpu-core": "30"});
        let pod = pod(with_limits(limits), started);
        let ids = |gpu: usize, count: u64| -> Vec<String> {
            (0..count).map(|number| id(gpus[gpu].uuid, number)).collect()
        };
        let told = |cores_of: usize| {
            let (memory, cores) = (ids(0, 16), ids(cores_of, 30));
            let text = |ids: &'_ [String]| -> Vec<String> { ids.to_vec() };
            let (memory, cores) = (text(&memory), text(&cores));
            let memory: Vec<&str> = memory.iter().map(String::as_str).collect();
            let cores: Vec<&str> = cores.iter().map(String::as_str).collect();
            let devices =
                Devices::of_main(&[("gpushare.io/gpu-memory", &memory), ("gpushare.io/gpu-core", &cores)]);
            match found(&pod, Ok(&devices), &Claims::default(), &node) {
                Found::All(noted) => noted,
                Found::NotYet(why) => panic!("not yet: {why}"),
            }
        };
        let noted = told(0);
        let Allocated(parts) = &noted.containers["main"];
        assert_eq!((parts.len(), parts[0].gpu), (1, Some(gpus[0].uuid)));
        assert_eq!(
            (parts[0].memory, parts[0].cores),
            (Some(DeviceMemory::from_bytes(4 * GIB)), Cores::new(30))
        );
        assert!(noted.refused.is_empty());
        assert!(told(1).refused["main"].contains("of another GPU than"), "{:?}", told(1).refused);
    }

    #[test]
    fn parts_of_a_gpus_memory_are_of_what_one_share_may_have() {
        let gpus = gpus();
        let rules = Admission { reserve: DeviceMemory::from_bytes(2 * GIB), ..Admission::default() };
        let resource = |name: &str, unit| Resource { name: name.to_owned(), unit, system: System::Hami };
        let resources = [
            resource("nvidia.com/gpu", Unit::Slot(10)),
            resource("nvidia.com/gpumem-percentage", Unit::MemoryPercent),
        ];
        let node = OfNode { gpus: &gpus, resources: &resources, rules: &rules };
        let slot = id(gpus[0].uuid, 3);
        let devices = Devices::of_main(&[("nvidia.com/gpu", &[&slot])]);
        for (limits, want) in [
            (json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"}), 39 * GIB),
            (json!({"nvidia.com/gpu": "1"}), 78 * GIB),
        ] {
            let pod = pod(with_limits(limits), started());
            let found = all(found(&pod, Ok(&devices), &Claims::default(), &node));
            assert_eq!(found["main"].0[0].memory, Some(DeviceMemory::from_bytes(want)));
        }
    }
}
