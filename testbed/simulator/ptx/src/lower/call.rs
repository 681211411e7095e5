//! Calls: of the module's functions, through a function's address, and of the few functions that CUDA
//! provides.

use crate::code::{Call, HostFunction, Op, Place, Target};
use crate::error::PtxError;
use crate::lower::Lowering;
use crate::lower::modifiers::Modifiers;
use crate::lower::operand::Operand;
use crate::parse::syntax;
use crate::types::Ty;
use crate::variables::Name;

impl<'t> Lowering<'_, 't> {
    /// Reads `call (results), function, (arguments), prototype;`, of which only the function must be present.
    pub(super) fn call(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore(&["uni"]);
        let (results, operands) = match operands {
            [Operand::Group(results), rest @ ..] => (&results[..], rest),
            _ => (&[][..], operands),
        };
        let (name, arguments) = match operands {
            [Operand::Name(name)] => (*name, &[][..]),
            [Operand::Name(name), Operand::Group(arguments), ..] => (*name, &arguments[..]),
            // Without arguments a prototype may still follow.
            [Operand::Name(name), Operand::Name(_)] => (*name, &[][..]),
            _ => return Err(syntax(self.line, "a function expected")),
        };
        let arguments = arguments.iter().map(|operand| self.place(operand)).collect::<Result<Vec<_>, _>>()?;
        let results = results.iter().map(|operand| self.place(operand)).collect::<Result<Vec<_>, _>>()?;
        let target = self.target(name)?;
        self.emit(Op::Call(Box::new(Call { target, arguments, results })));
        Ok(())
    }

    fn place(&mut self, operand: &Operand<'t>) -> Result<Place, PtxError> {
        if let Operand::Name(name) = operand {
            if let Some(register) = self.register(name)? {
                return register
                    .slots
                    .first()
                    .map(|slot| Place::Slot(*slot))
                    .ok_or_else(|| PtxError::UnknownSymbol { line: self.line, name: (*name).to_owned() });
            }
            if let Some(place) = self.scopes.memory(name).and_then(|memory| memory.place) {
                return Ok(place);
            }
        }
        self.source(operand, Ty::B64).map(Place::Slot)
    }

    fn target(&mut self, name: &'t str) -> Result<Target, PtxError> {
        if let Some(register) = self.register(name)? {
            self.function.indirect = true;
            return Ok(Target::Value(register.slots[0]));
        }
        if let Some(Name::Function(number)) = self.names.get(name) {
            self.function.calls.push(*number);
            return Ok(Target::Function(*number));
        }
        Ok(Target::Host(match name {
            "vprintf" => HostFunction::Print,
            "__assertfail" => HostFunction::AssertFail,
            "cudaCGGetIntrinsicHandle" => HostFunction::GridHandle,
            "cudaCGSynchronize" => HostFunction::GridBarrier,
            _ => return Err(PtxError::UnknownSymbol { line: self.line, name: name.to_owned() }),
        }))
    }
}
