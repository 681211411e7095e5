//! Answers kubelet's calls for one resource.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpushare_inventory::GpuUuid;
use gpushare_quota::Placement;
use gpushare_rpc::{self as rpc, Answer, Calls};
use http::Request;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;

use super::asking::Amounts;
use super::messages::{
    Allocate, Allocated, ContainerAllocated, ContainerIds, ContainerPreferred, Device, Empty, Listed,
    NumaNode, Options, Preferred, PreferredAnswer, Topology,
};
use super::offer::{Offer, OfferedGpu, gpu_of, id};
use super::resource::{Resource, System, Unit};
use crate::node::podresources::Devices;
use crate::node::{Agent, DRIVER};

/// How long after one resource of a container was allocated the next one of it is: kubelet allocates one
/// container at a time.
const TOGETHER: Duration = Duration::from_secs(2);

/// How long may be looked for what to advise: kubelet admits no other pod meanwhile.
const ADVICE: Duration = Duration::from_millis(500);

/// The last allocation: which resource, of which GPU. A container's memory and compute are two resources, each
/// with calls of its own; without this its compute might be another GPU's.
#[derive(Clone, Default)]
pub struct Paired(Arc<Mutex<Option<(Instant, String, GpuUuid)>>>);

impl Paired {
    /// The GPU of which another resource was just allocated.
    fn beside(&self, resource: &Resource) -> Option<GpuUuid> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let its = last.as_ref().filter(|(at, name, _)| at.elapsed() < TOGETHER && *name != resource.name);
        its.map(|(.., gpu)| *gpu)
    }

    fn note(&self, resource: &Resource, gpu: GpuUuid) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_second =
            last.as_ref().is_some_and(|(at, name, _)| at.elapsed() < TOGETHER && *name != resource.name);
        // The second of two ends the pair.
        *last = (!is_second).then(|| (Instant::now(), resource.name.clone(), gpu));
    }
}

/// The plugin of one resource.
#[derive(Clone)]
pub struct Plugin {
    agent: Arc<Agent>,
    resource: Resource,
    offered: watch::Receiver<Arc<Offer>>,
    paired: Paired,
    /// How many lists kubelet follows.
    followed: Arc<AtomicUsize>,
}

/// One list that kubelet follows, until it is dropped.
struct Following(Arc<AtomicUsize>);

