//! Leads from a request to a plan, in the same way for every mode that changes a container. A grant reads the
//! facts, reserves a lease, makes the plan, then applies it. The modes differ only in how they apply the
//! plan.

use std::path::Path;
use std::time::Duration;

use gpushare_inventory::{DeviceMemory, Faults, Gpu, GpuUuid, Node, NodeError, Totals};
use gpushare_quota::{
    Done, Enforcement, Grant, Holder, HolderError, Lease, LeaseKey, Member, Pod, Reason, Reservation,
    ReserveError, StateError, StateFolder, Store, StoreError, Swept,
};
use gpushare_region::path::DRIVER_FOLDER;
use gpushare_request::{
    Container, Devices, InterceptorPolicy, Mode, Request, RequestError, Scope, find_gpu, read,
};
use serde_json::Value;

use crate::allocation::{AllocationError, look_up_allocation};
use crate::bundle::Bundle;
use crate::called;
use crate::claim::{ClaimError, look_up_claim, part_of};
use crate::context_costs::ContextCosts;
use crate::driver_limit::{DriverLimitError, DriverLimiter, DriverLimits};
use crate::edit;
use crate::ending;
use crate::give_back::{Undo, forget_swept};
use crate::host_files::{HostFileError, HostFiles};
use crate::image::{Image, ImageError, RootFolder};
use crate::interpreter::missing_interpreters;
use crate::loader;
use crate::message::{one_line, out_of_service};
use crate::mps::{self, MpsError};
use crate::node_facts::{self, NodeFactsError};
use crate::plan::{Plan, PlanError};
use crate::plan_parts::PlanParts;
use crate::pod;
use crate::reason::of_grant;
use crate::region::{Region, RegionError};
use crate::requirement::{Offer, RequirementError, Requirements};
use crate::rights;
use crate::settings::{Programs, Settings};
use crate::supervision::{SupervisionError, check_lease, decide};
use crate::used::open_measured;

/// A container that asks for a share.
#[derive(Debug)]
pub struct Requester<'a> {
    /// The request's sources (annotations, environment, mounts, nodes), as the engine wrote them.
    pub container: &'a Container,
    /// Names the container in the quota store.
    pub key: &'a LeaseKey,
    /// The bundle that `json` was read from.
    pub bundle: &'a Bundle,
    /// The parsed config.json of the bundle. [`grant`] takes out of it what must not stand beside a share.
    pub json: Value,
    /// Whether the low-level runtime has read the configuration already: then nothing can be taken out of it
    /// any more.
    pub is_read: bool,
    /// Whether the share must be given back by a hook, because the engine does not delete the container
    /// through gpushare.
    pub needs_poststop: bool,
}

