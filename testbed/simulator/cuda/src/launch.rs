//! Launches: a kernel with its parameters, its duration, and the length of a GPU's queue.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use gpushare_simulator::session::Session;
use gpushare_simulator::state::Gpu;
use gpushare_simulator::timeline::{Asked, Mark};

use crate::abi::{Code, Handle, In, Out, Result, bytes_at};
use crate::driver::{Driver, driver, locked};
use crate::module::Function;
use crate::work::Work;

/// Launches of a process that a GPU holds at one time; the next one waits.
const DEPTH: usize = 1024;
/// Blocks that a multiprocessor runs at one time.
const BLOCKS_PER_CORE: u64 = 8;

/// A function with everything that a launch needs.
#[derive(Clone)]
pub struct Kernel {
    /// The function to run.
    pub function: Arc<Function>,
    /// Number of blocks in three dimensions.
    pub grid: [u32; 3],
    /// Number of threads of a block in three dimensions.
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    /// The parameters, in the layout that the function's image describes.
    pub parameters: Arc<[u8]>,
}

impl Kernel {
    /// Checks grid and block, and reads the parameters.
    pub fn new(
        function: Arc<Function>,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        parameters: In<In<u8>>,
        extra: In<usize>,
    ) -> Result<Self> {
        let threads = block.iter().try_fold(1_u32, |product, &extent| product.checked_mul(extent));
        if grid.contains(&0) || !threads.is_some_and(|count| (1..=1024).contains(&count)) {
            return Err(Code::INVALID_VALUE);
        }
        let parameters = read_parameters(&function, parameters, extra)?;
        Ok(Self { function, grid, block, shared, parameters })
    }

    /// Runs the function's program, if its image has one.
    pub fn run(&self, driver: &Driver) -> Result {
        self.function.run(driver, self)
    }

    /// Returns how long the launch keeps the GPU busy, in nanoseconds. A name can give the time. Otherwise it
    /// is a base time for each round in which the grid fills the multiprocessors of its context.
    pub fn duration(&self, driver: &Driver, gpu: &Gpu, cores: Option<u32>) -> u64 {
        if let Some(length) = self.function.length {
            return driver.shape.shaped(length);
        }
        let blocks: u64 = self.grid.iter().map(|&extent| u64::from(extent)).product();
        let cores = cores.unwrap_or(gpu.cores.load(Ordering::Relaxed));
        let room = u64::from(cores) * BLOCKS_PER_CORE;
        self.function.base.saturating_mul(blocks.div_ceil(room.max(1)))
    }
}

fn read_parameters(function: &Function, parameters: In<In<u8>>, extra: In<usize>) -> Result<Arc<[u8]>> {
    if !extra.is_null() {
        return read_extra(extra);
    }
    let Some(layout) = &function.parameters else { return Ok(Arc::default()) };
    let length = layout.iter().map(|parameter| parameter.offset + parameter.size).max().unwrap_or(0);
    let mut bytes = vec![0; length];
    for (index, parameter) in layout.iter().enumerate() {
        let value = parameters.at(index)?.list(parameter.size)?;
        bytes[parameter.offset..parameter.offset + parameter.size].copy_from_slice(&value);
    }
    Ok(bytes.into())
}

/// Reads parameters given in `extra`, a list of keys and values that ends with 0.
fn read_extra(extra: In<usize>) -> Result<Arc<[u8]>> {
    const BUFFER: usize = 1;
    const LENGTH: usize = 2;
    let (mut buffer, mut length) = (0, 0);
    for index in (0..).step_by(2) {
        match extra.at(index)? {
            0 => break,
            BUFFER => buffer = extra.at(index + 1)?,
            LENGTH => length = In::<usize>::from_address(extra.at(index + 1)? as u64).get()?,
            _ => return Err(Code::INVALID_VALUE),
        }
    }
    Ok(if length == 0 { Arc::default() } else { bytes_at(buffer as u64, length)?.into() })
}

/// Launches on one GPU that may not have ended.
#[derive(Default)]
pub struct Queue {
    marks: Mutex<VecDeque<Mark>>,
    /// Stamps whose moment is not known yet.
    pub asked: Asked,
}

impl Queue {
    /// Waits for the oldest launch while the queue is full.
    pub fn make_room(&self, gpu: &Gpu, session: &Session) {
        let mut marks = locked(&self.marks);
        if marks.len() < DEPTH {
            return;
        }
        while marks.front().is_some_and(|mark| mark.done(gpu, session)) {
            marks.pop_front();
        }
        if marks.len() >= DEPTH
            && let Some(oldest) = marks.pop_front()
        {
            drop(marks);
            oldest.wait(gpu, session);
        }
    }

    /// Adds a launch that ends at `mark`.
    pub fn add(&self, mark: Mark) {
        locked(&self.marks).push_back(mark);
    }
}

/// CUlaunchConfig of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Configuration {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: Handle,
    attribute_count: u32,
}

/// CUDA_LAUNCH_PARAMS of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OneOfMany {
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    parameters: In<In<u8>>,
}

fn none() -> In<usize> {
    In::from_address(0)
}

fn launch(
    function: Handle,
    [grid, block]: [[u32; 3]; 2],
    shared: u32,
    stream: Handle,
    parameters: In<In<u8>>,
    extra: In<usize>,
) -> Result {
    let driver = driver()?;
    let function = driver.functions.get(function)?;
    let kernel = Kernel::new(function, grid, block, shared, parameters, extra)?;
    driver.stream(stream)?.enqueue(driver, Work::Kernel(kernel))
}