impl Following {
    fn of(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Plugin {
    /// The plugin of this resource of the node.
    pub fn new(
        agent: Arc<Agent>,
        resource: Resource,
        offered: watch::Receiver<Arc<Offer>>,
        paired: Paired,
    ) -> Self {
        Self { agent, resource, offered, paired, followed: Arc::default() }
    }

    /// Whether kubelet follows a list of the devices. One that has dropped the plugin, as for another one of
    /// the same name that has gone since, follows none.
    pub fn is_followed(&self) -> bool {
        self.followed.load(Ordering::Relaxed) > 0
    }

    /// The list of devices, and again whenever it changes.
    fn lists(self) -> ReceiverStream<Result<Listed, Status>> {
        let (sender, lists) = mpsc::channel(1);
        let following = Following::of(&self.followed);
        let Self { resource, mut offered, .. } = self;
        tokio::spawn(async move {
            let _following = following;
            loop {
                let listed = listed(&offered.borrow_and_update(), &resource);
                if sender.send(Ok(listed)).await.is_err() {
                    return;
                }
                tokio::select! {
                    changed = offered.changed() => if changed.is_err() { return },
                    () = sender.closed() => return,
                }
            }
        });
        ReceiverStream::new(lists)
    }

    async fn preferred(&self, asked: Preferred) -> PreferredAnswer {
        let beside = self.paired.beside(&self.resource);
        let placement = self.agent.config.quota.placement;
        let mut container_responses = Vec::new();
        for request in &asked.container_requests {
            let suits = self.suiting(request.allocation_size).await;
            container_responses
                .push(ContainerIds { device_ids: preferred(request, beside, &suits, placement) });
        }
        PreferredAnswer { container_responses }
    }

    /// The GPUs that have free what the container will ask for of the other resource.
    async fn suiting(&self, size: i32) -> BTreeSet<GpuUuid> {
        let offer = Arc::clone(&self.offered.borrow());
        let others: Vec<&Resource> =
            self.agent.resources.iter().filter(|other| other.name != self.resource.name).collect();
        let given = match others.is_empty() {
            true => None,
            false => {
                let asked = timeout(ADVICE, Devices::asked(&self.agent.options.kubelet_dir)).await;
                asked.ok().and_then(Result::ok)
            }
        };
        let Some(given) = given else { return offer.gpus().map(|(uuid, _)| uuid).collect() };
        let count = u64::try_from(size).unwrap_or(0);
        let known = self.known(count).await;
        let has_room = |gpu: &OfferedGpu, uuid: GpuUuid, other: &Resource| {
            let all = gpu.count(other);
            let used = given.given(&other.name).filter(|id| gpu_of(id) == Some(uuid)).count() as u64;
            let wanted = match &known {
                Some(amounts) => amounts.get(&other.name).copied().unwrap_or(0),
                // Where the pod is not known: as much of it as of this one.
                None => all.saturating_mul(count) / gpu.count(&self.resource).max(1),
            };
            all.saturating_sub(used) >= wanted
        };
        let suits = |gpu: &OfferedGpu, uuid| others.iter().all(|other| has_room(gpu, uuid, other));
        offer.gpus().filter(|(uuid, gpu)| suits(gpu, *uuid)).map(|(uuid, _)| uuid).collect()
    }

    /// All that the container asks for, as its pod says. kubelet may have heard of the pod a moment before.
    async fn known(&self, count: u64) -> Option<Amounts> {
        for _ in 0..10 {
            if let Some(amounts) = self.agent.asking.beside(&self.resource, count) {
                return Some(amounts);
            }
            sleep(ADVICE / 20).await;
        }
        None
    }

    fn allocate(&self, asked: &Allocate) -> Result<Allocated, Status> {
        let offer = Arc::clone(&self.offered.borrow());
        let mut container_responses = Vec::new();
        for request in &asked.container_requests {
            let (gpu, answer) = allocated(&request.device_ids, &self.resource, &offer).map_err(|why| {
                tracing::warn!(resource = self.resource.name, why, "not allocated");
                Status::failed_precondition(why)
            })?;
            self.paired.note(&self.resource, gpu);
            container_responses.push(answer);
        }
        Ok(Allocated { container_responses })
    }
}

impl Calls for Plugin {
    const NAME: &'static str = "v1beta1.DevicePlugin";

    fn call(self, method: &str, request: Request<Body>) -> Answer {
        match method {
            "GetDevicePluginOptions" => rpc::answer(request, |_: Empty| async move {
                Ok(Options { pre_start_required: false, get_preferred_allocation_available: true })
            }),
            "ListAndWatch" => rpc::answers(request, |_: Empty| self.lists()),
            "GetPreferredAllocation" => {
                rpc::answer(request, |asked: Preferred| async move { Ok(self.preferred(asked).await) })
            }
            "Allocate" => rpc::answer(request, |asked: Allocate| async move { self.allocate(&asked) }),
            "PreStartContainer" => rpc::answer(request, |_: ContainerIds| async move { Ok(Empty {}) }),
            _ => rpc::unknown(),
        }
    }
}

/// All devices of the resource.
fn listed(offer: &Offer, resource: &Resource) -> Listed {
    let devices = offer.gpus().flat_map(|(uuid, gpu)| {
        let health = if gpu.is_open { "Healthy" } else { "Unhealthy" };
        let topology = gpu.numa_node.map(|node| Topology { nodes: vec![NumaNode { id: node.into() }] });
        (0..gpu.count(resource)).map(move |number| Device {
            id: id(uuid, number),
            health: health.to_owned(),
            topology: topology.clone(),
        })
    });
    Listed { devices: devices.collect() }
}

/// Ids of one GPU, where one has so many: that of which they must be, else `beside`, else as the node places,
/// of the `suiting` ones first.
fn preferred(
    request: &ContainerPreferred,
    beside: Option<GpuUuid>,
    suiting: &BTreeSet<GpuUuid>,
    placement: Placement,
) -> Vec<String> {
    let size = usize::try_from(request.allocation_size).unwrap_or(0);
    let mut of_gpu: BTreeMap<GpuUuid, Vec<&String>> = BTreeMap::new();
    for id in &request.available_device_ids {
        if let Some(gpu) = gpu_of(id) {
            of_gpu.entry(gpu).or_default().push(id);
        }
    }
    let must = &request.must_include_device_ids;
    let named = must.first().and_then(|id| gpu_of(id));
    let fits = |gpu: &GpuUuid| of_gpu.get(gpu).is_some_and(|ids| ids.len() >= size);
    let by_placement = || {
        let fitting = of_gpu.iter().filter(|(_, ids)| ids.len() >= size);
        let worse = |gpu: &GpuUuid| !suiting.contains(gpu);
        let best = match placement {
            Placement::Binpack => fitting.min_by_key(|(gpu, ids)| (worse(gpu), ids.len())),
            Placement::Spread => fitting.max_by_key(|(gpu, ids)| (!worse(gpu), ids.len())),
        };
        best.map(|(gpu, _)| *gpu)
    };
    let chosen = named.or(beside.filter(fits)).or_else(by_placement);
    let first = chosen.and_then(|gpu| of_gpu.get(&gpu)).into_iter().flatten();
    // Where no GPU has so many, kubelet still wants as many: Allocate refuses them, in words.
    let rest = of_gpu.iter().filter(|(gpu, _)| Some(**gpu) != chosen).flat_map(|(_, ids)| ids);
    let taken: HashSet<&String> = must.iter().collect();
    let more = first.chain(rest).copied().filter(|id| !taken.contains(id));
    must.iter().chain(more).take(size.max(must.len())).cloned().collect()
}

/// What a container with these ids gets, and of which GPU.
fn allocated(
    ids: &[String],
    resource: &Resource,
    offer: &Offer,
) -> Result<(GpuUuid, ContainerAllocated), String> {
    let name = &resource.name;
    let first = ids.first().ok_or_else(|| format!("no device of {name} is named"))?;
    let gpu = gpu_of(first).ok_or_else(|| format!("{first:?} is no device of {name}"))?;
    if let Some(other) = ids.iter().find(|id| gpu_of(id) != Some(gpu)) {
        return Err(format!(
            "{} of {name} are left on this node, but not on one GPU ({first} and {other}): ask for less, or wait until another pod \
             ends; a pod with a resource claim stays pending in such a case",
            ids.len()
        ));
    }
    let offered = offer.gpu(gpu).filter(|offered| offered.is_open);
    let offered =
        offered.ok_or_else(|| format!("GPU {gpu} gives no new share: it is cordoned or out of service"))?;
    let count = ids.len() as u64;
    let mut annotations = HashMap::new();
    let mut allocate =
        |name: &str, value: String| annotations.insert(format!("alloc.gpushare.io/{name}"), value);
    match resource.unit {
        Unit::Memory(unit) => {
            let bytes = unit.bytes().saturating_mul(count);
            if bytes > offered.per_share.bytes() {
                let most = offered.per_share;
                return Err(format!(
                    "{count} of {name} are more than one container can have of a GPU ({most}); ask for less"
                ));
            }
            allocate("devices", gpu.to_string());
            allocate("memory", format!("{}MiB", bytes >> 20));
        }
        Unit::Percent if resource.system == System::GpuManager && count >= 100 => {
            return Err(format!(
                "{count} of {name} ask for whole GPUs, which this plugin does not give: ask for at most 99, or for {DRIVER} by a claim"
            ));
        }
        Unit::Percent if resource.system == System::Qgpu && !count.is_multiple_of(5) => {
            return Err(format!("{count} of {name}: qGPU counts compute in steps of 5"));
        }
        Unit::Percent if count > 100 => {
            return Err(format!("{count} of {name}: one container has at most 100 % of a GPU"));
        }
        Unit::Percent => {
            // Under a key of its own: the runtime refuses memory of one GPU beside compute of another.
            allocate("cores-devices", gpu.to_string());
            allocate("cores", count.to_string());
        }
    }
    Ok((gpu, ContainerAllocated { annotations }))
}

#[cfg(test)]
mod tests {
    use super::super::offer::tests::{memory, offer};
    use super::*;

    fn ids(gpu: u8, numbers: std::ops::Range<u64>) -> Vec<String> {
        numbers.map(|number| id(GpuUuid::from_bytes([gpu; 16]), number)).collect()
    }

    #[test]
    fn what_kubelet_is_advised_is_of_one_gpu_where_one_has_so_many() {
        let available = [ids(0, 0..10), ids(1, 0..4), ids(2, 0..6)].concat();
        let gpu = |number: u8| GpuUuid::from_bytes([number; 16]);
        for (size, must, beside, placement, want) in [
            (3, vec![], None, Placement::Binpack, Some(1)),
            (5, vec![], None, Placement::Binpack, Some(2)),
            (3, vec![], None, Placement::Spread, Some(0)),
            (3, vec![], Some(gpu(2)), Placement::Binpack, Some(2)),
            (7, vec![], Some(gpu(2)), Placement::Binpack, Some(0)),
            (3, ids(2, 4..5), Some(gpu(0)), Placement::Binpack, Some(2)),
            (11, vec![], None, Placement::Binpack, None),
        ] {
            let request = ContainerPreferred {
                available_device_ids: available.clone(),
                must_include_device_ids: must.clone(),
                allocation_size: size,
            };
            let told = preferred(&request, beside, &[gpu(0), gpu(1), gpu(2)].into(), placement);
            assert_eq!(told.len(), usize::try_from(size).unwrap());
            assert!(must.iter().all(|id| told.contains(id)));
            let mut gpus: Vec<_> = told.iter().filter_map(|id| gpu_of(id)).collect();
            gpus.dedup();
            assert_eq!(
                gpus == [gpu(want.unwrap_or(9))],
                want.is_some(),
                "{size} {must:?} {placement:?}: {told:?}"
            );
        }
    }

    #[test]
    fn a_gpu_that_lacks_what_else_is_asked_for_is_advised_last() {
        let available = [ids(0, 0..10), ids(1, 0..4), ids(2, 0..6)].concat();
        let gpu = |number: u8| GpuUuid::from_bytes([number; 16]);
        for (size, suiting, want) in
            [(3, vec![0, 1, 2], 1), (3, vec![0, 2], 2), (3, vec![0], 0), (5, vec![1], 2), (3, vec![], 1)]
        {
            let request = ContainerPreferred {
                available_device_ids: available.clone(),
                must_include_device_ids: Vec::new(),
                allocation_size: size,
            };
            let suits = suiting.iter().map(|number| gpu(*number)).collect();
            let told = preferred(&request, None, &suits, Placement::Binpack);
            assert!(told.iter().all(|id| gpu_of(id) == Some(gpu(want))), "{size} {suiting:?}: {told:?}");
        }
    }

    #[test]
    fn what_is_allocated_is_told_to_the_runtime_or_refused_in_words() {
        let mut offer = offer(&[0, 1]);
        let granule = memory(256);
        let (gpu, answer) = allocated(&ids(1, 3..35), &granule, &offer).unwrap();
        assert_eq!(gpu, GpuUuid::from_bytes([1; 16]));
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "8192MiB");
        assert_eq!(answer.annotations["alloc.gpushare.io/devices"], gpu.to_string());
        let percent = Resource { unit: Unit::Percent, ..granule.clone() };
        let (_, answer) = allocated(&ids(0, 0..30), &percent, &offer).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/cores"], "30");
        assert_eq!(
            answer.annotations["alloc.gpushare.io/cores-devices"],
            GpuUuid::from_bytes([0; 16]).to_string()
        );
        assert_eq!(answer.annotations.len(), 2);
        let aliyun = Resource { system: System::Aliyun, ..memory(1024) };
        let (_, answer) = allocated(&ids(1, 0..8), &aliyun, &offer).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "8192MiB");
        for (ids, resource, want) in [
            (Vec::new(), &granule, "no device of"),
            (vec!["x".to_owned()], &granule, "is no device of"),
            ([ids(0, 0..2), ids(1, 0..1)].concat(), &granule, "not on one GPU"),
            (ids(7, 0..1), &granule, "cordoned or out of service"),
            (ids(0, 0..81), &aliyun, "more than one container can have of a GPU (80 GiB)"),
            (ids(0, 0..101), &percent, "at most 100 %"),
            (
                ids(0, 0..100),
                &Resource { system: System::GpuManager, ..percent.clone() },
                "ask for whole GPUs",
            ),
            (ids(0, 0..7), &Resource { system: System::Qgpu, ..percent.clone() }, "in steps of 5"),
        ] {
            let told = allocated(&ids, resource, &offer).unwrap_err();
            assert!(told.contains(want), "{want}: {told}");
        }
        offer = Offer::default();
        assert!(allocated(&ids(0, 0..1), &granule, &offer).is_err());
    }

    #[test]
    fn the_second_resource_of_a_container_is_of_the_gpu_of_the_first() {
        let (memory, percent) = (memory(256), Resource { name: "gpushare.io/gpu-core".into(), ..memory(1) });
        let (paired, gpu) = (Paired::default(), GpuUuid::from_bytes([3; 16]));
        assert_eq!(paired.beside(&percent), None);
        paired.note(&memory, gpu);
        assert_eq!((paired.beside(&memory), paired.beside(&percent)), (None, Some(gpu)));
        paired.note(&percent, gpu);
        assert_eq!((paired.beside(&memory), paired.beside(&percent)), (None, None));
    }
}
