//! Branches, ends of threads and functions, fences, and hints.

use crate::code::Op;
use crate::error::PtxError;
use crate::lower::modifiers::Modifiers;
use crate::lower::operand::Operand;
use crate::lower::{Lowering, Patch};
use crate::parse::syntax;
use crate::types::Ty;

impl<'t> Lowering<'_, 't> {
    pub(super) fn control(
        &mut self,
        m: &mut Modifiers<'t>,
        operands: &[Operand<'t>],
    ) -> Result<(), PtxError> {
        match m.name {
            "bra" => self.branch(m, operands),
            "brx" => self.branch_indexed(m, operands),
            "ret" | "exit" | "trap" => {
                m.ignore(&["uni"]);
                self.emit(match m.name {
                    "ret" => Op::Return,
                    "exit" => Op::Exit,
                    _ => Op::Trap,
                });
                Ok(())
            }
            "nanosleep" => {
                m.ty()?;
                self.emit(Op::Yield);
                Ok(())
            }
            // Fences and hints do nothing: everything runs in order, and there are no caches.
            _ => {
                while m.take_first().is_some() {}
                Ok(())
            }
        }
    }

    fn branch(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore(&["uni"]);
        let [Operand::Name(label)] = operands else { return Err(syntax(self.line, "a label expected")) };
        self.patch(0, label);
        self.emit(Op::Branch(0));
        Ok(())
    }

    fn branch_indexed(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore(&["uni"]);
        if !m.take("idx") {
            return Err(m.unknown());
        }
        let [index, Operand::Name(table)] = operands else {
            return Err(syntax(self.line, "an index and a list of labels expected"));
        };
        let unknown = || PtxError::UnknownSymbol { line: self.line, name: (*table).to_owned() };
        let labels = self.scopes.table(table).ok_or_else(unknown)?;
        let index = self.source(index, Ty::U32)?; // may emit code: the patches name the instruction after it
        for (position, label) in labels.iter().enumerate() {
            self.patch(position, label);
        }
        self.emit(Op::BranchIndexed { index, targets: vec![0; labels.len()].into() });
        Ok(())
    }

    fn patch(&mut self, index: usize, label: &'t str) {
        let (instruction, scope, line) = (self.function.code.len(), self.scopes.current(), self.line);
        self.patches.push(Patch { instruction, index, scope, label, line });
    }
}
