//! Answers kubelet's calls for one resource.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
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

use super::messages::{
    Allocate, Allocated, ContainerAllocated, ContainerIds, ContainerPreferred, Device, Empty, Listed,
    NumaNode, Options, Preferred, PreferredAnswer, Topology,
};
use super::offer::{Offer, OfferedGpu, gpu_of, id};
use crate::asks::{Asking, Compute, Terms, percent, unsplit};
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
        let number = numbers.iter().copied().find(|number| is_even(&units(ids), *number));
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

/// How many of the devices are of each GPU.
fn units(ids: &[String]) -> BTreeMap<GpuUuid, u64> {
    let mut units = BTreeMap::new();
    ids.iter().filter_map(|id| gpu_of(id)).for_each(|gpu| *units.entry(gpu).or_default() += 1);
    units
}

/// Whether these are in equal parts, but for a remainder, on so many GPUs.
fn is_even(units: &BTreeMap<GpuUuid, u64>, of: u64) -> bool {
    let count: u64 = units.values().sum();
    units.len() as u64 == of && units.values().all(|its| *its <= count.div_ceil(of))
}

/// How the devices of a container may lie on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spread {
    /// In equal parts, but for a remainder, on so many.
    Even(u64),
    /// In any way: they may be memory beside whole GPUs, which the runtime leaves unread there. What is written
    /// of them is no more of any GPU than kubelet counts, for a container that gets no whole GPUs.
    BesideWholes,
    /// On several, by a label of the pod that nothing checks.
    Unchecked,
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

/// What a container with these ids gets, and of which GPUs.
fn allocated(
    ids: &[String],
    resource: &Resource,
    offer: &Offer,
    spread: Spread,
) -> Result<(Vec<GpuUuid>, ContainerAllocated), String> {
    let (name, count) = (&resource.name, ids.len() as u64);
    if let Some(id) = ids.iter().find(|id| gpu_of(id).is_none()) {
        return Err(format!("{id:?} is no device of {name}"));
    }
    let counts = units(ids);
    let gpus: Vec<GpuUuid> = counts.keys().copied().collect();
    let Some(first) = gpus.first() else { return Err(format!("no device of {name} is named")) };
    let compute = match resource.unit {
        Unit::Percent => Some(percent(resource, count)?),
        _ => None,
    };
    let of = match spread {
        Spread::Even(of) => of,
        Spread::BesideWholes => counts.len() as u64,
        Spread::Unchecked => {
            return Err(unsplit(name));
        }
    };
    if !is_even(&counts, of) && spread != Spread::BesideWholes {
        return Err(not_together(resource, count, of));
    }
    for gpu in &gpus {
        if !offer.gpu(*gpu).is_some_and(|offered| offered.is_open) {
            return Err(format!("GPU {gpu} gives no new share: it is cordoned or out of service"));
        }
    }
    let offered = offer.gpu(*first).ok_or_else(|| format!("GPU {first} is not known"))?;
    let list = gpus.iter().map(GpuUuid::to_string).collect::<Vec<_>>().join(",");
    let mut annotations = HashMap::new();
    let mut allocate =
        |name: &str, value: String| annotations.insert(format!("alloc.gpushare.io/{name}"), value);
    match resource.unit {
        Unit::Memory(bytes) => {
            let each = match spread {
                Spread::BesideWholes => counts.values().min().copied().unwrap_or(0) * of,
                _ => count,
            };
            let bytes = bytes.saturating_mul(each) / of;
            if bytes > offered.per_share.bytes() && spread != Spread::BesideWholes {
                let most = offered.per_share;
                return Err(format!(
                    "{count} of {name} are more than one container can have of a GPU ({most}); ask for less"
                ));
            }
            allocate("devices", list);
            allocate("memory", format!("{}MiB", bytes >> 20));
        }
        Unit::Replica(parts) => {
            if count > 1 {
                return Err(format!(
                    "{count} of {name}: several replicas are not one larger share: ask for 1"
                ));
            }
            allocate("devices", list);
            allocate("memory", format!("{}MiB", (offered.per_share.bytes() / u64::from(parts.max(1))) >> 20));
        }
        // How much of each stands in the pod, and what kubelet gave is noted with it.
        Unit::Slot(_) => drop(allocate("devices", list)),
        Unit::Percent => match compute.and_then(|compute| compute.percent) {
            None => drop(allocate("whole-devices", list)),
            Some(percent) => {
                // By its pod's label it may be of several GPUs together.
                let percent = match compute {
                    Some(Compute { gpus: 1, .. }) => u64::from(percent) / of,
                    _ => percent.into(),
                };
                if percent == 0 {
                    return Err(format!(
                        "{count} of {name} are less than 1 % of each of {of} GPUs: ask for more"
                    ));
                }
                // Under a key of its own: the runtime refuses memory of one GPU beside compute of another.
                allocate("cores-devices", list);
                allocate("cores", percent.to_string());
            }
        },
        Unit::MemoryPercent => return Err(format!("{name} has no devices")),
        Unit::Gpus => {
            return Err(format!("{name} tells how many GPUs the node has; it is not to be asked for"));
        }
    }
    if let Some(system) = words(resource) {
        allocate("words", system.to_owned());
    }
    Ok((gpus, ContainerAllocated { annotations }))
}

/// The system whose words programs in the container read. One of a container's resources names it.
fn words(resource: &Resource) -> Option<&'static str> {
    match (resource.system, resource.unit) {
        (System::Aliyun, Unit::Memory(_)) => Some("aliyun"),
        (System::Hami, Unit::Slot(_)) => Some("hami"),
        (System::Volcano, Unit::Slot(_)) => Some("hami"),
        _ => None,
    }
}

