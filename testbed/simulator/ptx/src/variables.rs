//! Variables of the module: those that a loader places in device memory, and those in the block's shared
//! memory.

use std::collections::HashMap;

use crate::Global;
use crate::error::PtxError;
use crate::parse::{Initial, Space, Variable};

/// Tag of a function's address, as `mov` or an initialiser takes it: the tag and the function's number. No
/// address of user space looks like it.
const FUNCTION: u64 = 0xfab0_0000_0000_0000;

/// Tag of a mark that the first launch replaces by an address: the tag and the number of the [`Pending`].
const PENDING: u64 = 0xfab1_0000_0000_0000;

/// The value of function `number`'s address.
pub(crate) fn function_value(number: u32) -> u64 {
    FUNCTION | u64::from(number) << 4
}

/// The function whose address `value` is.
pub(crate) fn function_of(value: u64) -> Option<u32> {
    if value & 0xf == 0 && value >> 48 == FUNCTION >> 48 {
        u32::try_from((value & !FUNCTION) >> 4).ok()
    } else {
        None
    }
}

/// An address of a variable inside another variable's initial value.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    /// Number of the variable that holds the address, and the byte at which it stands.
    pub(crate) holder: u32,
    pub(crate) at: usize,
    /// Number of the variable that it points to, and the distance from that variable's start.
    pub(crate) target: u32,
    pub(crate) offset: u64,
    /// The mark: the eight bytes that stand there until then.
    pub(crate) mark: u64,
}

/// A `.shared` variable.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedVariable {
    pub(crate) size: usize,
    pub(crate) align: usize,
    /// Whether it has no size of its own. It then begins where the launch's dynamic shared memory does.
    pub(crate) dynamic: bool,
}

/// The module's variables, and the addresses in their initial values.
#[derive(Debug, Default)]
pub(crate) struct Variables {
    pub(crate) globals: Vec<Global>,
    pub(crate) pending: Vec<Pending>,
    pub(crate) shared: Vec<SharedVariable>,
}

/// A module-level name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Name {
    Variable(u32),
    Shared(u32),
    Function(u32),
}

/// `index` as a 32-bit number. A text below 4 GiB never has too many names for it.
pub(crate) fn number(index: usize, line: u32) -> Result<u32, PtxError> {
    u32::try_from(index).map_err(|_| crate::parse::syntax(line, "the module is too large"))
}

impl Variables {
    /// Adds a `.global`, `.const` or `.shared` variable. Its initialiser is read later, when all names are
    /// known.
    pub(crate) fn declare(&mut self, variable: &Variable<'_>) -> Result<Name, PtxError> {
        if variable.space == Space::Shared {
            let name = Name::Shared(number(self.shared.len(), variable.line)?);
            let dynamic = variable.external || variable.size == 0;
            self.shared.push(SharedVariable { size: variable.size, align: variable.align, dynamic });
            return Ok(name);
        }
        let name = Name::Variable(number(self.globals.len(), variable.line)?);
        self.globals.push(Global {
            name: variable.name.to_owned(),
            size: variable.size,
            align: variable.align,
            init: vec![0; variable.size],
        });
        Ok(name)
    }

    /// Writes the initial value of the variable that was declared as `number_of`.
    pub(crate) fn initialise(
        &mut self,
        number_of: u32,
        variable: &Variable<'_>,
        names: &HashMap<&str, Name>,
    ) -> Result<(), PtxError> {
        let unit = usize::from(variable.ty.size());
        for (index, initial) in variable.initial.iter().enumerate() {
            let at = index * unit;
            let bits = match *initial {
                Initial::Value(literal) => literal.bits(variable.ty),
                Initial::Address { .. } if unit != 8 => {
                    return Err(crate::parse::syntax(variable.line, "an address has eight bytes"));
                }
                Initial::Address { name, offset } => match names.get(name) {
                    Some(Name::Function(function)) => function_value(*function),
                    Some(Name::Variable(target)) => {
                        let mark = PENDING | u64::from(number(self.pending.len(), variable.line)?);
                        self.pending.push(Pending { holder: number_of, at, target: *target, offset, mark });
                        mark
                    }
                    Some(Name::Shared(_)) => {
                        return Err(crate::parse::syntax(
                            variable.line,
                            "a shared variable has no fixed address",
                        ));
                    }
                    None => {
                        let name = name.to_owned();
                        return Err(PtxError::UnknownSymbol { line: variable.line, name });
                    }
                },
            };
            let global = &mut self.globals[number_of as usize];
            global.init[at..at + unit].copy_from_slice(&bits.to_le_bytes()[..unit]);
        }
        Ok(())
    }
}
