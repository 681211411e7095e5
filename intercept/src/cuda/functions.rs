//! Every driver function that we hook or call, with its signature. Functions newer than driver 535 have the
//! signatures of the public headers. Where a `_v2` exists, the function without a suffix is the 32-bit
//! original.
//!
//! Functions that have no hook, although their names suggest it:
//! - `cuIpcOpenMemHandle`, `cuIpcCloseMemHandle`, `cuMemPoolImportPointer`: memory of another process, which
//!   is charged for it. Its pointer stays unknown, so freeing it goes to the driver.
//! - `cuMulticastCreate`: an object without memory of its own. Only physical memory is bound to it.
//! - `cuGraphAddMemAllocNode`, `cuGraphAddNode*`, `cuGraphExecUpdate*`: see `graph`.
//! - `cuMemGetMemPool`, `cuMemGetDefaultMemPool`: a pool becomes known at its first allocation.
//! - `cuMemDiscardBatchAsync`: managed memory is charged in full, wherever its pages are.
//! - `cuCheckpointProcess*`: a checkpointed process keeps its charge, and may be restored.
//! - `cuMemAllocHost`, `cuMemHostAlloc`, `cuMemHostRegister`: host memory.

use core::ffi::{c_char, c_void};

/// `CUresult`.
pub type Status = i32;
pub(super) type Device = i32;
pub(super) type Context = usize;
pub(super) type Stream = usize;
pub(super) type Pool = usize;
pub(super) type Graph = usize;

pub(super) const SUCCESS: Status = 0;
pub(super) const OUT_OF_MEMORY: Status = 2;
/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: Status = 500;

