//! From a request to a plan: the one way for every mode that changes a container. The modes differ only in what they
//! do with the plan.

use std::path::{Path, PathBuf};

use gpushare_inventory::{Node, NodeError, Roots};
use gpushare_quota::{
    Admission, Holder, HolderError, Lease, LeaseKey, Member, Pod, Release, Reservation, ReserveError,
    StateError, StateFolder, Store, StoreError, Swept,
};
use gpushare_region::path::DRIVER_FOLDER;
use gpushare_request::{Container, InterceptorPolicy, Policy, Request, RequestError, Scope, read};
use serde_json::Value;

use crate::bundle::Bundle;
use crate::edit;
use crate::image::{Image, ImageError, RootFolder};
use crate::loader;
use crate::message::{one_line, out_of_service};
use crate::node_facts::{self, NodeFactsError};
use crate::offer::offer;
use crate::plan::{Plan, PlanError, Programs};
use crate::pod;
use crate::region::{Region, RegionError};
use crate::requirement::{RequirementError, Requirements};
use crate::rights;

/// The administrator's settings, as far as a grant depends on them.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// Where driver, devices and /proc are.
    pub roots: &'a Roots,
    /// Our own files; the state folder as it is written in the settings.
    pub programs: Programs<'a>,
    /// The CLI's binary, which takes stock of the node.
    pub cli: &'a Path,
    /// The settings file, where it is not the default one: the CLI reads the same.
    pub file: Option<PathBuf>,
    /// Rules for admission.
    pub admission: &'a Admission,
    /// Rules for requests.
    pub policy: &'a Policy,
}

/// A container that asks for a share.
#[derive(Debug)]
pub struct Requester<'a> {
    /// What it asks for, as its engine wrote it.
    pub container: &'a Container,
    /// Who it is.
    pub key: &'a LeaseKey,
    /// Its bundle.
    pub bundle: &'a Bundle,
    /// The bundle's configuration.
    pub json: Value,
    /// Whether the low-level runtime has read the configuration: nothing can be taken out of it any more.
    pub is_read: bool,
}

