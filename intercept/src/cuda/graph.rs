//! Memory nodes of graphs: the driver keeps one reserve per device for all graphs of the process.
//!
//! An executable graph needs at most the sum of its nodes. What the reserve may have to grow by is charged before the
//! graph is instantiated, uploaded or launched. It stays charged until all work has run or the reserve is trimmed; then
//! the driver's own figure counts. In between graphs may run side by side, and each then has memory of its own.

use core::ffi::{c_char, c_void};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gpushare_region::MAX_DEVICES;

use super::charge::Charge;
use super::size::charged;
use super::{
    Device, Graph, Here, OUT_OF_MEMORY, SUCCESS, Status, Stream, UNLISTED, each_device, here, line_of, read,
    real,
};
use crate::mutex::Mutex;
use crate::sys;
use crate::table::{Entry, Kind};

const USED: i32 = 0; // CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT
const RESERVED: i32 = 2; // CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
const CHILD_GRAPH: i32 = 4; // CU_GRAPH_NODE_TYPE_GRAPH
const MEM_ALLOC: i32 = 10; // CU_GRAPH_NODE_TYPE_MEM_ALLOC
/// Graphs within graphs that are searched.
const DEPTH: u32 = 8;
/// Step of the driver's reserve.
const STEP: u64 = 2 << 20;

/// Memory that graphs of this process hold.
#[repr(C)]
pub(super) struct Graphs {
    /// Whether a graph with a memory node was ever instantiated: without one, launches cost nothing here.
    nodes: AtomicBool,
    /// Counts the moments at which no graph was known to run.
    epoch: AtomicU64,
    reserves: Mutex<[Reserve; MAX_DEVICES]>,
    /// Held while a graph with memory nodes is launched, so that two launches do not count on the same room.
    launching: Mutex<()>,
}