fn not_together(resource: &Resource, count: u64, of: u64) -> String {
    let name = &resource.name;
    match of {
        1 => format!(
            "{count} of {name} are left on this node, but not on one GPU: ask for less, or wait until another pod ends; a pod with a \
             resource claim stays pending in such a case"
        ),
        _ => format!(
            "{count} of {name} are {} each of {of} GPUs, and not so many GPUs have that free: wait until another pod ends",
            count.div_ceil(of)
        ),
    }
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
    fn what_is_allocated_is_told_to_the_runtime_or_refused_in_words() {
        let mut offer = offer(&[0, 1]);
        let granule = memory(256);
        let (gpus, answer) = allocated(&ids(1, 3..35), &granule, &offer, Spread::Even(1)).unwrap();
        let gpu = GpuUuid::from_bytes([1; 16]);
        assert_eq!(gpus, [gpu]);
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "8192MiB");
        assert_eq!(answer.annotations["alloc.gpushare.io/devices"], gpu.to_string());
        let percent = Resource { unit: Unit::Percent, ..granule.clone() };
        let (_, answer) = allocated(&ids(0, 0..30), &percent, &offer, Spread::Even(1)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/cores"], "30");
        assert_eq!(
            answer.annotations["alloc.gpushare.io/cores-devices"],
            GpuUuid::from_bytes([0; 16]).to_string()
        );
        assert_eq!(answer.annotations.len(), 2);
        let aliyun = Resource { system: System::Aliyun, ..memory(1024) };
        let (_, answer) = allocated(&ids(1, 0..8), &aliyun, &offer, Spread::Even(1)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "8192MiB");
        assert_eq!(answer.annotations["alloc.gpushare.io/words"], "aliyun");
        let vcuda = Resource { system: System::GpuManager, ..percent.clone() };
        let (gpus, answer) =
            allocated(&[ids(0, 0..100), ids(1, 0..100)].concat(), &vcuda, &offer, Spread::Even(2)).unwrap();
        let both = gpus.iter().map(GpuUuid::to_string).collect::<Vec<_>>().join(",");
        assert_eq!(answer.annotations, [("alloc.gpushare.io/whole-devices".to_owned(), both.clone())].into());
        let slot = Resource { unit: Unit::Slot(10), system: System::Hami, ..granule.clone() };
        let (_, answer) =
            allocated(&[ids(0, 3..4), ids(1, 0..1)].concat(), &slot, &offer, Spread::Even(2)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/devices"], both);
        let replica = Resource { unit: Unit::Replica(3), system: System::Nvidia, ..granule.clone() };
        let (_, answer) = allocated(&ids(1, 2..3), &replica, &offer, Spread::Even(1)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "27306MiB");
        let spread = [ids(0, 0..16), ids(1, 0..16)].concat();
        let (_, answer) = allocated(&spread, &granule, &offer, Spread::Even(2)).unwrap();
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "4096MiB", "of each");
        for (ids, resource, of, want) in [
            (Vec::new(), &granule, 1, "no device of"),
            (vec!["x".to_owned()], &granule, 1, "is no device of"),
            ([ids(0, 0..2), ids(1, 0..1)].concat(), &granule, 1, "not on one GPU"),
            ([ids(0, 0..20), ids(1, 0..12)].concat(), &granule, 2, "16 each of 2 GPUs"),
            (ids(7, 0..1), &granule, 1, "cordoned or out of service"),
            (ids(0, 0..81), &aliyun, 1, "more than one container can have of a GPU (80 GiB)"),
            (ids(0, 0..101), &percent, 1, "at most 100 %"),
            ([ids(0, 0..100), ids(1, 0..50)].concat(), &vcuda, 2, "100, 200"),
            ([ids(0, 0..99), ids(1, 0..1)].concat(), &vcuda, 1, "not on one GPU"),
            (ids(0, 0..200), &vcuda, 2, "100 each of 2 GPUs"),
            (ids(0, 0..2), &slot, 2, "1 each of 2 GPUs"),
            (ids(0, 0..2), &replica, 1, "ask for 1"),
            (ids(0, 0..7), &Resource { system: System::Qgpu, ..percent.clone() }, 1, "in steps of 5"),
        ] {
            let told = allocated(&ids, resource, &offer, Spread::Even(of)).unwrap_err();
            assert!(told.contains(want), "{want}: {told}");
        }
        let spread = [ids(0, 0..20), ids(1, 0..12)].concat();
        let (gpus, answer) = allocated(&spread, &granule, &offer, Spread::BesideWholes).unwrap();
        let both = gpus.iter().map(GpuUuid::to_string).collect::<Vec<_>>().join(",");
        // It is written all the same, in case that it is another container's: no more than it is of any GPU.
        assert_eq!(answer.annotations["alloc.gpushare.io/devices"], both);
        assert_eq!(answer.annotations["alloc.gpushare.io/memory"], "3072MiB");
        assert!(allocated(&ids(0, 0..1), &granule, &offer, Spread::BesideWholes).is_ok());
        let told = allocated(&spread, &aliyun, &offer, Spread::Unchecked).unwrap_err();
        assert!(told.contains("request.kubelet"), "{told}");
        offer = Offer::default();
        assert!(allocated(&ids(0, 0..1), &granule, &offer, Spread::Even(1)).is_err());
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
