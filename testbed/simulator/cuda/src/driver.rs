//! The driver's state in this process: the session with the node's state, the visible GPUs, and every object
//! with a handle in C.

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpushare_simulator::place::{Place, visible};
use gpushare_simulator::session::Session;
use gpushare_simulator::state::Gpu;

use crate::abi::{Code, Result};
use crate::array::Arrays;
use crate::callback::Callbacks;
use crate::capture::Captures;
use crate::context::{Context, Contexts};
use crate::event::Events;
use crate::graph::Graphs;
use crate::graphmem::GraphMemory;
use crate::green::Greens;
use crate::heap::{Heap, Kind};
use crate::host::HostMemory;
use crate::launch::Queue;
use crate::link::Links;
use crate::manager::Manager;
use crate::module::{Function, Modules};
use crate::mps::Client;
use crate::pool::Pools;
use crate::registry::Registry;
use crate::shape::{self, Shape};
use crate::shared::Shared;
use crate::sparse::Sparse;
use crate::stream::Streams;
use crate::vmm::Virtual;

/// Time that a round of blocks takes by default, nanoseconds.
const KERNEL_TIME: u64 = 2_000;

/// All state of a process after cuInit.
pub struct Driver {
    /// Our slot in the node's state.
    pub session: Session,
    /// The resource manager, if the node has one.
    pub manager: Option<Manager>,
    /// This process as a client of MPS, if it is one.
    pub mps: Option<Client>,
    /// The visible GPUs in the order of CUDA's ordinals, as indexes into the state.
    pub devices: Vec<usize>,
    /// All contexts, by GPU and by handle.
    pub contexts: Contexts,
    /// Device memory of all GPUs.
    pub heap: Mutex<Heap>,
    /// Page-locked host memory, allocated or registered.
    pub host: HostMemory,
    /// Streams, the default ones included.
    pub streams: Streams,
    /// Events, those of other processes included.
    pub events: Events,
    /// Active stream captures.
    pub captures: Captures,
    /// Graphs and executable graphs.
    pub graphs: Graphs,
    /// Memory of graphs' allocation nodes.
    pub graph_memory: GraphMemory,
    /// Green contexts.
    pub greens: Greens,
    /// Memory pools, including a default one for each GPU.
    pub pools: Pools,
    /// Virtual memory management: reservations, allocation handles and mappings.
    pub memory: Virtual,
    /// Arrays and mipmapped arrays.
    pub arrays: Arrays,
    /// Memory mapped to sparse and deferred arrays.
    pub sparse: Sparse,
    /// Memory shared with other processes or other interfaces.
    pub sharing: Shared,
    /// Modules and libraries.
    pub modules: Modules,
    /// Functions of modules and kernels of libraries.
    pub functions: Registry<Function>,
    /// Links started by cuLinkCreate.
    pub links: Links,
    /// The thread that calls streams' host functions.
    pub callbacks: Callbacks,
    /// Launches that may not have ended, by CUDA ordinal.
    pub queues: Vec<Queue>,
    /// Whether kernels whose image is PTX really run; otherwise they only take time.
    /// `GPUSHARE_SIMULATOR_RUN=0` turns it off.
    pub runs_kernels: bool,
    /// Nanoseconds that one round of blocks takes.
    pub kernel_time: u64,
    /// How the kernel times given by names vary.
    pub shape: Shape,
    /// Sleep at every allocation of device memory, from `GPUSHARE_SIMULATOR_ALLOCATION_NS`.
    pub delay: Duration,
}

static DRIVER: AtomicPtr<Driver> = AtomicPtr::new(std::ptr::null_mut());
static STARTING: Mutex<()> = Mutex::new(());
static FORKED: AtomicBool = AtomicBool::new(false);

/// Takes the lock, even after a panic in another thread: an answer is better than an abort in the client's
/// process.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The driver, once cuInit has succeeded in this process.
pub fn driver() -> Result<&'static Driver> {
    let pointer = DRIVER.load(Ordering::Acquire);
    // SAFETY: null, or a pointer from the box that `initialise` leaked.
    unsafe { pointer.as_ref() }.ok_or(Code::NOT_INITIALIZED)
}

