//! Computes the memory that the nodes of a graph need, including those of its child graphs.

use core::sync::atomic::{AtomicU32, Ordering};

use gpushare_region::MAX_DEVICES;

use super::super::size::charged;
use super::super::{Device, Graph, Here, SUCCESS, UNLISTED, line_of, real};
use crate::sys;

const CHILD_GRAPH: i32 = 4; // CU_GRAPH_NODE_TYPE_GRAPH
const MEM_ALLOC: i32 = 10; // CU_GRAPH_NODE_TYPE_MEM_ALLOC
/// How many levels of child graphs are searched.
const DEPTH: u32 = 8;
/// Step of the driver's reserve.
const STEP: u64 = 2 << 20;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`: a pool description of 88 bytes with the location at 8, access, size,
/// pointer.
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

/// Not 0 once a graph with a memory node has been instantiated. While it is 0, launches cost nothing here. A
/// forked child keeps the value, which only makes its launches ask.
pub(in super::super) static MEMORY_NODES: AtomicU32 = AtomicU32::new(0);

/// The memory that an executable graph needs on each line of the limits file, in bytes, and the device of
/// that line.
#[derive(Default)]
pub(super) struct Needs([(u64, Device); MAX_DEVICES]);

impl Needs {
    /// The memory nodes of `graph`. `None`: a node cannot be read or is on a GPU that is not granted, or the
    /// kernel provided no memory.
    pub(super) fn of(here: Here, graph: Graph) -> Option<Self> {
        let mut needs = Self::default();
        add_needs(here, graph, &mut needs, DEPTH).then_some(needs)
    }

    fn add(&mut self, line: u8, device: Device, bytes: u64) {
        if let Some(need) = self.0.get_mut(usize::from(line)) {
            *need = (need.0.saturating_add(bytes), device);
        }
    }

    /// Line, device and bytes of each line on which the graph needs memory.
    pub(super) fn each(&self) -> impl Iterator<Item = (u8, Device, u64)> {
        (0u8..).zip(&self.0).filter(|(_, need)| need.0 > 0).map(|(line, need)| (line, need.1, need.0))
    }
}

/// Adds the memory nodes of `graph`. False if [`Needs::of`] returns `None`.
fn add_needs(here: Here, graph: Graph, needs: &mut Needs, depth: u32) -> bool {
    let mut count = 0;
    // SAFETY: without an array the driver writes only the count.
    if unsafe { real::cuGraphGetNodes(graph, core::ptr::null_mut(), &mut count) } != SUCCESS {
        return depth == DEPTH; // for the caller's own graph the driver's instantiation reports the error
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
    // SAFETY: the array was mapped above and is no longer used.
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
            MEMORY_NODES.store(1, Ordering::Relaxed);
            let mut parameters = core::mem::MaybeUninit::<AllocNode>::zeroed();
            // SAFETY: the node allocates memory, and the structure has the size of the driver's and more.
            let status = unsafe { real::cuGraphMemAllocNodeGetParams(node, parameters.as_mut_ptr().cast()) };
            // SAFETY: all zero bytes are a valid AllocNode, and the driver also writes a valid one.
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
