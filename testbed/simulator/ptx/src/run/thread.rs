//! A thread: its frames, and the loop that executes instructions until the thread has to wait or has had its
//! turn.

use super::{Launch, host};
use crate::code::{self, Access, Call, HostFunction, Instruction, LaneMask, Op, Slot, Special, Target};
use crate::error::Fault;
use crate::types::mask;
use crate::{memory, variables};

/// Deepest nesting of calls.
const DEPTH: usize = 4096;

/// What the threads of a block share.
pub(super) struct Place {
    pub(super) index: [u32; 3],
    /// Address and size of shared memory.
    pub(super) shared_start: u64,
    pub(super) shared_size: u64,
}

impl Place {
    /// The address of `offset` in shared memory; a fault if the `bytes` there are not all inside it.
    #[inline]
    fn shared(&self, offset: u64, bytes: u8) -> Result<u64, Fault> {
        match offset.checked_add(u64::from(bytes)) {
            Some(end) if end <= self.shared_size => Ok(self.shared_start + offset),
            _ => Err(Fault::OutsideShared(offset)),
        }
    }

    #[inline]
    fn address(&self, base: u64, offset: i64, access: Access) -> Result<u64, Fault> {
        let address = base.wrapping_add_signed(offset);
        if access.shared { self.shared(address, access.size) } else { Ok(address) }
    }
}

/// What a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Ready,
    Barrier(usize),
    Warp,
    Grid,
    Ended,
}

/// Why a thread stopped.
pub(super) enum Stop {
    Slice,
    Barrier,
    Warp,
    Grid,
    Ended,
}

/// Why straight execution stopped.
enum Flow {
    Slice,
    Call,
    Return,
    Exit,
    Barrier,
    Warp,
}

/// A caller's state, to which a function returns.
#[derive(Debug)]
struct Frame {
    function: u32,
    at: u32,
    base: usize,
    memory: u64,
}

/// A thread of a block.
pub(super) struct Thread {
    pub(super) index: [u32; 3],
    pub(super) wait: Wait,
    slots: Vec<u64>,
    /// First slot of the current frame, and address of its memory.
    base: usize,
    memory: u64,
    function: u32,
    /// Index of the next instruction.
    at: u32,
    callers: Vec<Frame>,
    steps: u64,
    /// Number of the thread within its block.
    number: usize,
    stack: u64,
    stack_top: u64,
}

impl Thread {
    /// A thread whose stack begins at `stack`.
    pub(super) fn new(index: [u32; 3], stack: u64) -> Self {
        Self {
            index,
            wait: Wait::Ready,
            slots: Vec::new(),
            base: 0,
            memory: stack,
            function: 0,
            at: 0,
            callers: Vec::new(),
            steps: 0,
            number: 0,
            stack,
            stack_top: stack,
        }
    }

    pub(super) fn start(&mut self, launch: &Launch<'_>, place: &Place, number: usize) -> Result<(), Fault> {
        (self.wait, self.steps, self.number) = (Wait::Ready, 0, number);
        self.slots.clear();
        self.callers.clear();
        self.stack_top = self.stack;
        self.enter(launch, place, launch.entry)
    }

    /// Function and index of the instruction that was executed last.
    pub(super) fn position(&self) -> (u32, u32) {
        (self.function, self.at.saturating_sub(1))
    }

    pub(super) fn value(&self, slot: Slot) -> u64 {
        self.slots[self.base + slot as usize]
    }

    pub(super) fn set(&mut self, slot: Slot, value: u64) {
        self.slots[self.base + slot as usize] = value;
    }

    /// Puts a new frame for `function` on top.
    fn enter(&mut self, launch: &Launch<'_>, place: &Place, function: u32) -> Result<(), Fault> {
        let prepared = launch.prepared.get(function as usize).and_then(Option::as_ref);
        let prepared = prepared.ok_or(Fault::NoFunction(variables::function_value(function)))?;
        self.memory = self.stack_top;
        let top = self.stack_top + u64::from(launch.functions[function as usize].memory);
        if top > self.stack + u64::try_from(launch.stack).unwrap_or(0) || self.callers.len() > DEPTH {
            return Err(Fault::StackOverflow);
        }
        self.stack_top = top;
        self.base = self.slots.len();
        self.slots.extend_from_slice(&prepared.slots);
        (self.function, self.at) = (function, 0);
        for &(slot, offset) in &prepared.frame {
            self.set(slot, self.memory + u64::from(offset));
        }
        for &(slot, special) in &prepared.special {
            let value = self.special(launch, place, special);
            self.set(slot, value);
        }
        Ok(())
    }

