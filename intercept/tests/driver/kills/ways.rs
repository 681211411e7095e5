//! The ways to allocate memory, and the calls that release it.

use super::client::Client;
use crate::client::{MIB, bytes, out};

/// Calls that release the memory of a process, in order.
pub type Held = Vec<(&'static str, Vec<usize>)>;

/// The number of ways.
pub const WAYS: u64 = 9;

/// Allocates `mib`, an even number, in one of nine ways. Returns the calls that free it. `Err`: the driver's
/// status, and the calls that free anything allocated before the error.
pub fn allocate(cuda: &Client, way: u64, mib: u64) -> Result<Held, (i32, Held)> {
    let (mut place, size) = (0usize, bytes(mib));
    let (name, status, free) = match way {
        0 => {
            let status = cuda.timed("cuMemAlloc_v2", &[out(&mut place), size]);
            ("cuMemFree_v2", status, vec![place])
        }
        1 => {
            let mut pitch = 0usize;
            let arguments = [out(&mut place), out(&mut pitch), 1 << 20, usize::try_from(mib).unwrap(), 4];
            ("cuMemFree_v2", cuda.timed("cuMemAllocPitch_v2", &arguments), vec![place])
        }
        2 => {
            let status = cuda.timed("cuMemAllocManaged", &[out(&mut place), size, 1]);
            ("cuMemFree_v2", status, vec![place])
        }
        3 => {
            let status = cuda.timed("cuMemAllocAsync", &[out(&mut place), size, 0]);
            ("cuMemFreeAsync", status, vec![place, 0])
        }
        4 => {
            let status = cuda.timed("cuMemAllocFromPoolAsync", &[out(&mut place), size, cuda.pool, 0]);
            ("cuMemFreeAsync", status, vec![place, 0])
        }
        5 => {
            let mut shape = [1024u64, mib * 256, 1 << 32 | 0x20];
            let status = cuda.timed("cuArrayCreate_v2", &[out(&mut place), out(&mut shape)]);
            ("cuArrayDestroy", status, vec![place])
        }
        6 => {
            // Width, height, depth; format and channels; flags.
            let mut shape = [1024u64, mib * 256, 0, 1 << 32 | 0x20, 0];
            let status = cuda.timed("cuMipmappedArrayCreate", &[out(&mut place), out(&mut shape), 1]);
            ("cuMipmappedArrayDestroy", status, vec![place])
        }
        7 => return map(cuda, size),
        _ => return graph(cuda),
    };
    if status == 0 { Ok(vec![(name, free)]) } else { Err((status, Vec::new())) }
}

/// Physical memory whose handle is released while it is mapped.
fn map(cuda: &Client, size: usize) -> Result<Held, (i32, Held)> {
    let (mut handle, mut start, mut properties) = (0usize, 0usize, [1u32, 0, 1, 0, 0, 0, 0, 0]);
    match cuda.timed("cuMemCreate", &[out(&mut handle), size, out(&mut properties), 0]) {
        0 => {}
        status => return Err((status, Vec::new())),
    }
    assert_eq!(cuda.call("cuMemAddressReserve", &[out(&mut start), size, 0, 0, 0]), 0);
    assert_eq!(cuda.timed("cuMemMap", &[start, size, 0, handle, 0]), 0);
    assert_eq!(cuda.timed("cuMemRelease", &[handle]), 0);
    Ok(vec![("cuMemUnmap", vec![start, size]), ("cuMemAddressFree", vec![start, size])])
}

/// A launch of the graph, which leaves its memory in the driver's reserve.
fn graph(cuda: &Client) -> Result<Held, (i32, Held)> {
    let mut executable = 0usize;
    match cuda.timed("cuGraphInstantiateWithFlags", &[out(&mut executable), cuda.graph, 0]) {
        0 => {}
        status => return Err((status, Vec::new())),
    }
    let status = cuda.timed("cuGraphLaunch", &[executable, 0]);
    assert_eq!(cuda.timed("cuGraphExecDestroy", &[executable]), 0);
    let held = vec![("cuDeviceGraphMemTrim", vec![0])];
    if status == 0 { Ok(held) } else { Err((status, held)) }
}

/// A graph that allocates `mib` and frees it again.
pub fn graph_of(cuda: &Client, mib: u64) -> usize {
    let (mut graph, mut first, mut last, mut parameters) = (0usize, 0usize, 0usize, [0u64; 16]);
    (parameters[0], parameters[1], parameters[13]) = (1, 1, mib * MIB);
    assert_eq!(cuda.call("cuGraphCreate", &[out(&mut graph), 0]), 0);
    let arguments = [out(&mut first), graph, 0, 0, out(&mut parameters)];
    assert_eq!(cuda.call("cuGraphAddMemAllocNode", &arguments), 0);
    let pointer = usize::try_from(parameters[14]).unwrap();
    let arguments = [out(&mut last), graph, out(&mut first), 1, pointer];
    assert_eq!(cuda.call("cuGraphAddMemFreeNode", &arguments), 0);
    graph
}
