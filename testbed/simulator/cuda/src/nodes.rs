//! Graph nodes that the program adds itself, each from CUDA's parameter structure for its type.

use crate::abi::{Code, DevicePointer, Handle, In, Out, Result};
use crate::callback::HostCall;
use crate::copy::{Copy3d, Fill};
use crate::driver::{driver, locked};
use crate::graph::add;
use crate::launch::Kernel;
use crate::pool::PoolProperties;
use crate::work::{Opaque, Work};

/// CUDA_KERNEL_NODE_PARAMS, first form.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelV1 {
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    parameters: In<In<u8>>,
    extra: In<usize>,
}

/// CUDA_KERNEL_NODE_PARAMS, later forms.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelV2 {
    first: KernelV1,
    kernel: Handle,
    context: Handle,
}

/// CUDA_MEMSET_NODE_PARAMS of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FillNode {
    start: DevicePointer,
    pitch: usize,
    value: u32,
    element: u32,
    width: usize,
    rows: usize,
}

/// CUDA_HOST_NODE_PARAMS of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HostNode {
    function: Option<extern "C" fn(Out<std::ffi::c_void>)>,
    data: *mut std::ffi::c_void,
}

/// CUDA_MEM_ALLOC_NODE_PARAMS of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocateNode {
    pool: PoolProperties,
    access: u64,
    access_count: usize,
    length: usize,
    start: DevicePointer,
}

/// A copy in CUgraphNodeParams: flags, padding and context precede it.
#[repr(C)]
#[derive(Clone, Copy)]
struct CopyNode {
    flags: [i32; 2],
    context: Handle,
    copy: Copy3d,
}

/// Offset of the union in CUgraphNodeParams.
const UNION: usize = 16;

impl KernelV1 {
    fn work(&self) -> Result<Work> {
        let function = driver()?.functions.get(self.function)?;
        let kernel = Kernel::new(function, self.grid, self.block, self.shared, self.parameters, self.extra)?;
        Ok(Work::Kernel(kernel))
    }
}

impl KernelV2 {
    fn work(&self) -> Result<Work> {
        let function = if self.first.function == 0 { self.kernel } else { self.first.function };
        KernelV1 { function, ..self.first }.work()
    }
}

impl FillNode {
    fn work(&self) -> Result<Work> {
        let fill = Fill {
            start: self.start,
            pitch: self.pitch as u64,
            value: self.value,
            element: u64::from(self.element),
            width: self.width as u64,
            rows: self.rows as u64,
        };
        fill.check(driver()?)?;
        Ok(Work::Fill(fill))
    }
}

impl HostNode {
    fn work(&self) -> Result<Work> {
        Ok(Work::Host(HostCall::Plain(self.function.ok_or(Code::INVALID_VALUE)?, Opaque::new(self.data))))
    }
}

fn copy_work(copy: In<Copy3d>) -> Result<Work> {
    Ok(Work::Copy(copy.get()?.shape(driver()?)?))
}

/// Returns an allocation node's work. Its address is fixed now; each launch takes its memory.
fn allocate_work(parameters: Out<AllocateNode>) -> Result<Work> {
    let driver = driver()?;
    let mut wanted = parameters.get()?;
    if wanted.pool.location_kind != 1 || wanted.length == 0 {
        return Err(Code::INVALID_VALUE);
    }
    wanted.start = driver.graph_memory.place(driver, wanted.pool.location, wanted.length as u64)?;
    parameters.set(wanted)?;
    Ok(Work::Allocate(wanted.start))
}

/// Returns the parameters of an existing allocation node, with its address.
fn allocation_of(node: Handle) -> Result<AllocateNode> {
    let driver = driver()?;
    let mut start = None;
    driver.graphs.change(node, |found| {
        if let Work::Allocate(address) = found.work() {
            start = Some(*address);
        }
        Ok(())
    })?;
    let start = start.ok_or(Code::INVALID_VALUE)?;
    let found = *locked(&driver.heap).at(start).ok_or(Code::INVALID_VALUE)?;
    Ok(AllocateNode {
        pool: PoolProperties::of_gpu(found.ordinal),
        access: 0,
        access_count: 0,
        length: usize::try_from(found.length).map_err(|_| Code::INVALID_VALUE)?,
        start: found.start,
    })
}

fn child_work(graph: Handle) -> Result<Work> {
    Ok(Work::Graph(driver()?.graphs.copy(graph)?))
}

