//! From a request to a plan: the one way for every mode that changes a container. The modes differ only in what they
//! do with the plan.

use std::path::{Path, PathBuf};

use gpushare_inventory::{Node, NodeError, Roots};
use gpushare_quota::{
    Admission, Holder, HolderError, Lease, LeaseKey, Reservation, ReserveError, StateError, StateFolder,
    Store, StoreError,
};
use gpushare_request::{Container, Mode, Request, RequestError, Requirements};
use serde_json::Value;

use crate::bundle::Bundle;
use crate::edit;
use crate::image::{Image, ImageError};
use crate::offer::offer;
use crate::plan::{Plan, PlanError, Programs};
use crate::region::{Region, RegionError};
use crate::stock::{self, StockError};

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
    /// Whether a privileged container gets no share.
    pub strict: bool,
}

/// A container that asks for a share.
#[derive(Debug)]
pub struct Asking<'a> {
    /// What it asks for.
    pub request: &'a Request,
    /// What else its engine wrote about it.
    pub container: &'a Container,
    /// Who it is.
    pub key: &'a LeaseKey,
    /// Its bundle.
    pub bundle: &'a Bundle,
    /// The bundle's configuration.
    pub json: Value,
}

/// Why a container gets no share.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// A container that may open every device is no place for a limit that a cluster relies on.
    #[error(
        "a privileged container can open every GPU, so this node gives it no share (request.strict); drop --privileged"
    )]
    Privileged,
    /// Nor is one that can undo its mounts.
    #[error(
        "a container with {right} can take its limit away, so this node gives it no share (request.strict); drop that \
         capability"
    )]
    Right {
        /// The capability.
        right: &'static str,
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
    Stock(#[from] StockError),
    /// The quota store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// This process.
    #[error(transparent)]
    Holder(#[from] HolderError),
    /// The image's requirements.
    #[error(transparent)]
    Requirement(#[from] RequestError),
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
    asking: Asking,
    settings: &Settings,
    apply: impl FnOnce(&Plan, Reservation<'_>, Value) -> Result<T, E>,
) -> Result<T, E> {
    if settings.strict {
        admit(&asking.json)?;
    }
    let requirements = Requirements::of(asking.container).map_err(GrantError::from)?;
    for variable in asking.container.foreign_switches() {
        tracing::warn!(container = %asking.key.container, variable, "switch of another system ignored");
    }
    let root = asking.bundle.root(&asking.json);
    let image = Image::look(&root, asking.bundle.path(), &asking.json).map_err(GrantError::from)?;
    let state = StateFolder::open(settings.programs.state).map_err(GrantError::from)?;
    let node = Node::open(settings.roots).map_err(GrantError::from)?;
    let node = stock::known(node, state.path(), settings).map_err(GrantError::from)?;
    let store = Store::open(state.path()).map_err(GrantError::from)?;
    let reservation = reserve(&asking, &node, &store, &state, settings)?;
    requirements.check(&offer(&node, reservation.lease())).map_err(GrantError::from)?;
    let region = Undo(Region::of(state.path(), reservation.lease().id));
    let programs = Programs { state: state.path(), ..settings.programs };
    let plan = plan(asking.request, reservation.lease(), &node, &image, &programs)?;
    Image::check(&root, &asking.json, plan.targets()).map_err(GrantError::from)?;
    let done = apply(&plan, reservation, asking.json)?;
    region.keep();
    Ok(done)
}

/// Whether a limit can hold in the container of this config.json, which `request.strict` demands.
///
/// # Errors
/// Names what would let the container past it.
pub fn admit(json: &Value) -> Result<(), GrantError> {
    match edit::right_over_limit(json) {
        _ if edit::is_privileged(json) => Err(GrantError::Privileged),
        Some(right) => Err(GrantError::Right { right }),
        None => Ok(()),
    }
}

fn reserve<'store>(
    asking: &Asking,
    node: &Node,
    store: &'store Store,
    state: &StateFolder,
    settings: &Settings,
) -> Result<Reservation<'store>, GrantError> {
    let holder = Holder::this_process()?;
    let swept = |lease: &Lease| Region::of(state.path(), lease.id).remove();
    Ok(store.reserve(asking.key, asking.request, &node.gpus, settings.admission, &holder, swept)?)
}

fn plan(
    request: &Request,
    lease: &Lease,
    node: &Node,
    image: &Image,
    programs: &Programs,
) -> Result<Plan, GrantError> {
    let plan = Plan::new(request, lease, node, programs, image)?;
    // A whole card is not intercepted, so nobody would read its region.
    if lease.mode == Mode::Share {
        Region::of(programs.state, lease.id).create(lease)?;
    }
    Ok(plan)
}

/// The region of a container that is not there yet: taken away on drop, which a successful execve never reaches.
struct Undo(Region);

impl Undo {
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        self.0.remove();
    }
}