    fn special(&self, launch: &Launch<'_>, place: &Place, special: Special) -> u64 {
        let lane = u64::try_from(self.number % 32).unwrap_or(0);
        let threads: u64 = launch.block.iter().map(|&size| u64::from(size)).product();
        let bit = 1_u64 << lane;
        match special {
            Special::ThreadIndex(axis) => u64::from(self.index[usize::from(axis)]),
            Special::BlockSize(axis) => u64::from(launch.block[usize::from(axis)]),
            Special::BlockIndex(axis) => u64::from(place.index[usize::from(axis)]),
            Special::GridSize(axis) => u64::from(launch.grid[usize::from(axis)]),
            Special::Lane => lane,
            Special::Warp => u64::try_from(self.number / 32).unwrap_or(0),
            Special::Warps => threads.div_ceil(32),
            Special::LaneMask(LaneMask::Equal) => bit,
            Special::LaneMask(LaneMask::Less) => bit - 1,
            Special::LaneMask(LaneMask::LessEqual) => bit | (bit - 1),
            Special::LaneMask(LaneMask::Greater) => 0xffff_ffff & !(bit | (bit - 1)),
            Special::LaneMask(LaneMask::GreaterEqual) => 0xffff_ffff & !(bit - 1),
            Special::SharedStart => place.shared_start,
            Special::SharedEnd => place.shared_start + place.shared_size,
            Special::LocalStart => self.stack,
            Special::LocalEnd => self.stack + u64::try_from(launch.stack).unwrap_or(0),
            Special::WorkspaceLow => launch.workspace & 0xffff_ffff,
            Special::WorkspaceHigh => launch.workspace >> 32,
            Special::SharedDynamic => u64::from(launch.shared_dynamic),
            Special::SharedTotal => place.shared_size,
        }
    }

    /// Executes up to `budget` instructions.
    ///
    /// # Safety
    /// The contract of [`crate::Module::run`].
    pub(super) unsafe fn run(
        &mut self,
        launch: &Launch<'_>,
        place: &Place,
        budget: u64,
    ) -> Result<Stop, Fault> {
        let mut left = budget;
        if self.steps > launch.step_limit {
            return Err(Fault::StepLimit(launch.step_limit));
        }
        self.steps += budget;
        loop {
            let code = &launch.functions[self.function as usize].code;
            let slots = &mut self.slots[self.base..];
            // SAFETY: the caller's contract, passed on.
            let flow = unsafe { straight(code, slots, &mut self.at, &mut left, place) }?;
            match flow {
                Flow::Call => {
                    // SAFETY: the caller's contract, passed on.
                    if unsafe { self.call(launch, place) }? {
                        self.steps -= left;
                        return Ok(Stop::Grid);
                    }
                    continue;
                }
                // SAFETY: the caller's contract, passed on.
                Flow::Return if unsafe { self.leave(launch) }? => continue,
                _ => self.steps -= left,
            }
            return Ok(match flow {
                Flow::Barrier => Stop::Barrier,
                Flow::Warp => Stop::Warp,
                Flow::Return | Flow::Exit => Stop::Ended,
                _ => Stop::Slice,
            });
        }
    }

    /// Executes the call before `at`. Returns whether the thread must wait for the grid.
    ///
    /// # Safety
    /// The contract of [`crate::Module::run`].
    unsafe fn call(&mut self, launch: &Launch<'_>, place: &Place) -> Result<bool, Fault> {
        let (function, at) = self.position();
        let Op::Call(call) = &launch.functions[function as usize].code[at as usize].op else {
            return Ok(false);
        };
        let target = match call.target {
            Target::Function(number) => number,
            Target::Value(slot) => {
                let value = self.value(slot);
                variables::function_of(value).ok_or(Fault::NoFunction(value))?
            }
            // SAFETY: the caller's contract, passed on.
            Target::Host(host) => return unsafe { self.call_host(host, call) },
        };
        let (base, memory) = (self.base, self.memory);
        self.callers.push(Frame { function, at: self.at, base, memory });
        self.enter(launch, place, target)?;
        let to = (self.base, self.memory);
        let formals = &launch.functions[target as usize].formals;
        for (&argument, &formal) in call.arguments.iter().zip(formals) {
            // SAFETY: both places lie in frames of this thread.
            unsafe { self.pass((base, memory), argument, to, formal) }?;
        }
        Ok(false)
    }

