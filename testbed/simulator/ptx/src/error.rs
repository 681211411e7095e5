//! Errors of reading a module and of running a kernel.

/// Why a module was not accepted, or a kernel did not finish.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PtxError {
    /// The text is not PTX as this reader knows it.
    #[error("line {line}: {what}")]
    Syntax {
        /// Line of the text, from 1.
        line: u32,
        /// What was found, or what was expected and missing.
        what: String,
    },
    /// The instruction, or one of its modifiers, is not simulated.
    #[error("line {line}: instruction {name} is not simulated")]
    UnknownInstruction {
        /// Line of the text, from 1.
        line: u32,
        /// The instruction with its modifiers, as written.
        name: String,
    },
    /// The text uses a register, label, variable or function that nothing declares.
    #[error("line {line}: {name} is not declared")]
    UnknownSymbol {
        /// Line of the text, from 1.
        line: u32,
        /// The name as written.
        name: String,
    },
    /// The module has no such kernel.
    #[error("no kernel {0}")]
    NoKernel(String),
    /// Grid, block, shared memory or parameters do not fit the kernel.
    #[error("kernel {kernel}: {what}")]
    BadLaunch {
        /// Name of the kernel.
        kernel: String,
        /// What does not fit.
        what: String,
    },
    /// The caller gave no address for a variable that the kernel uses.
    #[error("variable {0} has no address")]
    NoAddress(String),
    /// A thread of the kernel failed; the launch ended there.
    #[error("kernel {kernel}, block {block:?}, thread {thread:?}, line {line}: {fault}")]
    Fault {
        /// Name of the kernel that was launched.
        kernel: String,
        /// Line of the text, from 1.
        line: u32,
        /// Index of the block in the grid (x, y, z).
        block: [u32; 3],
        /// Index of the thread in the block (x, y, z).
        thread: [u32; 3],
        /// What the thread did wrong.
        fault: Fault,
    },
}

/// What a thread did wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// `trap` was executed.
    #[error("trap")]
    Trap,
    /// An assertion of the program failed.
    #[error("assertion failed")]
    Assertion,
    /// An address that no allocation can have: below 4096, or from 2^56 on.
    #[error("illegal address {0:#x}")]
    IllegalAddress(u64),
    /// An address that is not a multiple of the access's size.
    #[error("misaligned address {0:#x}")]
    MisalignedAddress(u64),
    /// An offset outside the block's shared memory.
    #[error("offset {0:#x} is outside the block's shared memory")]
    OutsideShared(u64),
    /// Calls nested deeper than the thread's stack.
    #[error("stack overflow")]
    StackOverflow,
    /// A call through a value that is not a function of this module.
    #[error("call of {0:#x}, which is no function")]
    NoFunction(u64),
    /// A branch through a list of labels that has no such entry.
    #[error("branch to label {0} of a shorter list")]
    NoLabel(u64),
    /// The thread executed more instructions than the limit.
    #[error("more than {0} instructions in one thread")]
    StepLimit(u64),
    /// Every thread waits for another one that will not arrive.
    #[error("deadlock at a barrier or a warp instruction")]
    Deadlock,
    /// A barrier number above 15.
    #[error("barrier {0} does not exist")]
    NoBarrier(u64),
}