/// A child of an initialised process cannot use the driver. The real one refuses it too.
extern "C" fn after_fork_in_child() {
    if !DRIVER.swap(std::ptr::null_mut(), Ordering::AcqRel).is_null() {
        FORKED.store(true, Ordering::Release);
    }
}

/// Returns the number in an environment variable; `None` if it is unset or not a number.
pub fn number_of(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn start() -> Result<Driver> {
    let shape = Shape::of_environment().map_err(|text| {
        eprintln!("gpushare-simulator: {}={text:?} is no shape", shape::VARIABLE);
        Code::INVALID_VALUE
    })?;
    let place = Place::find().ok_or(Code::NO_DEVICE)?;
    let session = Session::open(&place.shared).map_err(|_| Code::NO_DEVICE)?;
    let granted = place.granted(session.state());
    let chosen = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let devices = visible(session.state(), &granted, chosen.as_deref());
    if devices.is_empty() {
        session.close();
        return Err(Code::NO_DEVICE);
    }
    Ok(Driver {
        manager: Manager::beside(&place.shared, session.state()),
        contexts: Contexts::new(devices.len()),
        heap: Mutex::new(Heap::default()),
        host: HostMemory::default(),
        streams: Streams::default(),
        events: Events::default(),
        captures: Captures::default(),
        graphs: Graphs::default(),
        graph_memory: GraphMemory::default(),
        greens: Greens::default(),
        pools: Pools::default(),
        memory: Virtual::default(),
        arrays: Arrays::default(),
        sparse: Sparse::default(),
        sharing: Shared::default(),
        modules: Modules::default(),
        functions: Registry::default(),
        links: Links::default(),
        callbacks: Callbacks::default(),
        queues: devices.iter().map(|_| Queue::default()).collect(),
        runs_kernels: number_of("GPUSHARE_SIMULATOR_RUN") != Some(0),
        kernel_time: number_of("GPUSHARE_SIMULATOR_KERNEL_NS").unwrap_or(KERNEL_TIME),
        delay: Duration::from_nanos(number_of("GPUSHARE_SIMULATOR_ALLOCATION_NS").unwrap_or(0)),
        shape,
        mps: Client::of_environment(),
        session,
        devices,
    })
}

/// Initialises the process. A second call does nothing; a child of an initialised process is refused.
pub fn initialise() -> Result {
    let _one = locked(&STARTING);
    if FORKED.load(Ordering::Acquire) {
        return Err(Code::NOT_INITIALIZED);
    }
    if driver().is_ok() {
        return Ok(());
    }
    let driver = start()?;
    // SAFETY: the handler only touches two atomics.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    DRIVER.store(Box::into_raw(Box::new(driver)), Ordering::Release);
    Ok(())
}

impl Driver {
    /// The GPU with a CUDA ordinal.
    pub fn gpu(&self, ordinal: i32) -> Result<&'static Gpu> {
        let index = usize::try_from(ordinal).ok().and_then(|ordinal| self.devices.get(ordinal));
        index.and_then(|&index| self.session.state().gpus().get(index)).ok_or(Code::INVALID_DEVICE)
    }

    /// Frees the modules, memory, streams and events of a dying context.
    pub fn forget_context(&self, context: &Context) {
        self.modules.forget(self, context.handle);
        let held = locked(&self.heap).select(|allocation| allocation.context == context.handle);
        for allocation in held {
            let _ = match allocation.kind {
                Kind::Imported => self.close_import(allocation.start),
                _ => self.release(allocation.start).map(|_| ()),
            };
        }
        self.streams.forget(context.handle);
        self.events.forget(context.handle);
    }

    /// Releases the pools and graph memory of a GPU whose last context is gone.
    pub fn forget_device(&self, ordinal: i32) {
        self.forget_pools(ordinal);
        self.graph_memory.forget(self, ordinal);
    }

    /// The launches on a GPU that may not have ended.
    pub fn queue(&self, ordinal: i32) -> Result<&Queue> {
        usize::try_from(ordinal).ok().and_then(|index| self.queues.get(index)).ok_or(Code::INVALID_DEVICE)
    }

    /// CUDA version of the simulated driver, for example 12020.
    pub fn cuda_version(&self) -> u32 {
        self.session.state().cuda.load(Ordering::Relaxed)
    }
}

exports! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        initialise()
    }
}
