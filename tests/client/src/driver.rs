//! The driver's functions as this program calls them, and a context.

use anyhow::{Result, bail};

/// Status `CUDA_SUCCESS`.
pub const SUCCESS: i32 = 0;
/// Status `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: i32 = 2;
/// Status `CUDA_ERROR_NOT_FOUND`. It also stands for a function that the driver is too old to have.
const NOT_FOUND: i32 = 500;
/// The name by which the loader finds the driver.
pub const SONAME: &str = "libcuda.so.1";

/// The launch of a kernel for `cuLaunchKernelEx`: grid, block and shared bytes, stream, attributes.
#[repr(C)]
pub struct Configuration {
    pub extents: [u32; 7],
    pub stream: usize,
    pub attributes: usize,
    pub attribute_count: u32,
}

/// `CUDA_KERNEL_NODE_PARAMS` of version 1.
#[repr(C)]
pub struct KernelNode {
    pub function: usize,
    pub extents: [u32; 7],
    pub parameters: usize,
    pub extra: usize,
}

crate::functions! {
    /// The functions of libcuda that this program calls.
    Driver, absent = NOT_FOUND;
    init = cuInit(flags: u32);
    device_get = cuDeviceGet(device: &mut i32, ordinal: i32);
    context_retain = cuDevicePrimaryCtxRetain(context: &mut usize, device: i32);
    context_release = cuDevicePrimaryCtxRelease_v2(device: i32);
    context_set = cuCtxSetCurrent(context: usize);
    entry = cuGetProcAddress(
        name: *const std::ffi::c_char, function: &mut *mut std::ffi::c_void, version: i32, flags: u64
    );
    synchronize = cuCtxSynchronize();
    total = cuDeviceTotalMem_v2(bytes: &mut usize, device: i32);
    attribute = cuDeviceGetAttribute(value: &mut i32, number: u32, device: i32);
    copy_in = cuMemcpyHtoD_v2(to: u64, from: *const f32, bytes: usize);
    copy_out = cuMemcpyDtoH_v2(to: *mut f32, from: u64, bytes: usize);
    free_async = cuMemFreeAsync(pointer: u64, stream: usize);
    stream_destroy = cuStreamDestroy_v2(stream: usize);
    memory = cuMemGetInfo_v2(free: &mut usize, total: &mut usize);
    allocate = cuMemAlloc_v2(pointer: &mut u64, bytes: usize);
    allocate_pitch = cuMemAllocPitch_v2(pointer: &mut u64, pitch: &mut usize, width: usize, height: usize, element: u32);
    allocate_managed = cuMemAllocManaged(pointer: &mut u64, bytes: usize, flags: u32);
    free = cuMemFree_v2(pointer: u64);
    prefetch = cuMemPrefetchAsync(pointer: u64, bytes: usize, device: i32, stream: usize);
    allocate_async = cuMemAllocAsync(pointer: &mut u64, bytes: usize, stream: usize);
    pool_create = cuMemPoolCreate(pool: &mut usize, properties: &[u64; 11]);
    allocate_from_pool = cuMemAllocFromPoolAsync(pointer: &mut u64, bytes: usize, pool: usize, stream: usize);
    physical_create = cuMemCreate(handle: &mut u64, bytes: usize, properties: &[u64; 4], flags: u64);
    physical_release = cuMemRelease(handle: u64);
    range_reserve = cuMemAddressReserve(address: &mut u64, bytes: usize, alignment: usize, wanted: u64, flags: u64);
    range_map = cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    array_create = cuArrayCreate_v2(array: &mut usize, shape: &[u64; 3]);
    mipmap_create = cuMipmappedArrayCreate(array: &mut usize, shape: &[u64; 5], levels: u32);
    stream_create = cuStreamCreate(stream: &mut usize, flags: u32);
    stream_synchronize = cuStreamSynchronize(stream: usize);
    event_create = cuEventCreate(event: &mut usize, flags: u32);
    event_record = cuEventRecord(event: usize, stream: usize);
    event_synchronize = cuEventSynchronize(event: usize);
    module_load = cuModuleLoadData(module: &mut usize, image: *const std::ffi::c_char);
    function_get = cuModuleGetFunction(function: &mut usize, module: usize, name: *const std::ffi::c_char);
    launch = cuLaunchKernel(
        function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32,
        stream: usize, parameters: usize, extra: usize
    );
    launch_cooperative = cuLaunchCooperativeKernel(
        function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32,
        stream: usize, parameters: usize
    );
    launch_ex = cuLaunchKernelEx(configuration: &Configuration, function: usize, parameters: usize, extra: usize);
    graph_create = cuGraphCreate(graph: &mut usize, flags: u32);
    graph_add_kernel = cuGraphAddKernelNode(
        node: &mut usize, graph: usize, depends: *const usize, count: usize, kernel: &KernelNode
    );
    graph_add_allocation = cuGraphAddMemAllocNode(
        node: &mut usize, graph: usize, depends: usize, count: usize, parameters: &mut [u64; 16]
    );
    graph_instantiate = cuGraphInstantiateWithFlags(executable: &mut usize, graph: usize, flags: u64);
    graph_launch = cuGraphLaunch(executable: usize, stream: usize);
}

/// Makes an error of a driver's status that is not success. `name` is the function that returned it.
///
/// # Errors
/// When the status is not success; the text has the name of the function.
pub fn done(status: i32, name: &str) -> Result<()> {
    if status == SUCCESS {
        return Ok(());
    }
    bail!("{name} answered {status}")
}

impl Driver {
    /// Opens the driver `library`, with the first GPU's primary context current.
    ///
    /// # Errors
    /// When there is no driver, no GPU or no context.
    pub fn start(library: &str) -> Result<Self> {
        Ok(Self::start_in(library)?.0)
    }

    /// As [`Driver::start`], and returns the context's handle for other threads.
    ///
    /// # Errors
    /// As [`Driver::start`].
    pub fn start_in(library: &str) -> Result<(Self, usize)> {
        let driver = Self::open(library)?;
        done((driver.init)(0), "cuInit")?;
        let (mut device, mut context) = (0, 0);
        done((driver.device_get)(&mut device, 0), "cuDeviceGet")?;
        done((driver.context_retain)(&mut context, device), "cuDevicePrimaryCtxRetain")?;
        done((driver.context_set)(context), "cuCtxSetCurrent")?;
        Ok((driver, context))
    }

    /// Makes a stream that does not wait for the default one.
    ///
    /// # Errors
    /// When the driver makes none.
    pub fn stream(&self) -> Result<usize> {
        let mut stream = 0;
        done((self.stream_create)(&mut stream, 1), "cuStreamCreate")?;
        Ok(stream)
    }

    /// A property of the first GPU, by its number in CUDA's list of device attributes.
    ///
    /// # Errors
    /// When the driver gives no answer.
    pub fn property(&self, number: u32) -> Result<i32> {
        let mut value = 0;
        done((self.attribute)(&mut value, number, 0), "cuDeviceGetAttribute")?;
        Ok(value)
    }

    /// Free and total memory in bytes.
    ///
    /// # Errors
    /// When the driver gives no answer.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        done((self.memory)(&mut free, &mut total), "cuMemGetInfo")?;
        Ok((free, total))
    }
}