    /// # Safety
    /// The contract of [`crate::Module::run`].
    unsafe fn call_host(&mut self, function: HostFunction, call: &Call) -> Result<bool, Fault> {
        let mut arguments = [0; 2];
        for (value, &argument) in arguments.iter_mut().zip(&call.arguments) {
            *value = match argument {
                code::Place::Slot(slot) => self.value(slot),
                code::Place::Memory { offset, size } => {
                    let address = self.memory + u64::from(offset);
                    // SAFETY: the place lies in a frame of this thread.
                    unsafe { memory::load(address, u8::try_from(size.min(8)).unwrap_or(8), 1) }?
                }
            };
        }
        let result = match function {
            // SAFETY: the program passes a text and its values, as for the device's own vprintf.
            HostFunction::Print => unsafe { host::print(arguments[0], arguments[1]) }?,
            HostFunction::AssertFail => {
                // SAFETY: as above: two texts.
                unsafe { host::report_assertion(arguments[0], arguments[1]) };
                return Err(Fault::Assertion);
            }
            HostFunction::GridHandle => 1,
            HostFunction::GridBarrier => 0,
        };
        for &place in &call.results {
            match place {
                code::Place::Slot(slot) => self.set(slot, result),
                code::Place::Memory { offset, size } => {
                    let address = self.memory + u64::from(offset);
                    // SAFETY: the place lies in a frame of this thread.
                    unsafe { memory::store(address, u8::try_from(size.min(8)).unwrap_or(8), 1, result) }?;
                }
            }
        }
        Ok(function == HostFunction::GridBarrier)
    }

    /// Returns to the caller and passes the results; false if there is no caller.
    ///
    /// # Safety
    /// The contract of [`crate::Module::run`].
    unsafe fn leave(&mut self, launch: &Launch<'_>) -> Result<bool, Fault> {
        let Some(caller) = self.callers.pop() else { return Ok(false) };
        let from = (self.base, self.memory);
        let to = (caller.base, caller.memory);
        let results = &launch.functions[self.function as usize].results;
        let call = &launch.functions[caller.function as usize].code[caller.at as usize - 1].op;
        if let Op::Call(call) = call {
            for (&result, &actual) in results.iter().zip(&call.results) {
                // SAFETY: both places lie in frames of this thread.
                unsafe { self.pass(from, result, to, actual) }?;
            }
        }
        self.slots.truncate(self.base);
        self.stack_top = self.memory;
        (self.function, self.at) = (caller.function, caller.at);
        (self.base, self.memory) = to;
        Ok(true)
    }

    /// Copies a value between places of two frames, each given by its first slot and the address of its
    /// memory.
    ///
    /// # Safety
    /// The frames are frames of this thread.
    unsafe fn pass(
        &mut self,
        (from_base, from_memory): (usize, u64),
        from: code::Place,
        (to_base, to_memory): (usize, u64),
        to: code::Place,
    ) -> Result<(), Fault> {
        let short = |size: u32| u8::try_from(size.min(8)).unwrap_or(8);
        match (from, to) {
            (code::Place::Slot(from), code::Place::Slot(to)) => {
                self.slots[to_base + to as usize] = self.slots[from_base + from as usize];
                Ok(())
            }
            (code::Place::Slot(from), code::Place::Memory { offset, size }) => {
                let value = self.slots[from_base + from as usize];
                // SAFETY: the caller vouches for the frame; the offset lies in its memory.
                unsafe { memory::store(to_memory + u64::from(offset), short(size), 1, value) }
            }
            (code::Place::Memory { offset, size }, code::Place::Slot(to)) => {
                // SAFETY: as above.
                let value = unsafe { memory::load(from_memory + u64::from(offset), short(size), 1) }?;
                self.slots[to_base + to as usize] = value;
                Ok(())
            }
            (code::Place::Memory { offset, size }, code::Place::Memory { offset: at, size: room }) => {
                let bytes = size.min(room) as usize;
                // SAFETY: as above, for both.
                unsafe { memory::copy(to_memory + u64::from(at), from_memory + u64::from(offset), bytes) }
            }
        }
    }
}