/// The work of a CUgraphNodeParams.
fn any_work(parameters: Out<u32>) -> Result<Work> {
    match parameters.get()? {
        0 => parameters.offset::<KernelV2>(UNION).get()?.work(),
        1 => {
            let node: CopyNode = parameters.offset(UNION).get()?;
            Ok(Work::Copy(node.copy.shape(driver()?)?))
        }
        2 => parameters.offset::<FillNode>(UNION).get()?.work(),
        3 => parameters.offset::<HostNode>(UNION).get()?.work(),
        4 => child_work(parameters.offset(UNION).get()?),
        5 => Ok(Work::Empty),
        6 => Ok(Work::Wait(parameters.offset(UNION).get()?)),
        7 => Ok(Work::Record(parameters.offset(UNION).get()?)),
        10 => allocate_work(parameters.offset(UNION)),
        11 => Ok(Work::Free(parameters.offset(UNION).get()?)),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

fn set_node(node: Handle, work: Work) -> Result {
    driver()?.graphs.change(node, |found| {
        if found.work().node_type() != work.node_type() {
            return Err(Code::INVALID_VALUE);
        }
        *found.work() = work;
        Ok(())
    })
}

exports! {
    fn cuGraphAddKernelNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, parameters: In<KernelV1>) {
        add(out, graph, depends, count, parameters.get()?.work()?)
    }
    fn cuGraphAddKernelNode_v2
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, parameters: In<KernelV2>) {
        add(out, graph, depends, count, parameters.get()?.work()?)
    }
    fn cuGraphAddMemcpyNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, copy: In<Copy3d>, _context: Handle) {
        add(out, graph, depends, count, copy_work(copy)?)
    }
    fn cuGraphAddMemsetNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, fill: In<FillNode>, _context: Handle) {
        add(out, graph, depends, count, fill.get()?.work()?)
    }
    fn cuGraphAddHostNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, host: In<HostNode>) {
        add(out, graph, depends, count, host.get()?.work()?)
    }
    fn cuGraphAddChildGraphNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, child: Handle) {
        add(out, graph, depends, count, child_work(child)?)
    }
    fn cuGraphChildGraphNodeGetGraph(node: Handle, out: Out<Handle>) {
        out.given()?;
        out.set(driver()?.graphs.child(node)?)
    }
    fn cuGraphAddEmptyNode(out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize) {
        add(out, graph, depends, count, Work::Empty)
    }
    fn cuGraphAddEventRecordNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, event: Handle) {
        driver()?.events.get(event)?;
        add(out, graph, depends, count, Work::Record(event))
    }
    fn cuGraphAddEventWaitNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, event: Handle) {
        driver()?.events.get(event)?;
        add(out, graph, depends, count, Work::Wait(event))
    }
    fn cuGraphAddMemAllocNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, parameters: Out<AllocateNode>) {
        out.given()?;
        add(out, graph, depends, count, allocate_work(parameters)?)
    }
    fn cuGraphMemAllocNodeGetParams(node: Handle, out: Out<AllocateNode>) {
        out.given()?;
        out.set(allocation_of(node)?)
    }
    fn cuGraphAddMemFreeNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, start: DevicePointer) {
        locked(&driver()?.heap).at(start).ok_or(Code::INVALID_VALUE)?;
        add(out, graph, depends, count, Work::Free(start))
    }
    fn cuGraphAddNode
    (out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, parameters: Out<u32>) {
        out.given()?;
        add(out, graph, depends, count, any_work(parameters)?)
    }
    fn cuGraphAddNode_v2 also cuGraphAddNode_v3 (
        out: Out<Handle>, graph: Handle, depends: In<Handle>, _edges: In<u8>, count: usize, parameters: Out<u32>,
    ) {
        out.given()?;
        add(out, graph, depends, count, any_work(parameters)?)
    }
    fn cuGraphKernelNodeSetParams(node: Handle, parameters: In<KernelV1>) {
        set_node(node, parameters.get()?.work()?)
    }
    fn cuGraphKernelNodeSetParams_v2(node: Handle, parameters: In<KernelV2>) {
        set_node(node, parameters.get()?.work()?)
    }
    fn cuGraphExecKernelNodeSetParams(executable: Handle, node: Handle, parameters: In<KernelV1>) {
        driver()?.graphs.replace(executable, node, parameters.get()?.work()?)
    }
    fn cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, parameters: In<KernelV2>) {
        driver()?.graphs.replace(executable, node, parameters.get()?.work()?)
    }
    fn cuGraphExecMemcpyNodeSetParams(executable: Handle, node: Handle, copy: In<Copy3d>, _context: Handle) {
        driver()?.graphs.replace(executable, node, copy_work(copy)?)
    }
    fn cuGraphExecMemsetNodeSetParams(executable: Handle, node: Handle, fill: In<FillNode>, _context: Handle) {
        driver()?.graphs.replace(executable, node, fill.get()?.work()?)
    }
    fn cuGraphExecHostNodeSetParams(executable: Handle, node: Handle, host: In<HostNode>) {
        driver()?.graphs.replace(executable, node, host.get()?.work()?)
    }
    fn cuGraphNodeSetParams(node: Handle, parameters: Out<u32>) {
        set_node(node, any_work(parameters)?)
    }
    fn cuGraphExecNodeSetParams(executable: Handle, node: Handle, parameters: Out<u32>) {
        driver()?.graphs.replace(executable, node, any_work(parameters)?)
    }
}