/// The driver's reserve on one device.
#[derive(Clone, Copy)]
#[repr(C)]
struct Reserve {
    charged: u64,
    /// What graphs held when the epoch began.
    base: u64,
    /// Most that the graphs launched in this epoch need if all run at once.
    launched: u64,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`: a pool description of 88 bytes with the location at 8, access, size, pointer.
#[repr(C)]
struct AllocNode {
    kinds: [i32; 2],
    location: [i32; 2],
    rest: [u64; 9],
    access: [u64; 2],
    bytes: u64,
    pointer: u64,
    spare: [u64; 8],
}

pub(super) fn is_unused(here: Here) -> bool {
    !here.state.graphs.nodes.load(Ordering::Relaxed)
}

fn attribute(device: Device, attribute: i32) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: both attributes that we ask for are 64-bit numbers.
    let status = unsafe {
        real::cuDeviceGetGraphMemAttribute(device, attribute, core::ptr::from_mut(&mut value).cast())
    };
    (status == SUCCESS).then_some(value)
}

/// Charges `line` what the driver has reserved for graphs there, but no less than what running ones may still take.
fn settle(here: Here, line: u8, device: Device) {
    let mut list = here.state.graphs.reserves.lock();
    let Some(reserve) = list.get_mut(usize::from(line)) else { return };
    let Some(reserved) = attribute(device, RESERVED) else { return };
    let running = if reserve.launched == 0 { 0 } else { reserve.base.saturating_add(reserve.launched) };
    let now = reserved.max(running);
    if now > reserve.charged {
        here.book().add(usize::from(line), now - reserve.charged);
    } else {
        here.book().release(usize::from(line), reserve.charged - now);
    }
    reserve.charged = now;
}

/// Begins an epoch: all that was launched has run, or the driver has just been asked what idle graphs keep.
fn begin_epoch(here: Here, line: u8, device: Device) {
    here.state.graphs.epoch.fetch_add(1, Ordering::Relaxed);
    if let Some(reserve) = here.state.graphs.reserves.lock().get_mut(usize::from(line)) {
        reserve.base = attribute(device, USED).unwrap_or(0);
        reserve.launched = 0;
    }
    settle(here, line, device);
}

/// All work of the context has run.
pub(super) fn synchronised(here: Here) {
    if !is_unused(here) {
        each_device(here, |device, line| begin_epoch(here, line, device));
    }
}

/// Gives the driver's unused reserves back.
pub(super) fn trim_all(here: Here) {
    if is_unused(here) {
        return;
    }
    each_device(here, |device, line| {
        // SAFETY: the driver gave the device.
        unsafe { real::cuDeviceGraphMemTrim(device) };
        begin_epoch(here, line, device);
    });
}

/// What an executable graph needs on each line, and the device there.
#[derive(Default)]
struct Needs([(u64, Device); MAX_DEVICES]);

impl Needs {
    fn add(&mut self, line: u8, device: Device, bytes: u64) {
        if let Some(need) = self.0.get_mut(usize::from(line)) {
            *need = (need.0.saturating_add(bytes), device);
        }
    }

    fn each(&self) -> impl Iterator<Item = (u8, Device, u64)> {
        (0u8..).zip(&self.0).filter(|(_, need)| need.0 > 0).map(|(line, need)| (line, need.1, need.0))
    }
}

/// Adds up the memory nodes of `graph`. False: a node cannot be read or is on a GPU that is not granted, or the kernel
/// gave no memory.
fn add_needs(here: Here, graph: Graph, needs: &mut Needs, depth: u32) -> bool {
    let mut count = 0;
    // SAFETY: without an array the driver writes the count alone.
    if unsafe { real::cuGraphGetNodes(graph, core::ptr::null_mut(), &mut count) } != SUCCESS {
        return depth == DEPTH; // instantiation will say what is wrong with the caller's own graph
    }
    if count == 0 {
        return true;
    }
    let length = count * size_of::<usize>();
    let Ok(address) = sys::map_private(length) else { return false };
    let nodes: *mut usize = core::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the array has room for `count` handles.
    let status = unsafe { real::cuGraphGetNodes(graph, nodes, &mut count) };
    let mut read = 0..count.min(length / size_of::<usize>());
    let fits = status == SUCCESS
        && read.all(|index| {
            // SAFETY: `index` is below the length of the array.
            let node = unsafe { nodes.wrapping_add(index).read() };
            add_node(here, node, needs, depth)
        });
    // SAFETY: the array was made above and is not used any more.
    unsafe { sys::unmap(address, length) };
    fits
}

fn add_node(here: Here, node: usize, needs: &mut Needs, depth: u32) -> bool {
    let mut kind = 0;
    // SAFETY: the driver gave the node and writes one integer.
    let status = unsafe { real::cuGraphNodeGetType(node, &mut kind) };
    match kind {
        _ if status != SUCCESS => false,
        CHILD_GRAPH if depth == 0 => false,
        CHILD_GRAPH => {
            let mut child = 0;
            // SAFETY: the node has a child graph; the driver writes one handle.
            let status = unsafe { real::cuGraphChildGraphNodeGetGraph(node, &mut child) };
            status == SUCCESS && add_needs(here, child, needs, depth - 1)
        }
        MEM_ALLOC => {
            here.state.graphs.nodes.store(true, Ordering::Relaxed);
            let mut parameters = core::mem::MaybeUninit::<AllocNode>::zeroed();
            // SAFETY: the node allocates memory, and the structure has the size of the driver's and more.
            let status = unsafe { real::cuGraphMemAllocNodeGetParams(node, parameters.as_mut_ptr().cast()) };
            // SAFETY: all zero bytes are a valid AllocNode, and so is what the driver writes.
            let parameters = unsafe { parameters.assume_init() };
            let [_, device] = parameters.location;
            let line = line_of(here, device);
            let bytes = charged(parameters.bytes).checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
            needs.add(line, device, bytes);
            status == SUCCESS && line != UNLISTED
        }
        _ => true,
    }
}

/// Charges what the reserve may grow by when a graph that needs `bytes` runs beside those of this epoch.
fn charge_growth(here: Here, line: u8, bytes: u64) -> Option<Charge> {
    let take = || {
        let reserve = here.state.graphs.reserves.lock().get(usize::from(line)).copied()?;
        let needed = reserve.base.saturating_add(reserve.launched).saturating_add(bytes);
        Charge::take(here, line, needed.saturating_sub(reserve.charged))
    };
    // A refusal has trimmed the reserve and begun an epoch: what must fit is another figure now.
    take().or_else(take)
}

fn key(executable: usize, line: u8) -> u64 {
    (executable as u64).rotate_left(8) ^ u64::from(line)
}

type Charges = [Option<Charge>; MAX_DEVICES];

fn instantiate(
    graph: Graph,
    executable: impl Fn() -> Option<usize>,
    call: impl FnOnce() -> Status,
) -> Status {
    // Every graph is searched: nodes come from captures, clones and functions that are not hooked, too.
    let Some(here) = here() else { return OUT_OF_MEMORY };
    let mut needs = Needs::default();
    if !add_needs(here, graph, &mut needs, DEPTH) {
        return OUT_OF_MEMORY;
    }
    let mut charges: Charges = Default::default();
    for ((line, _, bytes), place) in needs.each().zip(&mut charges) {
        *place = charge_growth(here, line, bytes);
        if place.is_none() {
            return OUT_OF_MEMORY;
        }
    }
    let status = call();
    let Some(executable) = executable().filter(|_| status == SUCCESS) else { return status };
    for (line, device, size) in needs.each() {
        let extra = u64::from(device.cast_unsigned());
        let entry =
            Entry { key: key(executable, line), size, extra, kind: Kind::Graph, device: line, context: 0 };
        // Without an entry a launch would go unpaid.
        if here.state.table.put(entry).is_err() {
            // SAFETY: just made, and unknown to the caller.
            unsafe { real::cuGraphExecDestroy(executable) };
            return OUT_OF_MEMORY;
        }
        settle(here, line, device);
    }
    status
}

/// The device in an entry, below the epoch of the graph's last launch + 1.
fn device_of(entry: &Entry) -> Device {
    Device::try_from(entry.extra & 0xffff).unwrap_or(0)
}

/// Uploads or launches with `call`. A graph that was launched in this epoch needs nothing more: it runs again only
/// after it has run.
fn run(executable: usize, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here().filter(|here| !is_unused(here)) else { return call() };
    let (graphs, table) = (&here.state.graphs, &here.state.table);
    let find = |line: u8| table.get(Kind::Graph, key(executable, line));
    let lines = || (0u8..).zip(0..MAX_DEVICES).map(|(line, _)| line);
    if !lines().any(|line| find(line).is_some()) {
        return call();
    }
    let _launching = graphs.launching.lock();
    let mut charges: Charges = Default::default();
    for (line, place) in lines().zip(&mut charges) {
        let epoch = graphs.epoch.load(Ordering::Relaxed) + 1;
        let Some(entry) = find(line).filter(|entry| entry.extra >> 16 != epoch) else { continue };
        *place = charge_growth(here, line, entry.size);
        if place.is_none() {
            return OUT_OF_MEMORY;
        }
    }
    let status = call();
    let epoch = graphs.epoch.load(Ordering::Relaxed) + 1;
    for (line, charge) in lines().zip(charges).filter(|(_, charge)| charge.is_some()) {
        let Some(entry) = find(line).filter(|_| status == SUCCESS) else { continue };
        table.change(Kind::Graph, entry.key, |entry| entry.extra = epoch << 16 | entry.extra & 0xffff);
        if let Some(reserve) = graphs.reserves.lock().get_mut(usize::from(line)) {
            reserve.launched = reserve.launched.saturating_add(entry.size);
        }
        settle(here, line, device_of(&entry)); // before the charge goes
        drop(charge);
    }
    status
}

fn destroy(executable: usize, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here().filter(|here| !is_unused(here)) else { return call() };
    let status = call();
    for (line, _) in (0u8..).zip(0..MAX_DEVICES) {
        if status == SUCCESS
            && let Some(entry) = here.state.table.take(Kind::Graph, key(executable, line))
        {
            settle(here, line, device_of(&entry));
        }
    }
    status
}

fn trim(device: Device, call: impl FnOnce() -> Status) -> Status {
    let status = call();
    if let Some(here) = here() {
        begin_epoch(here, line_of(here, device), device);
    }
    status
}

/// The hooks of this family.
#[allow(
    non_snake_case,
    missing_docs,
    clippy::missing_safety_doc,
    reason = "the driver names and documents them"
)]
pub mod hooks {
    use super::*;

    macro_rules! instantiators {
        ($($name:ident($($argument:ident: $type:ty),*);)*) => { $(
            pub unsafe extern "C" fn $name(executable: *mut usize, graph: Graph, $($argument: $type),*) -> Status {
                // SAFETY: our caller's arguments, unchanged.
                let call = || unsafe { real::$name(executable, graph, $($argument),*) };
                // SAFETY: written by the driver when it succeeded.
                instantiate(graph, || unsafe { read(executable) }, call)
            }
        )* };
    }
    instantiators! {
        cuGraphInstantiate(bad: *mut usize, text: *mut c_char, length: usize);
        cuGraphInstantiate_v2(bad: *mut usize, text: *mut c_char, length: usize);
        cuGraphInstantiateWithFlags(flags: u64);
        cuGraphInstantiateWithParams(parameters: *mut c_void);
        cuGraphInstantiateWithParams_ptsz(parameters: *mut c_void);
    }

    macro_rules! runners {
        ($($name:ident;)*) => { $(
            pub unsafe extern "C" fn $name(executable: usize, stream: Stream) -> Status {
                // SAFETY: our caller's arguments, unchanged.
                run(executable, || unsafe { real::$name(executable, stream) })
            }
        )* };
    }
    runners! {
        cuGraphUpload;
        cuGraphUpload_ptsz;
        cuGraphLaunch;
        cuGraphLaunch_ptsz;
    }

    pub unsafe extern "C" fn cuGraphExecDestroy(executable: usize) -> Status {
        // SAFETY: our caller's argument, unchanged.
        destroy(executable, || unsafe { real::cuGraphExecDestroy(executable) })
    }

    pub unsafe extern "C" fn cuDeviceGraphMemTrim(device: Device) -> Status {
        // SAFETY: our caller's argument, unchanged.
        trim(device, || unsafe { real::cuDeviceGraphMemTrim(device) })
    }
}