/// Executes instructions of one frame until control leaves it. `at` is then one past the instruction executed
/// last.
///
/// # Safety
/// The contract of [`crate::Module::run`].
unsafe fn straight(
    code: &[Instruction],
    slots: &mut [u64],
    at: &mut u32,
    left: &mut u64,
    place: &Place,
) -> Result<Flow, Fault> {
    while *left > 0 {
        *left -= 1;
        let instruction = &code[*at as usize];
        *at += 1;
        if !instruction.guard.holds(slots) {
            continue;
        }
        match &instruction.op {
            &Op::Alu { f, d, a, b, c } => {
                slots[d as usize] = f(slots[a as usize], slots[b as usize], slots[c as usize]);
            }
            &Op::Move { d, a } => slots[d as usize] = slots[a as usize],
            &Op::Load { d, base, offset, access } => {
                let address = place.address(slots[base as usize], offset, access)?;
                // SAFETY: the caller vouches for the program's addresses; shared ones were checked.
                let value = unsafe { memory::load(address, access.size, access.align) }?;
                slots[d as usize] = if access.extend == 0 { value } else { extended(value, access) };
            }
            &Op::Store { a, base, offset, access } => {
                let address = place.address(slots[base as usize], offset, access)?;
                // SAFETY: as for a load.
                unsafe { memory::store(address, access.size, access.align, slots[a as usize]) }?;
            }
            Op::Branch(target) => *at = *target,
            Op::Alu4 { f, d, operands } => {
                let [a, b, c, e] = operands.map(|slot| slots[slot as usize]);
                slots[*d as usize] = f(a, b, c, e);
            }
            Op::Atomic(atomic) => {
                let address = place.address(slots[atomic.base as usize], atomic.offset, atomic.access)?;
                let (b, c) = (slots[atomic.b as usize], slots[atomic.c as usize]);
                // SAFETY: as for a store.
                let old = unsafe { memory::update(address, atomic.access.size, atomic.f, b, c) }?;
                if let Some(d) = atomic.d {
                    slots[d as usize] = old;
                }
            }
            Op::BranchIndexed { index, targets } => {
                let index = slots[*index as usize];
                let target = usize::try_from(index).ok().and_then(|index| targets.get(index));
                *at = *target.ok_or(Fault::NoLabel(index))?;
            }
            // SAFETY: the caller's contract, passed on.
            copy @ Op::CopyToShared { .. } => unsafe { copy_to_shared(copy, slots, place) }?,
            &Op::Clock { d, wall } => slots[d as usize] = host::nanoseconds(wall),
            Op::Call(_) => return Ok(Flow::Call),
            Op::Return => return Ok(Flow::Return),
            Op::Exit => return Ok(Flow::Exit),
            Op::Trap => return Err(Fault::Trap),
            Op::Barrier(_) => return Ok(Flow::Barrier),
            Op::Warp(_) => return Ok(Flow::Warp),
            Op::Yield => return Ok(Flow::Slice),
        }
    }
    Ok(Flow::Slice)
}

/// A loaded signed value, extended to a wider register.
fn extended(value: u64, access: Access) -> u64 {
    let unused = 64 - 8 * u32::from(access.size);
    let signed = i64::from_ne_bytes((value << unused).to_ne_bytes()) >> unused;
    u64::from_ne_bytes(signed.to_ne_bytes()) & mask(access.extend)
}

/// # Safety
/// The contract of [`crate::Module::run`].
unsafe fn copy_to_shared(op: &Op, slots: &[u64], place: &Place) -> Result<(), Fault> {
    let &Op::CopyToShared { to, to_offset, from, from_offset, bytes, total } = op else { return Ok(()) };
    let from = slots[from as usize].wrapping_add_signed(from_offset);
    let access = Access { size: total, align: total, shared: true, extend: 0 };
    let to = place.address(slots[to as usize], to_offset, access)?;
    let count = slots[bytes as usize].min(u64::from(total));
    for index in 0..u64::from(total) {
        let byte = if index < count {
            // SAFETY: the caller vouches for the program's addresses.
            unsafe { memory::load(from + index, 1, 1) }?
        } else {
            0
        };
        // SAFETY: `address` checked the whole range in shared memory.
        unsafe { memory::store(to + index, 1, 1, byte) }?;
    }
    Ok(())
}
