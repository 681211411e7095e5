//! A PTX interpreter: reads the text that compilers hand to the CUDA driver and runs its kernels on the host.
//! A device pointer is an ordinary address of this process.
//!
//! It serves the simulated GPU: results are right, time is not modelled. The threads of a kernel are
//! resumable states that one host thread runs in turns, so barriers, shuffles and blocks that wait for each
//! other work. Textures, tensor cores and clusters are refused when the module is read, by
//! [`PtxError::UnknownInstruction`].

mod alu;
mod code;
mod error;
mod lex;
mod lower;
mod memory;
mod parse;
mod run;
mod types;
mod variables;

use std::collections::{BTreeMap, BTreeSet, HashMap};

pub use error::{Fault, PtxError};

use code::Function;
use lex::Cursor;
use parse::{Declarations, Variable};
use variables::{Name, Variables, number};

/// Instructions that one thread may execute, unless [`Module::set_step_limit`] says otherwise.
pub const STEP_LIMIT: u64 = 1 << 30;

/// Where a kernel's parameter lies in the buffer of its parameters, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Bytes from the start of the buffer.
    pub offset: usize,
    /// Bytes of the parameter.
    pub size: usize,
}

/// A `.global` or `.const` variable: memory that exists before a kernel runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Global {
    /// Name as in the text; unique in the module.
    pub name: String,
    /// Length in bytes; 0 for an array without a length.
    pub size: usize,
    /// Alignment in bytes, a power of two.
    pub align: usize,
    /// The initial value, `size` bytes, with zeros where the text gives none. Addresses of other variables
    /// are marks here. [`Module::run`] replaces the marks in memory, so a loader copies these bytes as they
    /// are.
    pub init: Vec<u8>,
}

#[derive(Debug)]
struct Kernel {
    function: u32,
    parameters: Vec<Parameter>,
    /// Numbers of the functions that it may call, and of itself.
    reachable: Vec<u32>,
    /// Whether any function that it reaches may call itself, directly or not.
    recursive: bool,
}

/// A module that was read; every instruction in it can be run.
#[derive(Debug)]
pub struct Module {
    functions: Vec<Function>,
    kernels: BTreeMap<String, Kernel>,
    variables: Variables,
    step_limit: u64,
}

impl Module {
    /// Reads a module. Several texts in a row, as a linker collects them, are one module. A name that is
    /// declared in one text and defined in another is the same thing. Of two definitions of a function the
    /// first counts.
    ///
    /// # Errors
    /// [`PtxError::Syntax`], [`PtxError::UnknownInstruction`] or [`PtxError::UnknownSymbol`], with the line.
    pub fn parse(text: &str) -> Result<Self, PtxError> {
        let lexemes = lex::lex(text)?;
        let Declarations { headers, variables: declared } = parse::declarations(Cursor::new(&lexemes))?;
        let (mut names, mut variables) = (HashMap::new(), Variables::default());
        let mut bodies = Vec::new();
        for header in headers.iter().filter(|header| header.body.is_some()) {
            if !names.contains_key(header.name) {
                names.insert(header.name, Name::Function(number(bodies.len(), 0)?));
                bodies.push(header);
            }
        }
        let mut placed: Vec<(u32, &Variable<'_>)> = Vec::new();
        // Definitions first, so that a declaration elsewhere does not hide one.
        let definitions = declared.iter().filter(|variable| !variable.external);
        for variable in definitions.chain(declared.iter().filter(|variable| variable.external)) {
            if names.contains_key(variable.name) {
                continue;
            }
            let name = variables.declare(variable)?;
            if let Name::Variable(number) = name {
                placed.push((number, variable));
            }
            names.insert(variable.name, name);
        }
        for (number, variable) in placed {
            variables.initialise(number, variable, &names)?;
        }
        let mut functions = Vec::with_capacity(bodies.len());
        for header in &bodies {
            let body = header.body.clone().unwrap_or_default();
            functions.push(lower::lower(header, Cursor::new(&lexemes[body]), &names, &mut variables)?);
        }
        let mut kernels = BTreeMap::new();
        for (header, function) in bodies.iter().zip(0_u32..).filter(|(header, _)| header.entry) {
            let (reachable, recursive) = reach(&functions, function);
            let parameters = lower::parameters(header);
            kernels.insert(header.name.to_owned(), Kernel { function, parameters, reachable, recursive });
        }
        Ok(Self { functions, kernels, variables, step_limit: STEP_LIMIT })
    }

    /// Names of the kernels, in alphabetical order.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    /// The kernel's parameters in their order, or `None` if there is no such kernel.
    pub fn parameters(&self, kernel: &str) -> Option<Vec<Parameter>> {
        self.kernels.get(kernel).map(|kernel| kernel.parameters.clone())
    }

    /// The variables that a loader must place in memory before a kernel runs.
    pub fn globals(&self) -> Vec<Global> {
        self.variables.globals.clone()
    }

    /// Ends a thread with [`Fault::StepLimit`] after about `steps` instructions. The limit is checked only
    /// every few thousand instructions.
    pub fn set_step_limit(&mut self, steps: u64) {
        self.step_limit = steps;
    }

    /// Runs a kernel over a whole grid and returns when it has ended. `grid` counts blocks and `block` counts
    /// threads, each as x, y, z. `shared_bytes` is the size of dynamic shared memory. `params` is the buffer
    /// that [`Self::parameters`] describes. `global_addresses` says where the loader put a variable.
    ///
    /// # Errors
    /// [`PtxError::NoKernel`], [`PtxError::BadLaunch`] and [`PtxError::NoAddress`] before anything ran;
    /// [`PtxError::Fault`] in the middle of it, with memory as it was then.
    ///
    /// # Safety
    /// Until this returns, every address that the kernel reads or writes is mapped with that permission. That
    /// holds for addresses from its parameters, its variables and memory that they lead to; obviously wrong
    /// ones are a fault instead. Nobody else relies on the bytes that the kernel writes.
    pub unsafe fn run(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
        global_addresses: &dyn Fn(&str) -> Option<u64>,
    ) -> Result<(), PtxError> {
        let request = run::Request { kernel, grid, block, shared_bytes, params, addresses: global_addresses };
        // SAFETY: the caller's contract, passed on.
        unsafe { run::run(self, &request) }
    }
}

/// Numbers of the functions that `from` may call, with its own, and whether there is a cycle of calls among
/// them.
fn reach(functions: &[Function], from: u32) -> (Vec<u32>, bool) {
    let mut seen = BTreeSet::new();
    let mut open = vec![from];
    while let Some(number) = open.pop() {
        if !seen.insert(number) {
            continue;
        }
        let function = &functions[number as usize];
        open.extend(&function.calls);
        if function.indirect {
            // An indirect call may mean every function, since each has a number.
            open.extend((0_u32..).zip(functions).map(|(number, _)| number));
        }
    }
    let reachable: Vec<u32> = seen.into_iter().collect();
    // A graph without cycles loses its leaves until nothing is left.
    let mut left: BTreeSet<u32> = reachable.iter().copied().collect();
    loop {
        let leaf =
            |number: &u32| !functions[*number as usize].calls.iter().any(|called| left.contains(called));
        let Some(number) = left.iter().copied().find(leaf) else { break };
        left.remove(&number);
    }
    (reachable, !left.is_empty())
}
