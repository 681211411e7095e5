//! The node as NVML in this process sees it: the state, the GPUs that it may show, and their handles.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use gpushare_simulator::model::{self, Model};
use gpushare_simulator::place::Place;
use gpushare_simulator::session::{Reader, Session};
use gpushare_simulator::state::Gpu;

use crate::abi::{Code, Handle, Result};

/// The mapped state and the granted GPUs, in the order of NVML's indexes.
pub struct Node {
    /// The mapped state and the slots' lock file.
    pub reader: &'static Reader,
    /// The GPUs as indexes into the state; a GPU's place in the list is NVML's index. MIG instances are
    /// behind the last of them, in the order of their GPUs.
    pub devices: Vec<usize>,
    /// How many of `devices` are whole GPUs.
    pub whole: usize,
}

static USERS: AtomicU32 = AtomicU32::new(0);
static NODE: OnceLock<Node> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());
/// This process's slot with the pid that owns it, because a forked child needs a slot of its own.
static SESSION: Mutex<Option<(u32, &'static Session)>> = Mutex::new(None);

/// The session of this process, made at first use. Reading a GPU's work advances the GPU to now under a lock,
/// and a lock needs an owner.
pub fn session() -> Result<&'static Session> {
    let mut known = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    if let Some((_, session)) = known.filter(|(owner, _)| *owner == pid) {
        return Ok(session);
    }
    let session = Session::open(node()?.reader.shared()).map_err(|_| Code::UNKNOWN)?;
    let session: &'static Session = Box::leak(Box::new(session));
    *known = Some((pid, session));
    Ok(session)
}

/// The node between nvmlInit and nvmlShutdown; UNINITIALIZED at other times.
pub fn node() -> Result<&'static Node> {
    if USERS.load(Ordering::Acquire) == 0 {
        return Err(Code::UNINITIALIZED);
    }
    NODE.get().ok_or(Code::UNINITIALIZED)
}

/// The node, also before nvmlInit, for functions that the real library answers then too.
pub fn any_node() -> Result<&'static Node> {
    let _one = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(node) = NODE.get() {
        return Ok(node);
    }
    let place = Place::find().ok_or(Code::DRIVER_NOT_LOADED)?;
    let reader = Reader::open(&place.shared).map_err(|_| Code::DRIVER_NOT_LOADED)?;
    let granted = place.granted(reader.state);
    let is_whole = |index: &usize| reader.state.gpus()[*index].card().is_none();
    let (mut devices, parts): (Vec<usize>, Vec<usize>) = granted.into_iter().partition(is_whole);
    if devices.is_empty() {
        return Err(Code::DRIVER_NOT_LOADED);
    }
    let whole = devices.len();
    devices.extend(parts);
    Ok(NODE.get_or_init(|| Node { reader, devices, whole }))
}

/// Counts one more user: nvmlInit.
pub fn enter() -> Result {
    any_node()?;
    USERS.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

/// Counts one user less: nvmlShutdown.
pub fn leave() -> Result {
    let fewer = |users: u32| users.checked_sub(1);
    USERS
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer)
        .map(|_| ())
        .map_err(|_| Code::UNINITIALIZED)
}

/// Handles look like addresses and survive nvmlShutdown.
const FIRST: Handle = 0x5701_0000_0000;
const STEP: Handle = 0x1_0000;

impl Node {
    /// The MIG instances of a GPU that this process may use, as places in `devices`.
    pub fn instances(&self, handle: Handle) -> Result<Vec<usize>> {
        let card = self.devices[self.index(handle)?];
        let gpus = self.reader.state.gpus();
        let is_its = |place: &usize| {
            let gpu = &gpus[self.devices[*place]];
            gpu.card() == Some(card) && gpu.excluded.load(Ordering::Relaxed) == 0
        };
        Ok((self.whole..self.devices.len()).filter(is_its).collect())
    }

    /// The handle of the GPU with NVML's index `index`, or of the instance at this place of `devices`.
    pub fn handle(&self, index: usize) -> Result<Handle> {
        if index < self.devices.len() { Ok(FIRST + index * STEP) } else { Err(Code::INVALID_ARGUMENT) }
    }

    /// NVML's index of the GPU with this handle.
    pub fn index(&self, handle: Handle) -> Result<usize> {
        let distance = handle.checked_sub(FIRST).ok_or(Code::INVALID_ARGUMENT)?;
        let index = distance / STEP;
        if distance.is_multiple_of(STEP) && index < self.devices.len() {
            Ok(index)
        } else {
            Err(Code::INVALID_ARGUMENT)
        }
    }

    /// The GPU with NVML's index `index`.
    pub fn gpu_at(&self, index: usize) -> Result<&'static Gpu> {
        let gpus = self.reader.state.gpus();
        self.devices.get(index).and_then(|&device| gpus.get(device)).ok_or(Code::INVALID_ARGUMENT)
    }

    /// Handle of the first GPU for which `wanted` holds.
    pub fn find(&self, wanted: impl Fn(&Gpu) -> bool) -> Result<Handle> {
        let found = (0..self.devices.len()).find(|&index| self.gpu_at(index).is_ok_and(&wanted));
        self.handle(found.ok_or(Code::NOT_FOUND)?)
    }
}

/// The GPU of a handle.
pub fn gpu(handle: Handle) -> Result<&'static Gpu> {
    let node = node()?;
    node.gpu_at(node.index(handle)?)
}

/// Model of the GPU with this handle, with its own number of multiprocessors.
pub fn model_of(handle: Handle) -> Result<Model> {
    let gpu = gpu(handle)?;
    Ok(Model { cores: gpu.cores.load(Ordering::Relaxed), ..model::of(&gpu.model.get()) })
}