crate::driver_functions! {
    missing: NOT_FOUND;
    hooked {
        cuInit(flags: u32);
        cuGetProcAddress(name: *const c_char, function: *mut usize, version: i32, flags: u64);
        cuGetProcAddress_v2(name: *const c_char, function: *mut usize, version: i32, flags: u64, found: *mut i32);

        cuDevicePrimaryCtxRetain(context: *mut Context, device: Device);
        cuDevicePrimaryCtxRelease(device: Device);
        cuDevicePrimaryCtxRelease_v2(device: Device);
        cuDevicePrimaryCtxReset(device: Device);
        cuDevicePrimaryCtxReset_v2(device: Device);
        cuCtxCreate(context: *mut Context, flags: u32, device: Device);
        cuCtxCreate_v2(context: *mut Context, flags: u32, device: Device);
        cuCtxCreate_v3(context: *mut Context, affinity: *mut c_void, count: i32, flags: u32, device: Device);
        cuCtxCreate_v4(context: *mut Context, parameters: *mut c_void, flags: u32, device: Device);
        cuCtxDestroy(context: Context);
        cuCtxDestroy_v2(context: Context);
        cuCtxDetach(context: Context);
        cuGLCtxCreate(context: *mut Context, flags: u32, device: Device);
        cuGLCtxCreate_v2(context: *mut Context, flags: u32, device: Device);
        cuVDPAUCtxCreate(context: *mut Context, flags: u32, device: Device, vdpau: u32, lookup: *mut c_void);
        cuVDPAUCtxCreate_v2(context: *mut Context, flags: u32, device: Device, vdpau: u32, lookup: *mut c_void);
        cuGreenCtxCreate(green: *mut Context, resources: *mut c_void, device: Device, flags: u32);
        cuGreenCtxDestroy(green: Context);
        cuCtxFromGreenCtx(context: *mut Context, green: Context);
        cuCtxSetLimit(limit: i32, value: usize);

        cuMemGetInfo(free: *mut u32, total: *mut u32);
        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuDeviceTotalMem(bytes: *mut u32, device: Device);
        cuDeviceTotalMem_v2(bytes: *mut usize, device: Device);

        cuMemAlloc(pointer: *mut u32, bytes: u32);
        cuMemAlloc_v2(pointer: *mut u64, bytes: usize);
        cuMemAllocPitch(pointer: *mut u32, pitch: *mut u32, width: u32, height: u32, element: u32);
        cuMemAllocPitch_v2(pointer: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32);
        cuMemAllocManaged(pointer: *mut u64, bytes: usize, flags: u32);
        cuMemAdvise(address: u64, bytes: usize, advice: i32, device: Device);
        cuMemAdvise_v2(address: u64, bytes: usize, advice: i32, location: u64);
        cuMemPrefetchAsync(address: u64, bytes: usize, device: Device, stream: Stream);
        cuMemPrefetchAsync_ptsz(address: u64, bytes: usize, device: Device, stream: Stream);
        cuMemPrefetchAsync_v2(address: u64, bytes: usize, location: u64, flags: u32, stream: Stream);
        cuMemPrefetchAsync_v2_ptsz(address: u64, bytes: usize, location: u64, flags: u32, stream: Stream);
        cuMemDiscardAndPrefetchBatchAsync(addresses: *mut u64, sizes: *mut usize, count: usize, locations: *mut u64, indexes: *mut usize, location_count: usize, flags: u64, stream: Stream);
        cuMemDiscardAndPrefetchBatchAsync_ptsz(addresses: *mut u64, sizes: *mut usize, count: usize, locations: *mut u64, indexes: *mut usize, location_count: usize, flags: u64, stream: Stream);
        cuMemPrefetchBatchAsync(addresses: *mut u64, sizes: *mut usize, count: usize, locations: *mut u64, indexes: *mut usize, location_count: usize, flags: u64, stream: Stream);
        cuMemPrefetchBatchAsync_ptsz(addresses: *mut u64, sizes: *mut usize, count: usize, locations: *mut u64, indexes: *mut usize, location_count: usize, flags: u64, stream: Stream);
        cuMemFree(pointer: u32);
        cuMemFree_v2(pointer: u64);

        cuMemAllocAsync(pointer: *mut u64, bytes: usize, stream: Stream);
        cuMemAllocAsync_ptsz(pointer: *mut u64, bytes: usize, stream: Stream);
        cuMemAllocFromPoolAsync(pointer: *mut u64, bytes: usize, pool: Pool, stream: Stream);
        cuMemAllocFromPoolAsync_ptsz(pointer: *mut u64, bytes: usize, pool: Pool, stream: Stream);
        cuMemFreeAsync(pointer: u64, stream: Stream);
        cuMemFreeAsync_ptsz(pointer: u64, stream: Stream);
        cuMemPoolCreate(pool: *mut Pool, properties: *const c_void);
        cuMemPoolDestroy(pool: Pool);
        cuMemPoolTrimTo(pool: Pool, bytes: usize);
        cuMemPoolSetAttribute(pool: Pool, attribute: i32, value: *mut c_void);
        cuMemPoolImportFromShareableHandle(pool: *mut Pool, handle: *mut c_void, kind: i32, flags: u64);
        cuDeviceSetMemPool(device: Device, pool: Pool);
        cuMemSetMemPool(location: *mut c_void, kind: i32, pool: Pool);
        cuCtxSynchronize();
        cuCtxSynchronize_v2(context: Context);
        cuStreamSynchronize(stream: Stream);
        cuStreamSynchronize_ptsz(stream: Stream);
        cuEventSynchronize(event: usize);
        cuStreamDestroy(stream: Stream);
        cuStreamDestroy_v2(stream: Stream);

        cuMemCreate(handle: *mut u64, bytes: usize, properties: *const c_void, flags: u64);
        cuMemRelease(handle: u64);
        cuMemExportToShareableHandle(shared: *mut c_void, handle: u64, kind: i32, flags: u64);
        cuMemImportFromShareableHandle(handle: *mut u64, shared: *mut c_void, kind: i32);
        cuMemRetainAllocationHandle(handle: *mut u64, address: u64);
        cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
        cuMemUnmap(address: u64, bytes: usize);
        cuMemMapArrayAsync(list: *mut c_void, count: u32, stream: Stream);
        cuMemMapArrayAsync_ptsz(list: *mut c_void, count: u32, stream: Stream);
        cuMulticastBindMem(object: u64, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64);
        cuMulticastBindMem_v2(object: u64, device: Device, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64);
        cuMulticastBindAddr(object: u64, at: usize, address: u64, bytes: usize, flags: u64);
        cuMulticastBindAddr_v2(object: u64, device: Device, at: usize, address: u64, bytes: usize, flags: u64);
        cuMulticastUnbind(object: u64, device: Device, at: usize, bytes: usize);

        cuArrayCreate(array: *mut usize, shape: *const c_void);
        cuArrayCreate_v2(array: *mut usize, shape: *const c_void);
        cuArray3DCreate(array: *mut usize, shape: *const c_void);
        cuArray3DCreate_v2(array: *mut usize, shape: *const c_void);
        cuArrayDestroy(array: usize);
        cuMipmappedArrayCreate(array: *mut usize, shape: *const c_void, levels: u32);
        cuMipmappedArrayDestroy(array: usize);

        cuImportExternalMemory(memory: *mut usize, description: *const c_void);
        cuDestroyExternalMemory(memory: usize);

        cuGraphInstantiate(executable: *mut usize, graph: Graph, bad: *mut usize, text: *mut c_char, length: usize);
        cuGraphInstantiate_v2(executable: *mut usize, graph: Graph, bad: *mut usize, text: *mut c_char, length: usize);
        cuGraphInstantiateWithFlags(executable: *mut usize, graph: Graph, flags: u64);
        cuGraphInstantiateWithParams(executable: *mut usize, graph: Graph, parameters: *mut c_void);
        cuGraphInstantiateWithParams_ptsz(executable: *mut usize, graph: Graph, parameters: *mut c_void);
        cuGraphExecDestroy(executable: usize);
        cuGraphUpload(executable: usize, stream: Stream);
        cuGraphUpload_ptsz(executable: usize, stream: Stream);
        cuGraphLaunch(executable: usize, stream: Stream);
        cuGraphLaunch_ptsz(executable: usize, stream: Stream);
        cuDeviceGraphMemTrim(device: Device);

        cuLaunchKernel(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32, stream: Stream, parameters: *mut c_void, extra: *mut c_void);
        cuLaunchKernel_ptsz(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32, stream: Stream, parameters: *mut c_void, extra: *mut c_void);
        cuLaunchKernelEx(configuration: *const c_void, function: usize, parameters: *mut c_void, extra: *mut c_void);
        cuLaunchKernelEx_ptsz(configuration: *const c_void, function: usize, parameters: *mut c_void, extra: *mut c_void);
        cuLaunchCooperativeKernel(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32, stream: Stream, parameters: *mut c_void);
        cuLaunchCooperativeKernel_ptsz(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32, stream: Stream, parameters: *mut c_void);
        cuLaunchCooperativeKernelMultiDevice(list: *mut c_void, count: u32, flags: u32);
        cuFuncSetBlockShape(function: usize, x: i32, y: i32, z: i32);
        cuLaunch(function: usize);
        cuLaunchGrid(function: usize, width: i32, height: i32);
        cuLaunchGridAsync(function: usize, width: i32, height: i32, stream: Stream);

        cuStreamBeginCapture(stream: Stream);
        cuStreamBeginCapture_ptsz(stream: Stream);
        cuStreamBeginCapture_v2(stream: Stream, mode: i32);
        cuStreamBeginCapture_v2_ptsz(stream: Stream, mode: i32);
        cuStreamBeginCaptureToGraph(stream: Stream, graph: Graph, after: *const usize, edges: *const c_void, count: usize, mode: i32);
        cuStreamBeginCaptureToGraph_ptsz(stream: Stream, graph: Graph, after: *const usize, edges: *const c_void, count: usize, mode: i32);
        cuStreamBeginCaptureToCig(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize);
        cuStreamBeginCaptureToCig_ptsz(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize);
        cuStreamBeginRecaptureToGraph(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize);
        cuStreamBeginRecaptureToGraph_ptsz(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize);
        cuStreamEndCapture(stream: Stream, graph: *mut Graph);
        cuStreamEndCapture_ptsz(stream: Stream, graph: *mut Graph);
        cuStreamEndCaptureToCig(stream: Stream);
        cuStreamEndCaptureToCig_ptsz(stream: Stream);
    }
    used {
        cuStreamQuery(stream: Stream);
        cuStreamQuery_ptsz(stream: Stream);
        cuEventCreate(event: *mut usize, flags: u32);
        cuEventDestroy_v2(event: usize);
        cuEventRecord(event: usize, stream: Stream);
        cuEventRecord_ptsz(event: usize, stream: Stream);
        cuEventQuery(event: usize);
        cuEventElapsedTime(milliseconds: *mut f32, begin: usize, end: usize);
        cuEventElapsedTime_v2(milliseconds: *mut f32, begin: usize, end: usize);
        cuCtxGetCurrent(context: *mut Context);
        cuCtxGetDevice(device: *mut Device);
        cuCtxGetLimit(value: *mut usize, limit: i32);
        cuCtxPushCurrent_v2(context: Context);
        cuCtxPopCurrent_v2(context: *mut Context);
        cuDeviceGet(device: *mut Device, ordinal: i32);
        cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: Device);
        cuDeviceGetCount(count: *mut i32);
        cuDeviceGetUuid(uuid: *mut [u8; 16], device: Device);
        cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: Device);
        cuDevicePrimaryCtxGetState(device: Device, flags: *mut u32, active: *mut i32);
        cuDeviceGetMemPool(pool: *mut Pool, device: Device);
        cuDeviceGetDefaultMemPool(pool: *mut Pool, device: Device);
        cuPointerGetAttribute(value: *mut c_void, attribute: i32, pointer: u64);
        cuMemPoolGetAttribute(pool: Pool, attribute: i32, value: *mut c_void);
        cuStreamIsCapturing(stream: Stream, capturing: *mut i32);
        cuStreamIsCapturing_ptsz(stream: Stream, capturing: *mut i32);
        cuStreamGetCtx(stream: Stream, context: *mut Context);
        cuStreamGetGreenCtx(stream: Stream, green: *mut Context);
        cuThreadExchangeStreamCaptureMode(mode: *mut i32);
        cuGraphGetNodes(graph: Graph, nodes: *mut usize, count: *mut usize);
        cuGraphNodeGetType(node: usize, kind: *mut i32);
        cuGraphChildGraphNodeGetGraph(node: usize, graph: *mut Graph);
        cuGraphMemAllocNodeGetParams(node: usize, node_parameters: *mut c_void);
        cuDeviceGetGraphMemAttribute(device: Device, attribute: i32, value: *mut c_void);
    }
}

/// The number of the driver's function `name`.
pub(super) const fn number(name: &str) -> usize {
    let mut number = 0;
    while !is_same(NAMES[number].as_bytes(), name.as_bytes()) {
        number += 1;
    }
    number
}

const fn is_same(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Case 35: hooks compiled with the Rust calling convention. This cannot compile here: `hook` lists each
    /// hook as an `unsafe extern "C"` function with the arguments of the driver's function.
    #[test]
    fn case_35_every_hooked_name_has_a_hook_of_its_own_in_the_c_convention() {
        let mut addresses: Vec<_> = (0..HOOKED.len()).map(|number| hook(number).unwrap()).collect();
        assert_eq!(hook(HOOKED.len()), None, "functions that are only called");
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), HOOKED.len(), "two names share a hook");
    }
}