fn launch_old(handle: Handle, grid: [u32; 3], stream: Handle) -> Result {
    let driver = driver()?;
    let function = driver.functions.get(handle)?;
    let old = locked(&function.old).clone();
    let kernel =
        Kernel { function, grid, block: old.block, shared: old.shared, parameters: old.parameters.into() };
    if grid.contains(&0) {
        return Err(Code::INVALID_VALUE);
    }
    driver.stream(stream)?.enqueue(driver, Work::Kernel(kernel))
}

fn set_parameter(handle: Handle, offset: i32, value: &[u8]) -> Result {
    let function = driver()?.functions.get(handle)?;
    let start = usize::try_from(offset).map_err(|_| Code::INVALID_VALUE)?;
    let end = start.checked_add(value.len()).filter(|&end| end <= 4096).ok_or(Code::INVALID_VALUE)?;
    let mut old = locked(&function.old);
    if old.parameters.len() < end {
        old.parameters.resize(end, 0);
    }
    old.parameters[start..end].copy_from_slice(value);
    Ok(())
}

exports! {
    fn cuLaunchKernel thread cuLaunchKernel_ptsz (
        function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: Handle, parameters: In<In<u8>>, extra: In<usize>,
    ) {
        launch(function, [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]], shared, stream, parameters, extra)
    }

    fn cuLaunchKernelEx thread cuLaunchKernelEx_ptsz
    (configuration: In<Configuration>, function: Handle, parameters: In<In<u8>>, extra: In<usize>) {
        let wanted = configuration.get()?;
        launch(function, [wanted.grid, wanted.block], wanted.shared, wanted.stream, parameters, extra)
    }

    fn cuLaunchCooperativeKernel thread cuLaunchCooperativeKernel_ptsz (
        function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: Handle, parameters: In<In<u8>>,
    ) {
        launch(function, [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]], shared, stream, parameters, none())
    }

    fn cuLaunchCooperativeKernelMultiDevice(list: In<OneOfMany>, count: u32, _flags: u32) {
        (0..count as usize).try_for_each(|index| {
            let one = list.at(index)?;
            launch(one.function, [one.grid, one.block], one.shared, one.stream, one.parameters, none())
        })
    }

    fn cuFuncSetBlockShape(function: Handle, x: i32, y: i32, z: i32) {
        let extent = |value: i32| u32::try_from(value).map_err(|_| Code::INVALID_VALUE);
        let block = [extent(x)?, extent(y)?, extent(z)?];
        locked(&driver()?.functions.get(function)?.old).block = block;
        Ok(())
    }

    fn cuFuncSetSharedSize(function: Handle, bytes: u32) {
        locked(&driver()?.functions.get(function)?.old).shared = bytes;
        Ok(())
    }

    fn cuParamSetSize(function: Handle, bytes: u32) {
        locked(&driver()?.functions.get(function)?.old).parameters.resize((bytes as usize).min(4096), 0);
        Ok(())
    }

    fn cuParamSeti(function: Handle, offset: i32, value: u32) {
        set_parameter(function, offset, &value.to_le_bytes())
    }

    fn cuParamSetf(function: Handle, offset: i32, value: f32) {
        set_parameter(function, offset, &value.to_le_bytes())
    }

    fn cuParamSetv(function: Handle, offset: i32, value: In<u8>, length: u32) {
        set_parameter(function, offset, &value.list(length as usize)?)
    }

    fn cuLaunch(function: Handle) {
        launch_old(function, [1, 1, 1], 0)
    }

    fn cuLaunchGrid(function: Handle, width: i32, height: i32) {
        let extent = |value: i32| u32::try_from(value).map_err(|_| Code::INVALID_VALUE);
        launch_old(function, [extent(width)?, extent(height)?, 1], 0)
    }

    fn cuLaunchGridAsync(function: Handle, width: i32, height: i32, stream: Handle) {
        let extent = |value: i32| u32::try_from(value).map_err(|_| Code::INVALID_VALUE);
        launch_old(function, [extent(width)?, extent(height)?, 1], stream)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor
    (out: Out<i32>, function: Handle, threads: i32, _shared: usize) {
        driver()?.functions.get(function)?;
        out.set(blocks_per_core(threads)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
    (out: Out<i32>, function: Handle, threads: i32, _shared: usize, _flags: u32) {
        driver()?.functions.get(function)?;
        out.set(blocks_per_core(threads)?)
    }

    fn cuOccupancyMaxPotentialBlockSize
    (grid: Out<i32>, block: Out<i32>, function: Handle, _shared_of: *mut c_void, _shared: usize, limit: i32) {
        best_block(grid, block, function, limit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags (
        grid: Out<i32>, block: Out<i32>, function: Handle, _shared_of: *mut c_void, _shared: usize, limit: i32,
        _flags: u32,
    ) {
        best_block(grid, block, function, limit)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(out: Out<usize>, function: Handle, blocks: i32, _threads: i32) {
        driver()?.functions.get(function)?;
        let blocks = usize::try_from(blocks).ok().filter(|&count| count > 0).ok_or(Code::INVALID_VALUE)?;
        out.set((228 << 10) / blocks)
    }
}

fn blocks_per_core(threads: i32) -> Result<i32> {
    if threads < 1 { Err(Code::INVALID_VALUE) } else { Ok((2048 / threads).min(32)) }
}

fn best_block(grid: Out<i32>, block: Out<i32>, function: Handle, limit: i32) -> Result {
    let driver = driver()?;
    driver.functions.get(function)?;
    let cores = driver.gpu(crate::context::current()?.ordinal)?.cores.load(Ordering::Relaxed);
    block.set(if limit > 0 { limit.min(1024) } else { 1024 })?;
    grid.set(i32::try_from(cores * 2).unwrap_or(i32::MAX))
}
