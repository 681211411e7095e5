//! The form in which functions run. Every operand is a slot of the frame, constants and addresses included,
//! so an instruction never asks what kind of operand it has.

use crate::alu::{Alu, Alu4};

/// Index of a 64-bit slot in a function's frame.
pub(crate) type Slot = u32;

/// An instruction, executed only if its guard holds.
#[derive(Debug)]
pub(crate) struct Instruction {
    pub(crate) guard: Guard,
    pub(crate) op: Op,
}

/// `@p`, `@!p` or nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Guard {
    slot: Slot,
    wanted: u8,
}

impl Guard {
    /// No guard: slot 0 of every frame is a constant zero, and this compares it with zero.
    pub(crate) const ALWAYS: Self = Self { slot: 0, wanted: 0 };

    pub(crate) fn new(slot: Slot, negated: bool) -> Self {
        Self { slot, wanted: u8::from(!negated) }
    }

    #[inline]
    pub(crate) fn holds(self, slots: &[u64]) -> bool {
        slots[self.slot as usize] == u64::from(self.wanted)
    }
}

/// How many bytes a load, store or atomic operation moves, and where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    /// Bytes that are moved: 1, 2, 4 or 8.
    pub(crate) size: u8,
    /// The address must be a multiple of this many bytes: the size of the whole vector.
    pub(crate) align: u8,
    /// Whether the address is an offset into the block's shared memory, and not an address of this process.
    pub(crate) shared: bool,
    /// Bytes of the register that a signed load fills with the sign; 0 for other loads.
    pub(crate) extend: u8,
}

#[derive(Debug)]
pub(crate) enum Op {
    Alu {
        f: Alu,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Alu4 {
        f: Alu4,
        d: Slot,
        operands: [Slot; 4],
    },
    Move {
        d: Slot,
        a: Slot,
    },
    Load {
        d: Slot,
        base: Slot,
        offset: i64,
        access: Access,
    },
    Store {
        a: Slot,
        base: Slot,
        offset: i64,
        access: Access,
    },
    Atomic(Box<Atomic>),
    /// Copies `bytes` into shared memory and fills up to `total` with zeros.
    CopyToShared {
        to: Slot,
        to_offset: i64,
        from: Slot,
        from_offset: i64,
        bytes: Slot,
        total: u8,
    },
    Branch(u32),
    BranchIndexed {
        index: Slot,
        targets: Box<[u32]>,
    },
    Call(Box<Call>),
    Return,
    Exit,
    Trap,
    Barrier(Box<Barrier>),
    Warp(Box<Warp>),
    /// Writes nanoseconds: since 1970 with `wall`, else of a monotonic clock.
    Clock {
        d: Slot,
        wall: bool,
    },
    /// Lets other threads run first.
    Yield,
}

/// Reads, computes and writes as one step. `f(old, b, c)` is the new value.
#[derive(Debug)]
pub(crate) struct Atomic {
    pub(crate) f: Alu,
    pub(crate) d: Option<Slot>,
    pub(crate) base: Slot,
    pub(crate) offset: i64,
    pub(crate) b: Slot,
    pub(crate) c: Slot,
    pub(crate) access: Access,
}

/// Where a formal of a function, or the actual value of a call, lies.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// In the frame's memory: a `.param` variable of `size` bytes.
    Memory { offset: u32, size: u32 },
    /// In a register.
    Slot(Slot),
}

#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) target: Target,
    pub(crate) arguments: Vec<Place>,
    pub(crate) results: Vec<Place>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    Function(u32),
    /// A slot with the value that was made by taking a function's address.
    Value(Slot),
    Host(HostFunction),
}

/// Functions that CUDA provides outside the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostFunction {
    Print,
    AssertFail,
    GridHandle,
    /// Waits until every thread of the grid has arrived.
    GridBarrier,
}

/// `bar` and `barrier`.
#[derive(Debug)]
pub(crate) struct Barrier {
    pub(crate) number: Slot,
    /// Slot with the number of threads to wait for; without it, all threads that have not exited.
    pub(crate) threads: Option<Slot>,
    pub(crate) kind: BarrierKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    Sync,
    Arrive,
    /// Waits, and reduces a predicate over the threads into `d`.
    Reduce {
        reduction: Reduction,
        d: Slot,
        predicate: Slot,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Count,
    And,
    Or,
}

/// An instruction that the threads of a warp execute together.
#[derive(Debug)]
pub(crate) struct Warp {
    pub(crate) kind: WarpKind,
    /// Slot of the mask of lanes that take part.
    pub(crate) mask: Slot,
    pub(crate) d: Slot,
    /// Second result, a predicate.
    pub(crate) p: Option<Slot>,
    pub(crate) a: Slot,
    pub(crate) b: Slot,
    pub(crate) c: Slot,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum WarpKind {
    Sync,
    Shuffle(Shuffle),
    /// Mask of the lanes whose predicate is set.
    Ballot,
    All,
    Any,
    Uniform,
    /// Mask of the lanes with the same value.
    MatchAny,
    MatchAll,
    /// The lowest lane of the mask.
    Elect,
    /// Folds the values of all lanes with the function.
    Reduce(Alu),
    /// Mask of the lanes that arrive here together; the instruction has no mask operand.
    ActiveMask,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// A value of a slot that is known only when a frame is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Link {
    /// Address of a `.global` or `.const` variable, by its number in the module.
    Variable(u32),
    /// Offset of a `.shared` variable in the block's shared memory, by the variable's number in the module.
    Shared(u32),
    /// Address of a byte of the kernel's parameters.
    Parameter(u32),
    /// Address of a byte of this frame's memory.
    Frame(u32),
    Special(Special),
}

/// Read-only registers that the machine sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    ThreadIndex(u8),
    BlockSize(u8),
    BlockIndex(u8),
    GridSize(u8),
    Lane,
    Warp,
    Warps,
    LaneMask(LaneMask),
    /// Start of this block's shared memory, and one past its end.
    SharedStart,
    SharedEnd,
    /// Start of this thread's stack, and one past its end.
    LocalStart,
    LocalEnd,
    SharedDynamic,
    /// Halves of the address of the workspace in which cooperative groups count the blocks of a grid.
    WorkspaceLow,
    WorkspaceHigh,
    SharedTotal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LaneMask {
    Equal,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

/// A function or kernel that is ready to run.
#[derive(Debug, Default)]
pub(crate) struct Function {
    pub(crate) code: Vec<Instruction>,
    /// Line of the text for each instruction.
    pub(crate) lines: Vec<u32>,
    /// Values of the slots on entry; links replace some of them.
    pub(crate) slots: Vec<u64>,
    pub(crate) links: Vec<(Slot, Link)>,
    /// Bytes of the frame's memory, a multiple of 16.
    pub(crate) memory: u32,
    pub(crate) formals: Vec<Place>,
    pub(crate) results: Vec<Place>,
    /// Numbers of the functions that are called by name; `indirect` says that others may be called too.
    pub(crate) calls: Vec<u32>,
    pub(crate) indirect: bool,
}