/// Why a container gets no share.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// A container that may open every device is no place for a limit that a cluster relies on.
    #[error(
        "a privileged container can open every GPU, so this node gives it no share (request.strict); drop --privileged"
    )]
    Privileged,
    /// A container with a right of [`crate::RIGHTS`].
    #[error("a container with {found}, so this node gives it no share (request.strict); {remedy}")]
    Right {
        /// The right, where it stands, and why it is one.
        found: String,
        /// What its owner can do.
        remedy: &'static str,
    },
    /// What the container gets would be mounted on the host.
    #[error(
        "a container in the host's mount namespace gets no share: the driver's files and the limits would be mounted on the \
         host; give it a mount namespace of its own"
    )]
    HostMounts,
    /// A variable that takes the driver's files in place of ours.
    #[error(
        "{variable} names {DRIVER_FOLDER}, where the driver's own files are for gpushare's alone; take it out"
    )]
    Loader {
        /// Its name.
        variable: &'static str,
    },
    /// Another system's library in a bundle that nobody can change any more.
    #[error(
        "the bundle brings another system's interception library ({what}), which a hook cannot take out: use \
         gpushare-runtime, leave it out, or set request.interceptor to stand-down"
    )]
    Interceptor {
        /// A mount or a preloaded library.
        what: String,
    },
    /// The image, or a volume over it.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The state folder.
    #[error(transparent)]
    State(#[from] StateError),
    /// The driver or its devices.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The GPUs' sizes or our libraries' copies.
    #[error(transparent)]
    Stock(#[from] NodeFactsError),
    /// The quota store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// This process.
    #[error(transparent)]
    Holder(#[from] HolderError),
    /// The request on this node.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The request beside GPUs that are out of service: it may be one of these that it wants.
    #[error("{why}; {sick}")]
    OutOfService {
        /// As on a whole node.
        why: String,
        /// Which GPUs, and what is wrong with each.
        sick: String,
    },
    /// The image's requirements.
    #[error(transparent)]
    Requirement(#[from] RequirementError),
    /// The node cannot hold the share.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// A file that the container needs.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The container's two files.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Reserves what a container asks for, makes its plan, and lets `apply` put that into the container. The reservation is
/// `apply`'s: dropped, it gives the share back; the region goes with any failure.
///
/// # Errors
/// When there is no such share, or `apply` fails; nothing of this function's is left then.
pub fn grant<T, E: From<GrantError>>(
    mut requester: Requester,
    settings: &Settings,
    apply: impl FnOnce(&Plan, Reservation<'_>, Value) -> Result<T, E>,
) -> Result<T, E> {
    let requirements = Requirements::of(requester.container).map_err(GrantError::from)?;
    let state = StateFolder::open(settings.programs.state).map_err(GrantError::from)?;
    let node = Node::open(settings.roots).map_err(GrantError::from)?;
    let node = node_facts::known(node, state.path(), settings).map_err(GrantError::from)?;
    let programs = Programs { state: state.path(), ..settings.programs.clone() };
    admit(&requester.json, requester.bundle.path(), &programs, &node, settings.policy.strict)?;
    let beside_sick = |error| beside_sick(error, &node);
    let request = read(requester.container, settings.policy, &node.gpus).map_err(GrantError::from);
    let request = request.map_err(beside_sick)?.ok_or(RequestError::NoShare).map_err(GrantError::from)?;
    for note in &request.notes {
        tracing::warn!(container = %requester.key.container, note, "request");
    }
    if let Some((found, policy)) = &request.interceptor {
        // A bundle may hold a hundred thousand of them.
        let (count, first) = (found.count(), found.first());
        tracing::warn!(container = %requester.key.container, ?policy, count, ?first, "another system's library");
    }
    clear(&mut requester.json, &request, requester.is_read)?;
    if !requester.is_read {
        edit::take_out_driver(&mut requester.json, &node.driver.sources());
    }
    let root = requester.bundle.root(&requester.json);
    let root = RootFolder::open(&root, &requester.json).map_err(GrantError::from)?;
    let image = root.look(requester.bundle.path(), &requester.json);
    let store = Store::open(state.path()).map_err(GrantError::from)?;
    let pod = pod::of(requester.container, &requester.json);
    let reservation = reserve(requester.key, pod.as_ref(), &request, &node, &store, &state, settings);
    let reservation = reservation.map_err(beside_sick)?;
    requirements.check(&offer(&node, reservation.lease())).map_err(GrantError::from)?;
    let made = Undo { store: &store, state: &state, lease: reservation.lease().id, key: requester.key };
    let reservation = reservation; // dropped before `made`, which asks what became of the lease
    let plan = match plan(&request, reservation.lease(), &node, &image, &programs) {
        // gpushare itself was replaced since the node was looked at.
        Err(GrantError::Plan(PlanError::NotFitted { .. })) => {
            node_facts::refresh(settings).map_err(GrantError::from)?;
            plan(&request, reservation.lease(), &node, &image, &programs)?
        }
        other => other?,
    };
    root.check(plan.targets()).map_err(GrantError::from)?;
    let done = apply(&plan, reservation, requester.json)?;
    made.keep();
    Ok(done)
}

/// `error` of a request, with the GPUs that it could not have.
pub fn beside_sick(error: GrantError, node: &Node) -> GrantError {
    if node.sick.is_empty() {
        return error;
    }
    let sick: Vec<String> = node.sick.iter().map(out_of_service).collect();
    GrantError::OutOfService { why: one_line(&error), sick: sick.join("; ") }
}

/// Takes another system's interception library out of the bundle, where that is the rule.
///
/// # Errors
/// When it must go and the low-level runtime has read the bundle (`is_read`).
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

/// Whether a limit can hold in the container of this config.json, in the folder `bundle`. `strict` demands that it has no
/// right to undo it.
///
/// # Errors
/// Names what would let the container past it.
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

fn reserve<'store>(
    key: &LeaseKey,
    pod: Option<&Pod>,
    request: &Request,
    node: &Node,
    store: &'store Store,
    state: &StateFolder,
    settings: &Settings,
) -> Result<Reservation<'store>, GrantError> {
    let member = Member::reserved(key.clone(), Holder::this_process()?);
    let swept = |swept: &Swept| forget(state, swept.lease, &swept.key, swept.left);
    Ok(store.reserve(&member, pod, request, &node.gpus, settings.admission, swept)?)
}

/// Takes away what is kept in the folder `state` for a container that gave its lease back, and the region
/// with the last.
pub fn forget(state: &StateFolder, lease: i64, key: &LeaseKey, left: Release) {
    let region = Region::of(state.path(), lease);
    match left {
        Release::Nothing => {}
        Release::Left => region.leave(&key.container),
        Release::Ended => region.remove(),
    }
}

fn plan(
    request: &Request,
    lease: &Lease,
    node: &Node,
    image: &Image,
    programs: &Programs,
) -> Result<Plan, GrantError> {
    let plan = Plan::new(request, lease, node, programs, image)?;
    let region = Region::of(programs.state, lease.id);
    if request.scope == Scope::Pod || !lease.others.is_empty() {
        region.join(lease)?;
    } else {
        region.make(lease)?;
    }
    Ok(plan)
}

/// What is kept for a container that is not there yet: taken away on drop, which a successful execve never
/// reaches. The reservation is dropped before.
struct Undo<'a> {
    store: &'a Store,
    state: &'a StateFolder,
    lease: i64,
    key: &'a LeaseKey,
}

impl Undo<'_> {
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        // A lease that cannot be asked for is left to the sweep, and so is its region.
        match self.store.stands(self.lease) {
            Ok(true) => forget(self.state, self.lease, self.key, Release::Left),
            Ok(false) => forget(self.state, self.lease, self.key, Release::Ended),
            Err(error) => {
                tracing::warn!(container = %self.key.container, %error, "region left for the sweep")
            }
        }
    }
}
