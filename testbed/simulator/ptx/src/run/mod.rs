//! A launch: what is fixed for all its threads, and the order in which blocks run.
//!
//! Blocks run one after the other. A block that does not end within its turn is set aside and runs again
//! later. Blocks that wait for each other (cooperative launches, flags in memory) therefore end too.

mod block;
mod host;
mod thread;
mod warp;

use std::collections::{HashMap, VecDeque};

use crate::code::{Function, Link, Slot, Special};
use crate::error::{Fault, PtxError};
use crate::{Kernel, Module, memory};
use block::{Block, Turn};

/// Most blocks that are set aside at a time. On a GPU too, only resident blocks can wait for each other.
const RESIDENT: usize = 1024;

/// Most threads of a block, and most bytes of its shared memory, that any current GPU allows.
const MAX_THREADS: u64 = 1024;
const MAX_SHARED: usize = 228 << 10;

/// Eight-byte words that a cooperative grid gets for its barrier; CUDA's headers use the first.
const WORKSPACE: usize = 64;

/// Bytes of a thread's stack where calls are recursive or through addresses, so that their depth is unknown.
const DEEP_STACK: usize = 64 << 10;

/// A function's slots with the values that a launch knows, and lists of those that each frame fills in.
#[derive(Debug, Default)]
struct Prepared {
    slots: Vec<u64>,
    /// Slots that hold addresses in the frame's memory, with their offsets there.
    frame: Vec<(Slot, u32)>,
    special: Vec<(Slot, Special)>,
}

/// What is the same for all threads of a launch.
struct Launch<'m> {
    functions: &'m [Function],
    prepared: Vec<Option<Prepared>>,
    entry: u32,
    grid: [u32; 3],
    block: [u32; 3],
    shared_static: usize,
    shared_dynamic: u32,
    /// Size of each thread's stack, bytes.
    stack: usize,
    step_limit: u64,
    /// Address of the workspace for [`Special::WorkspaceLow`], zeros at first.
    workspace: u64,
}

/// Why a thread failed, and where.
struct Failure {
    function: u32,
    at: u32,
    block: [u32; 3],
    thread: [u32; 3],
    fault: Fault,
}

/// The arguments of [`Module::run`].
pub(crate) struct Request<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) params: &'a [u8],
    pub(crate) addresses: &'a dyn Fn(&str) -> Option<u64>,
}

/// Runs a kernel to its end.
///
/// # Safety
/// The contract of [`Module::run`].
pub(crate) unsafe fn run(module: &Module, request: &Request<'_>) -> Result<(), PtxError> {
    let kernel =
        module.kernels.get(request.kernel).ok_or_else(|| PtxError::NoKernel(request.kernel.to_owned()))?;
    check(kernel, request)?;
    // SAFETY: the caller vouches for the variables' addresses.
    unsafe { resolve_pending(module, request) }?;
    // Eight-byte words keep every parameter aligned; a copy keeps them stable while the launch runs.
    let mut parameters = vec![0_u64; request.params.len().div_ceil(8) + 1];
    for (word, bytes) in parameters.iter_mut().zip(request.params.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
    }
    let mut workspace = [0_u64; WORKSPACE];
    let mut launch = prepare(module, kernel, request, address_of(parameters.as_mut_ptr()))?;
    launch.workspace = address_of(workspace.as_mut_ptr());
    // SAFETY: the caller's contract, passed on; `parameters` and `workspace` outlive the launch.
    let ended = unsafe { launch.blocks() };
    drop((parameters, workspace));
    ended.map_err(|failure| PtxError::Fault {
        kernel: request.kernel.to_owned(),
        line: module.functions[failure.function as usize].lines[failure.at as usize],
        block: failure.block,
        thread: failure.thread,
        fault: failure.fault,
    })
}

/// A pointer's address, exposed because threads make a pointer of it again.
fn address_of(pointer: *mut u64) -> u64 {
    u64::try_from(pointer.expose_provenance()).unwrap_or(u64::MAX)
}

fn check(kernel: &Kernel, request: &Request<'_>) -> Result<(), PtxError> {
    let refuse = |what: String| Err(PtxError::BadLaunch { kernel: request.kernel.to_owned(), what });
    let threads: u64 = request.block.iter().map(|&size| u64::from(size)).product();
    if threads == 0 || request.grid.contains(&0) {
        return refuse(format!("grid {:?} of blocks {:?} is empty", request.grid, request.block));
    }
    if threads > MAX_THREADS {
        return refuse(format!("{threads} threads in a block, at most {MAX_THREADS}"));
    }
    let needed = kernel.parameters.last().map_or(0, |last| last.offset + last.size);
    if request.params.len() < needed {
        return refuse(format!("{needed} bytes of parameters expected, {} given", request.params.len()));
    }
    Ok(())
}

/// Replaces marks in initial values by addresses, where that has not happened since the values were loaded.
///
/// # Safety
/// The addresses of variables are mapped.
unsafe fn resolve_pending(module: &Module, request: &Request<'_>) -> Result<(), PtxError> {
    let globals = &module.variables.globals;
    for pending in &module.variables.pending {
        let (holder, target) = (&globals[pending.holder as usize], &globals[pending.target as usize]);
        let Some(place) = (request.addresses)(&holder.name) else { continue };
        let place = place.wrapping_add(u64::try_from(pending.at).unwrap_or(0));
        // SAFETY: `place` lies within the variable, which is mapped.
        if unsafe { memory::load(place, 8, 1) } != Ok(pending.mark) {
            continue;
        }
        let target =
            (request.addresses)(&target.name).ok_or_else(|| PtxError::NoAddress(target.name.clone()))?;
        // SAFETY: as above; the load has just shown that the bytes are there.
        unsafe { memory::store(place, 8, 1, target.wrapping_add(pending.offset)) }
            .map_err(|_| PtxError::NoAddress(holder.name.clone()))?;
    }
    Ok(())
}