/// Why a container gets no share.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// A strict node gives no share to a privileged container: it may open every device, so no limit holds in
    /// it.
    #[error(
        "a privileged container can open every GPU, so this node gives it no share (request.strict); drop --privileged"
    )]
    Privileged,
    /// A strict node gives no share to a container with one of [`crate::RIGHTS`].
    #[error("a container with {found}, so this node gives it no share (request.strict); {remedy}")]
    Right {
        /// Name of the right, its place in the bundle, and why it could undo the limit.
        found: String,
        /// What the container's owner can change.
        remedy: &'static str,
    },
    /// The container uses the host's mount namespace: what it gets would be mounted on the host.
    #[error(
        "a container in the host's mount namespace gets no share: the driver's files and the limits would be mounted on the \
         host; give it a mount namespace of its own"
    )]
    HostMounts,
    /// A loader variable would load the driver's own files in place of ours.
    #[error(
        "{variable} names {DRIVER_FOLDER}, where the driver's own files are for gpushare's alone; take it out"
    )]
    Loader {
        /// The variable, such as `LD_LIBRARY_PATH`.
        variable: &'static str,
    },
    /// The container may not join the lease of the claim that its bundle names.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// It is not known what kubelet allocated to the container.
    #[error(transparent)]
    Allocation(#[from] AllocationError),
    /// Another system's library is in a bundle that can no longer be changed.
    #[error(
        "the bundle brings another system's interception library ({what}), which a hook cannot take out: use \
         gpushare-runtime, leave it out, or set request.interceptor to stand-down"
    )]
    Interceptor {
        /// A mount or a preloaded library.
        what: String,
    },
    /// The container's root folder, or a mount target in it, cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The state folder cannot be made or used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The driver or the device nodes cannot be read.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// GPU memory sizes or the fitted copies of our libraries could not be prepared.
    #[error(transparent)]
    NodeFacts(#[from] NodeFactsError),
    /// The quota store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// This process cannot be read from /proc, so it cannot hold a lease.
    #[error(transparent)]
    Holder(#[from] HolderError),
    /// The request cannot be read, or does not fit this node.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The request failed on a node with GPUs out of service: it may be one of these that it wants.
    #[error("{why}; {sick}")]
    OutOfService {
        /// The kind of that error.
        reason: Reason,
        /// The error as on a node without such GPUs.
        why: String,
        /// Each GPU that is out of service, with its cause.
        sick: String,
    },
    /// The node does not meet the image's requirements.
    #[error(transparent)]
    Requirement(#[from] RequirementError),
    /// The node cannot hold the share.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The node cannot hold the share beside those that it holds.
    #[error("{why}; {holders}")]
    Held {
        /// What is missing.
        why: ReserveError,
        /// Who holds what there is.
        holders: String,
    },
    /// A host file that the container needs is missing, or others than root could change it.
    #[error(transparent)]
    File(#[from] HostFileError),
    /// The driver's own limit is required, and there is none.
    #[error(transparent)]
    DriverLimit(#[from] DriverLimitError),
    /// No supervisor can hold the container.
    #[error(transparent)]
    Supervision(#[from] SupervisionError),
    /// The plan cannot be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The container cannot be a client of MPS.
    #[error(transparent)]
    Mps(#[from] MpsError),
    /// The region's two files cannot be made.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Reserves what a container asks for, makes its plan, and calls `apply` to put the plan into the container.
/// `apply` owns the reservation: if it drops it, the share is given back. On any failure the region is
/// removed.
///
/// # Errors
/// When there is no such share, or `apply` fails. Nothing that this function made is left then, but what it
/// wrote into the loader's cache of the container's own layer.
pub fn grant<T, E: From<GrantError>>(
    mut requester: Requester,
    settings: &Settings,
    apply: impl FnOnce(&Plan, Reservation<'_>, Value) -> Result<T, E>,
) -> Result<T, E> {
    let facts = Facts::read(&mut requester, settings)?;
    let store = open_measured(&facts.state).map_err(GrantError::from)?;
    let reservation = facts.reserve(&requester, &store, settings)?;
    let undo = Undo::of(&store, &facts.state, reservation.lease());
    if let Some(note) = too_little(reservation.lease()) {
        tracing::warn!(container = %requester.key.container, note, "request");
    }
    let reservation = reservation; // dropped before `undo`, which asks what became of the lease
    match reservation.lease().enforcement_for(&facts.request) {
        Enforcement::Mps => mps::join(&requester.json, &facts.state, &store, reservation.lease()),
        _ => mps::await_end(&facts.state, reservation.lease()),
    }
    .map_err(GrantError::from)?;
    let files = facts.files(reservation.lease(), settings)?;
    let plan = facts.plan(reservation.lease(), &files, requester.needs_poststop)?;
    let version = &facts.node.driver.version;
    make_region(&facts.state, version, reservation.lease(), &facts.request).map_err(GrantError::from)?;
    facts.root.check(plan.targets()).map_err(GrantError::from)?;
    let region = Region::of(facts.state.path(), reservation.lease().id);
    let change = plan.loader_cache.apply(&facts.root, &region, &requester.key.container);
    change.map_err(GrantError::from)?;
    for note in missing_interpreters(&plan, &facts.root) {
        tracing::warn!(container = %requester.key.container, note, "image");
    }
    let done = apply(&plan, reservation, requester.json)?;
    undo.keep();
    Ok(done)
}

/// The node with its GPUs' sizes. What is not known yet of this boot and driver is found out by the CLI.
///
/// # Errors
/// When there is no driver or GPU, or the CLI fails.
pub fn known_node(state: &StateFolder, settings: &Settings) -> Result<Node, GrantError> {
    let node = Node::open(settings.roots)?;
    let current = node_facts::load(&node, state.path())?;
    let fitted = |_: &Totals| node_facts::are_libraries_fitted(&node, state.path(), &settings.programs);
    let totals = match current.filter(fitted) {
        Some(totals) => totals,
        None => {
            node_facts::refresh(settings)?;
            node_facts::load(&node, state.path())?.ok_or(NodeFactsError::Differs)?
        }
    };
    Ok(node.with_totals(&totals).without_faulty(&Faults::load(state.path()))?)
}

/// All that a grant depends on besides the quota store: the container's request, its image, and the node.
struct Facts<'a> {
    state: StateFolder,
    node: Node,
    programs: Programs<'a>,
    request: Request,
    requirements: Requirements,
    pod: Option<Pod>,
    root: RootFolder,
    image: Image,
}

impl<'a> Facts<'a> {
    /// Reads them, and takes out of the requester's configuration what must not stand beside a share.
    fn read(requester: &mut Requester, settings: &Settings<'a>) -> Result<Self, GrantError> {
        let requirements = Requirements::of(requester.container)?;
        let state = StateFolder::open(settings.programs.state)?;
        state.keep_history_in(settings.history);
        let node = known_node(&state, settings)?;
        let programs = settings.programs.clone();
        let here = Programs { state: state.path(), ..programs.clone() };
        admit(&requester.json, requester.bundle.path(), &here, &node, settings.policy.strict)?;
        let claimed = look_up_claim(requester.container, || open_measured(&state).map_err(GrantError::from))?;
        let container = claimed.as_ref().unwrap_or(requester.container);
        let allocated = look_up_allocation(container, &state, settings.policy.kubelet)?;
        let container = allocated.as_ref().unwrap_or(container);
        let request = read(container, settings.policy, &node.gpus);
        let request = request.map_err(|error| beside_sick(error.into(), &node))?;
        let mut request = request.ok_or(RequestError::NoShare)?;
        // Before anybody is ended for it (rules.preemption).
        let is_limited = Enforcement::of(&request).terms().has_region;
        if is_limited && programs.driver_limits == DriverLimits::Required {
            DriverLimiter::available(&node.driver.version)?;
        }
        admit_mode(&requester.json, &request, &state)?;
        let bundle = (&requester.json, requester.is_read);
        decide(&mut request, programs.supervisor, &node, bundle)?;
        tell(requester.key, &request);
        clear(&mut requester.json, &request, requester.is_read)?;
        if !requester.is_read {
            edit::take_out_driver(&mut requester.json, &node.driver.sources());
        }
        let root = RootFolder::open(&requester.bundle.root(&requester.json), &requester.json)?;
        let image = root.look(requester.bundle.path(), &requester.json);
        let pod = pod::of(requester.container, &requester.json);
        Ok(Self { state, node, programs, request, requirements, pod, root, image })
    }

    /// Reserves the share in the store, and checks that the image can run on it. If not, the reservation is
    /// dropped.
    fn reserve<'store>(
        &self,
        requester: &Requester,
        store: &'store Store,
        settings: &Settings,
    ) -> Result<Reservation<'store>, GrantError> {
        let member = Member::reserved(requester.key.clone(), Holder::this_process()?);
        let called = called::of(requester.container, &requester.key.container, requester.bundle.path());
        let member = member.named(pod::name(requester.container), called);
        let forget = |swept: &Swept| forget_swept(&self.state, swept);
        let (gpus, rules) = (&self.node.gpus, settings.admission);
        let reserve = || store.reserve(&member, self.pod.as_ref(), &self.request, gpus, rules, forget);
        let reserved = match (reserve(), settings.preemption) {
            (Err(ReserveError::Refused(refusal)), Some(grace)) => {
                let ended = store.outranked(&member, &self.request, gpus, rules)?;
                // Nobody is ended for an image that cannot run here.
                let offer = ended.first().map(|lease| Offer::of(&self.node, lease));
                offer.map_or(Ok(()), |offer| self.requirements.check(&offer))?;
                if let Some(first) = ended.first() {
                    DriverLimiter::of(&self.programs, &self.node.driver.version, first, &self.request)?;
                }
                match preempt(requester.key, &self.request, &ended, grace, self.state.path()) {
                    true => reserve(),
                    false => Err(ReserveError::Refused(refusal)),
                }
            }
            (other, _) => other,
        };
        let reserved = reserved.map_err(|error| match error {
            // On a strict node people do not know each other.
            ReserveError::Refused(ref refusal) if refusal.is_for_room() && !settings.policy.strict => {
                beside_holders(error, store, &self.request, gpus)
            }
            error => error.into(),
        });
        let reservation = reserved.map_err(|error| beside_sick(error, &self.node))?;
        let lease = reservation.lease();
        self.requirements.check(&Offer::of(&self.node, &part_of(lease, &self.request)))?;
        let bundle = (&requester.json, requester.is_read);
        check_lease(lease, &self.request, self.programs.supervisor, &self.node, bundle)?;
        Ok(reservation)
    }

    /// Looks for the host's files that a container of `lease` gets.
    fn files(&self, lease: &Lease, settings: &Settings) -> Result<HostFiles, GrantError> {
        let extent = lease.enforcement_for(&self.request).terms().extent;
        let driver = &self.node.driver;
        let gather = || HostFiles::gather(&self.request, extent, driver, &self.programs, &self.image);
        Ok(match gather() {
            // gpushare itself was replaced since the inventory was read.
            Err(HostFileError::NotFitted { .. }) => {
                node_facts::refresh(settings)?;
                gather()?
            }
            other => other?,
        })
    }

    /// The plan of this container of `lease`.
    fn plan(&self, lease: &Lease, files: &HostFiles, needs_poststop: bool) -> Result<Plan, GrantError> {
        let programs = Programs { state: self.state.path(), ..self.programs.clone() };
        let (gpus, nodes) = (&self.node.gpus, &self.node.nodes);
        let lease = &part_of(lease, &self.request);
        let limiter = DriverLimiter::of(&programs, &self.node.driver.version, lease, &self.request)?;
        let (image, programs, limiter) = (&self.image, &programs, limiter.as_ref());
        let driver_version = &self.node.driver.version;
        let parts =
            PlanParts { gpus, nodes, driver_version, files, image, programs, limiter, needs_poststop };
        let plan = Plan::new(&self.request, lease, parts);
        // A pod's further container may join a lease of a GPU that has failed since.
        plan.map_err(|error| beside_sick(error.into(), &self.node))
    }
}

/// Ends the containers of these leases, which are of lower priority, and waits until they are gone. Returns
/// whether there were any, and all are.
fn preempt(key: &LeaseKey, request: &Request, ended: &[Lease], grace: Duration, state: &Path) -> bool {
    for lease in ended {
        let (of, level) = (lease.priority.level(), request.priority.level());
        let (container, lower) = (&key.container, &lease.member.key.container);
        tracing::warn!(%container, %lower, level, of, "no room: a container of lower priority is ended (rules.preemption)");
        let why = format!("rules.preemption: {container} of priority {level} needs its room");
        Done::Ended { why }.note(state, lease);
    }
    !ended.is_empty() && ending::end_within(ended, grace)
}

/// Logs the notes of the request's reader, and another system's library if one was found.
fn tell(key: &LeaseKey, request: &Request) {
    for note in &request.notes {
        tracing::warn!(container = %key.container, note, "request");
    }
    if let Some((found, policy)) = &request.interceptor {
        // A bundle may hold a hundred thousand libraries: only their count and the first are logged.
        let (count, first) = (found.count(), found.first());
        tracing::warn!(container = %key.container, ?policy, count, ?first, "another system's library");
    }
}

/// Refuses a container whose mode it cannot have on this node, before anything is reserved for it.
///
/// # Errors
/// When it asks for MPS, and nobody serves that or it could never be a client.
pub fn admit_mode(json: &Value, request: &Request, state: &StateFolder) -> Result<(), GrantError> {
    if request.mode == Mode::Mps {
        mps::admit(json, state)?;
    }
    Ok(())
}

/// Less memory than this holds no CUDA context and a program: an H200 takes 520 MiB for a context alone, and
/// the books charge 776, which leaves room for libraries' code.
const LITTLE: DeviceMemory = DeviceMemory::from_bytes(800 << 20);

/// What to say of a lease in which CUDA programs will hardly start; `None` where they should.
pub fn too_little(lease: &Lease) -> Option<String> {
    let terms = lease.enforcement.terms();
    let grant = lease.grants.iter().filter(|_| terms.has_region).find(|grant| {
        let most = lease.elastic.map_or(grant.memory, |bounds| bounds.most);
        most < LITTLE && lease.enforcement != Enforcement::TimeSliced
    })?;
    Some(format!(
        "{} of memory is little: a CUDA context takes some 520 MiB, and 776 MiB are kept for it and the code of \
         libraries; ask for {LITTLE} or more",
        grant.memory
    ))
}

fn make_region(
    state: &StateFolder,
    driver_version: &str,
    lease: &Lease,
    request: &Request,
) -> Result<(), RegionError> {
    let region = Region::of(state.path(), lease.id);
    let is_shared = request.scope == Scope::Pod || !lease.others.is_empty();
    if is_shared { region.join(lease) } else { region.make(lease) }?;
    if lease.enforcement.terms().has_region {
        let costs = ContextCosts::load(state.path(), driver_version);
        region.charge_contexts(lease, &costs)?;
    }
    if !lease.enforcement_for(request).terms().is_intercepted {
        region.hide_from_all(&lease.member.key.container);
    }
    Ok(())
}

/// How many holders a refusal names.
const NAMED: usize = 4;

/// Adds who holds most to a refusal, if anybody holds anything.
fn beside_holders(error: ReserveError, store: &Store, request: &Request, gpus: &[Gpu]) -> GrantError {
    let mut leases = store.leases().unwrap_or_default();
    let wanted: Option<Vec<GpuUuid>> = match &request.devices {
        Devices::These(list) => {
            let found = list.iter().filter_map(|selector| find_gpu(selector, gpus).ok());
            Some(found.map(|gpu| gpu.uuid).collect())
        }
        Devices::Among(_, uuids) => Some(uuids.clone()),
        Devices::Any(_) | Devices::All => None,
    };
    let is_meant = |grant: &&Grant| wanted.as_ref().is_none_or(|wanted| wanted.contains(&grant.gpu));
    leases.retain(|lease| lease.grants.iter().any(|grant| is_meant(&grant)));
    let memory = |lease: &Lease| {
        let its = lease.grants.iter().filter(is_meant);
        its.fold(DeviceMemory::ZERO, |sum, grant| sum.saturating_add(grant.memory))
    };
    leases.sort_by_key(|lease| std::cmp::Reverse(memory(lease)));
    let holder = |lease: &Lease| match lease.enforcement {
        Enforcement::TimeSliced => format!("{} (time slices)", lease.member.title()),
        _ => format!("{} ({})", lease.member.title(), memory(lease)),
    };
    let named: Vec<String> = leases.iter().take(NAMED).map(holder).collect();
    match leases.len().saturating_sub(NAMED) {
        _ if leases.is_empty() => error.into(),
        0 => GrantError::Held { why: error, holders: format!("held by {}", named.join(", ")) },
        more => {
            GrantError::Held { why: error, holders: format!("held by {} and {more} more", named.join(", ")) }
        }
    }
}

/// Adds the GPUs that are out of service to the error of a request, if the node has any.
pub fn beside_sick(error: GrantError, node: &Node) -> GrantError {
    if node.sick.is_empty() {
        return error;
    }
    let sick: Vec<String> = node.sick.iter().map(out_of_service).collect();
    GrantError::OutOfService { reason: of_grant(&error), why: one_line(&error), sick: sick.join("; ") }
}

/// Takes another system's interception library out of the bundle, if the settings say to replace it.
///
/// # Errors
/// When it must be taken out, but the low-level runtime has read the bundle (`is_read`).
pub fn clear(json: &mut Value, request: &Request, is_read: bool) -> Result<(), GrantError> {
    let Some((found, InterceptorPolicy::Replace)) = &request.interceptor else { return Ok(()) };
    match found.first() {
        Some(what) if is_read => Err(GrantError::Interceptor { what: what.escape_debug().to_string() }),
        _ => {
            edit::take_out_interceptor(json, found);
            Ok(())
        }
    }
}

/// Checks that a limit can hold in the container of this config.json. `bundle` is the bundle's folder. With
/// `strict`, the container must also have no right to undo the limit.
///
/// # Errors
/// Names what would let the container pass its limit.
pub fn admit(
    json: &Value,
    bundle: &Path,
    programs: &Programs,
    node: &Node,
    strict: bool,
) -> Result<(), GrantError> {
    if let Some(variable) = loader::names_driver(json) {
        return Err(GrantError::Loader { variable });
    }
    if !strict {
        return if rights::has_mounts_of_its_own(json) { Ok(()) } else { Err(GrantError::HostMounts) };
    }
    match rights::right_over_limit(json, bundle, programs, &rights::driver_places(node)) {
        _ if gpushare_request::is_privileged(json) => Err(GrantError::Privileged),
        Some(found) => Err(GrantError::Right { remedy: found.right.remedy, found: found.to_string() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use gpushare_inventory::{DeviceMemory, DeviceNode, Extent, Gpu, GpuUuid};
    use gpushare_request::Policy;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_share_has_the_whole_driver_only_beside_a_library_that_is_proved() {
        let gpu = Gpu {
            uuid: GpuUuid::from_bytes([1; 16]),
            index: 0,
            memory: Some(DeviceMemory::from_bytes(8 << 30)),
            model: String::new(),
            minor: 0,
            node: DeviceNode {
                path: "/dev/nvidia0".into(),
                host_path: "/dev/nvidia0".into(),
                major: 195,
                minor: 0,
                mode: 0o666,
                uid: 0,
                gid: 0,
            },
            place: gpushare_inventory::Place::default(),
            instance: None,
        };
        let library =
            json!({"source": "/usr/local/vgpu/libvgpu.so", "destination": "/usr/local/vgpu/libvgpu.so"});
        let file = json!({"source": "/usr/local/vgpu/ld.so.preload", "destination": "/etc/ld.so.preload"});
        let elsewhere = json!({"source": "/x/libvgpu.so", "destination": "/data/libvgpu.so"});
        for (mounts, want) in [
            (json!([library, file]), Extent::Whole),
            (json!([library]), Extent::Share),
            (json!([elsewhere, file]), Extent::Share),
            (json!([]), Extent::Share),
        ] {
            let env = ["NVIDIA_VISIBLE_DEVICES=0", "CUDA_DEVICE_MEMORY_LIMIT=1g"];
            let mut json = json!({"mounts": mounts, "process": {"env": env}});
            let policy = Policy { interceptor: InterceptorPolicy::StandDown, ..Policy::default() };
            let container = Container::from_json(&json);
            let request = read(&container, &policy, std::slice::from_ref(&gpu)).unwrap().unwrap();
            assert_eq!(gpushare_quota::Enforcement::of(&request).terms().extent, want, "{mounts}");
            clear(&mut json, &request, false).unwrap();
            let stays = want == Extent::Whole;
            assert_eq!(json["mounts"] == mounts, stays || mounts == json!([]), "{json}");
        }
    }
}
