//! Answers kubelet's calls for one resource.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpushare_inventory::GpuUuid;
use gpushare_placement::Part;
use gpushare_quota::Placement;
use gpushare_request::KubeletPolicy;
use gpushare_rpc::{self as rpc, Answer, Calls};
use http::Request;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;

use super::allocated::{Spread, allocated, is_even, units};
use super::messages::{
    Allocate, Allocated, ContainerIds, ContainerPreferred, Device, Empty, Listed, NumaNode, Options,
    Preferred, PreferredAnswer, Topology,
};
use super::offer::{Offer, OfferedGpu, gpu_of, id};
use crate::asks::{Asking, Terms, percent};
use crate::node::Agent;
use crate::node::podresources::Devices;
use crate::resource::{Counted, Resource, System, Unit};

/// How long after one resource of a container was allocated the next one of it is: kubelet allocates one
/// container at a time.
const TOGETHER: Duration = Duration::from_secs(2);

/// How long may be looked for what to advise: kubelet admits no other pod meanwhile.
const ADVICE: Duration = Duration::from_millis(500);

/// The last allocation: which resource, of which GPU. A container's memory and compute are two resources,
/// each with calls of its own; without this its compute might be another GPU's.
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
            let count = u64::try_from(request.allocation_size).unwrap_or(0);
            let known = self.known(count).await;
            let offer = Arc::clone(&self.offered.borrow());
            let chosen = self.agent.placements.chosen(&self.resource, count).unwrap_or_default();
            let advice = Advice {
                // What a scheduler chose for the pod comes first, then the GPU of the container's other
                // resource.
                first: chosen.iter().filter_map(|index| offer.at(*index)).chain(beside).collect(),
                suiting: self.suiting(count, known.as_ref()).await,
                each: count.div_ceil(self.gpus(count, known.as_ref())),
                placement,
            };
            container_responses.push(ContainerIds { device_ids: advice.preferred(request) });
        }
        PreferredAnswer { container_responses }
    }

    /// The GPUs that have free what the container will ask for of the other resource.
    async fn suiting(&self, count: u64, known: Option<&Asking>) -> BTreeSet<GpuUuid> {
        let offer = Arc::clone(&self.offered.borrow());
        let is_other =
            |other: &&Resource| other.name != self.resource.name && other.counted() == Counted::ByKubelet;
        let others: Vec<&Resource> = self.agent.resources.iter().filter(is_other).collect();
        let given = match others.is_empty() {
            true => None,
            false => {
                let asked = timeout(ADVICE, Devices::asked(&self.agent.options.kubelet_dir)).await;
                asked.ok().and_then(Result::ok)
            }
        };
        let Some(given) = given else { return offer.gpus().map(|(uuid, _)| uuid).collect() };
        let gpus = self.gpus(count, known);
        let has_room = |gpu: &OfferedGpu, uuid: GpuUuid, other: &Resource| {
            let all = gpu.count(other);
            let used = given.given(&other.name).filter(|id| gpu_of(id) == Some(uuid)).count() as u64;
            let wanted = match known {
                Some(known) => known.amounts.get(&other.name).copied().unwrap_or(0).div_ceil(gpus),
                // Where the pod is not known: as much of it as of this one.
                None => all.saturating_mul(count) / gpu.count(&self.resource).max(1),
            };
            all.saturating_sub(used) >= wanted
        };
        let suits = |gpu: &OfferedGpu, uuid| others.iter().all(|other| has_room(gpu, uuid, other));
        offer.gpus().filter(|(uuid, gpu)| suits(gpu, *uuid)).map(|(uuid, _)| uuid).collect()
    }

    /// All that the container asks for, as its pod says. kubelet may have heard of the pod a moment before.
    async fn known(&self, count: u64) -> Option<Asking> {
        for _ in 0..10 {
            if let Some(asking) = self.agent.placements.waiting(&self.resource, count).into_iter().next() {
                return Some(asking);
            }
            sleep(ADVICE / 20).await;
        }
        None
    }

    /// Of how many GPUs a container has so many of this resource, as far as the pod or the number tells.
    fn gpus(&self, count: u64, known: Option<&Asking>) -> u64 {
        let terms = Terms::of_given(&self.agent.resources);
        let share = known.and_then(|asking| terms.share(&asking.amounts, asking.gpus).ok());
        match (share, self.resource.unit) {
            (Some(share), _) => u64::from(share.gpus),
            (None, Unit::Slot(_)) => count,
            (None, Unit::Percent) => percent(&self.resource, count).map_or(1, |compute| compute.gpus.into()),
            (None, _) => 1,
        }
        .max(1)
    }

    fn allocate(&self, asked: &Allocate) -> Result<Allocated, Status> {
        let offer = Arc::clone(&self.offered.borrow());
        let mut container_responses = Vec::new();
        for request in &asked.container_requests {
            let count = request.device_ids.len() as u64;
            let spread = self.spread(&request.device_ids);
            let (gpus, answer) =
                allocated(&request.device_ids, &self.resource, &offer, spread).map_err(|why| {
                    tracing::warn!(resource = self.resource.name, why, "not allocated");
                    Status::failed_precondition(why)
                })?;
            if let [gpu] = gpus[..] {
                self.paired.note(&self.resource, gpu);
            }
            let mut indexes: Vec<u32> = gpus.iter().filter_map(|gpu| Some(offer.gpu(*gpu)?.index)).collect();
            indexes.sort_unstable();
            self.agent.placements.allocated(&self.resource, count, &indexes);
            container_responses.push(answer);
        }
        Ok(Allocated { container_responses })
    }

    /// How the devices may lie on GPUs. kubelet names no pod: any container that waits for as many may get
    /// them.
    fn spread(&self, ids: &[String]) -> Spread {
        let count = ids.len() as u64;
        let waiting = self.agent.placements.waiting(&self.resource, count);
        let terms = Terms::of_given(&self.agent.resources);
        let is_beside_wholes = |asking: &Asking| {
            let share = terms.share(&asking.amounts, asking.gpus);
            self.resource.unit.is_of_memory() && share.is_ok_and(|share| share.part == Part::Whole)
        };
        let numbers: Vec<u64> = waiting.iter().map(|asking| self.gpus(count, Some(asking))).collect();
        let units = units(ids);
        let number = numbers.iter().copied().find(|number| is_even(&units, *number));
        match number.or(numbers.first().copied()) {
            // Only the runtime knows whose they are, by what kubelet tells of the pod.
            Some(2..)
                if self.resource.system == System::Aliyun
                    && self.agent.config.request.kubelet != KubeletPolicy::Refuse =>
            {
                Spread::Unchecked
            }
            _ if waiting.iter().any(is_beside_wholes) => Spread::BesideWholes,
            number => Spread::Even(number.unwrap_or_else(|| self.gpus(count, None))),
        }
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

/// What is known when kubelet asks for advice.
struct Advice {
    /// The GPUs that come first.
    first: Vec<GpuUuid>,
    /// Those that have free what else the container asks for.
    suiting: BTreeSet<GpuUuid>,
    /// How many devices of each GPU it gets.
    each: u64,
    placement: Placement,
}

impl Advice {
    /// Ids of as few GPUs as can be: those of which they must be, those that come first, then others as the
    /// node places, of the suiting ones first.
    fn preferred(&self, request: &ContainerPreferred) -> Vec<String> {
        let size = usize::try_from(request.allocation_size).unwrap_or(0);
        let each = usize::try_from(self.each).unwrap_or(size).max(1);
        let mut of_gpu: BTreeMap<GpuUuid, Vec<&String>> = BTreeMap::new();
        for id in &request.available_device_ids {
            if let Some(gpu) = gpu_of(id) {
                of_gpu.entry(gpu).or_default().push(id);
            }
        }
        let must = &request.must_include_device_ids;
        let fitting = |gpu: &GpuUuid| of_gpu.get(gpu).is_some_and(|ids| ids.len() >= each);
        let mut others: Vec<(&GpuUuid, usize)> =
            of_gpu.iter().map(|(gpu, ids)| (gpu, ids.len())).filter(|(gpu, _)| fitting(gpu)).collect();
        others.sort_by_key(|(gpu, left)| {
            let left = match self.placement {
                Placement::Binpack => *left,
                Placement::Spread => usize::MAX - left,
            };
            (!self.suiting.contains(gpu), left)
        });
        let mut order: Vec<GpuUuid> = must.iter().filter_map(|id| gpu_of(id)).collect();
        order.extend(self.first.iter().filter(|gpu| fitting(gpu)));
        order.extend(others.into_iter().map(|(gpu, _)| gpu));
        let mut seen = BTreeSet::new();
        order.retain(|gpu| seen.insert(*gpu));
        let of = |gpu: &GpuUuid| of_gpu.get(gpu).into_iter().flatten().take(each).copied();
        let first = order.iter().take(size.div_ceil(each)).flat_map(of);
        // Where no GPU has so many, kubelet still wants as many: Allocate refuses them, in words.
        let rest = of_gpu.values().flatten().copied();
        let mut taken: HashSet<&String> = must.iter().collect();
        let more: Vec<&String> = first.chain(rest).filter(|id| taken.insert(id)).collect();
        must.iter().chain(more).take(size.max(must.len())).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::offer::tests::{ids, memory};
    use super::*;

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
            let suiting = [gpu(0), gpu(1), gpu(2)].into();
            let first = beside.into_iter().collect();
            let each = u64::try_from(size).unwrap();
            let told = Advice { first, suiting, each, placement }.preferred(&request);
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
            let (first, each, placement) = (Vec::new(), u64::try_from(size).unwrap(), Placement::Binpack);
            let told = Advice { first, suiting: suits, each, placement }.preferred(&request);
            assert!(told.iter().all(|id| gpu_of(id) == Some(gpu(want))), "{size} {suiting:?}: {told:?}");
        }
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