fn prepare<'m>(
    module: &'m Module,
    kernel: &Kernel,
    request: &Request<'_>,
    parameters: u64,
) -> Result<Launch<'m>, PtxError> {
    let (shared, shared_static) = layout(module, kernel);
    let total = shared_static + usize::try_from(request.shared_bytes).unwrap_or(usize::MAX >> 1);
    if total > MAX_SHARED {
        let what = format!("{total} bytes of shared memory, at most {MAX_SHARED}");
        return Err(PtxError::BadLaunch { kernel: request.kernel.to_owned(), what });
    }
    let mut prepared: Vec<Option<Prepared>> = module.functions.iter().map(|_| None).collect();
    for &number in &kernel.reachable {
        let function = &module.functions[number as usize];
        let mut ready = Prepared { slots: function.slots.clone(), ..Prepared::default() };
        for &(slot, link) in &function.links {
            ready.slots[slot as usize] = match link {
                Link::Variable(number) => {
                    let name = &module.variables.globals[number as usize].name;
                    (request.addresses)(name).ok_or_else(|| PtxError::NoAddress(name.clone()))?
                }
                Link::Shared(number) => shared.get(&number).copied().unwrap_or(0),
                Link::Parameter(offset) => parameters + u64::from(offset),
                Link::Frame(offset) => {
                    ready.frame.push((slot, offset));
                    continue;
                }
                Link::Special(special) => {
                    ready.special.push((slot, special));
                    continue;
                }
            };
        }
        prepared[number as usize] = Some(ready);
    }
    Ok(Launch {
        functions: &module.functions,
        prepared,
        entry: kernel.function,
        grid: request.grid,
        block: request.block,
        shared_static,
        shared_dynamic: request.shared_bytes,
        stack: stack(module, kernel),
        step_limit: module.step_limit,
        workspace: 0,
    })
}

/// Offsets of the shared variables that the kernel uses, and the offset at which dynamic shared memory
/// begins.
fn layout(module: &Module, kernel: &Kernel) -> (HashMap<u32, u64>, usize) {
    let links = kernel.reachable.iter().flat_map(|&number| &module.functions[number as usize].links);
    let mut used: Vec<u32> = links
        .filter_map(|(_, link)| match link {
            Link::Shared(number) => Some(*number),
            _ => None,
        })
        .collect();
    used.sort_unstable();
    used.dedup();
    let variable = |number: u32| module.variables.shared[number as usize];
    let (mut offsets, mut end) = (HashMap::new(), 0_usize);
    for &number in used.iter().filter(|&&number| !variable(number).dynamic) {
        let offset = end.next_multiple_of(variable(number).align);
        end = offset + variable(number).size;
        offsets.insert(number, u64::try_from(offset).unwrap_or(0));
    }
    for &number in used.iter().filter(|&&number| variable(number).dynamic) {
        end = end.next_multiple_of(variable(number).align.max(16));
        offsets.insert(number, 0);
    }
    let start = u64::try_from(end).unwrap_or(0);
    for &number in used.iter().filter(|&&number| variable(number).dynamic) {
        offsets.insert(number, start);
    }
    (offsets, end)
}

/// Bytes of stack that a thread gets: the sum of all frames, and more where calls may nest deeper.
fn stack(module: &Module, kernel: &Kernel) -> usize {
    let all: usize =
        kernel.reachable.iter().map(|&number| module.functions[number as usize].memory as usize).sum();
    let deep =
        kernel.recursive || kernel.reachable.iter().any(|&number| module.functions[number as usize].indirect);
    (if deep { all.max(DEEP_STACK) + DEEP_STACK } else { all }).next_multiple_of(16)
}

impl Launch<'_> {
    /// # Safety
    /// The contract of [`Module::run`].
    unsafe fn blocks(&self) -> Result<(), Box<Failure>> {
        let total: u64 = self.grid.iter().map(|&size| u64::from(size)).product();
        let mut next = 0_u64;
        let mut parked: VecDeque<Block> = VecDeque::new();
        let mut spare: Option<Block> = None;
        while next < total || !parked.is_empty() {
            let mut moved = false;
            for _ in 0..parked.len() {
                let Some(mut block) = parked.pop_front() else { break };
                // SAFETY: the caller's contract, passed on.
                match unsafe { block.turn(self) }? {
                    Turn::Ended => {
                        moved = true;
                        spare = Some(block);
                        continue;
                    }
                    Turn::Busy => moved = true,
                    Turn::AtGridBarrier => {}
                }
                parked.push_back(block);
            }
            while next < total && parked.len() < RESIDENT {
                let mut block = spare.take().unwrap_or_else(|| Block::new(self));
                block.start(self, self.block_index(next))?;
                next += 1;
                moved = true;
                // SAFETY: the caller's contract, passed on.
                match unsafe { block.turn(self) }? {
                    Turn::Ended => spare = Some(block),
                    _ => {
                        parked.push_back(block);
                        break;
                    }
                }
            }
            if moved {
                continue;
            }
            if next < total {
                let first = parked.front().map(|block| block.failure(0, Fault::Deadlock));
                return first.map_or(Ok(()), Err);
            }
            parked.iter_mut().for_each(Block::release_grid_barrier);
        }
        Ok(())
    }

    fn block_index(&self, number: u64) -> [u32; 3] {
        let [x, y, _] = self.grid.map(u64::from);
        [number % x, number / x % y, number / x / y].map(|index| u32::try_from(index).unwrap_or(u32::MAX))
    }
}
