//! Comparisons and selections.

use crate::alu::{Alu, compare, float, packed};
use crate::code::{Op, Slot};
use crate::error::PtxError;
use crate::lower::Lowering;
use crate::lower::modifiers::Modifiers;
use crate::lower::operand::Operand;
use crate::types::Ty;

impl<'t> Lowering<'_, 't> {
    pub(super) fn compare(
        &mut self,
        m: &mut Modifiers<'t>,
        operands: &[Operand<'t>],
    ) -> Result<(), PtxError> {
        match m.name {
            "setp" => self.setp(m, operands),
            "set" => self.set(m, operands),
            _ => self.select(m, operands),
        }
    }

    /// The value of an operand of a comparison, with subnormal numbers set to zero if `flush` asks for it.
    fn compared(&mut self, operand: &Operand<'t>, ty: Ty, flush: bool) -> Result<Slot, PtxError> {
        let value = self.source(operand, ty)?;
        match float::flush(packed::lane(ty).unwrap_or(ty)) {
            Some(f) if flush => self.each(f, ty, [value, 0, 0]),
            _ => Ok(value),
        }
    }

    fn setp(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let comparison = m.take_first().unwrap_or_default();
        let join = m.take_one(&["and", "or", "xor"]);
        let flush = m.take("ftz");
        let ty = m.ty()?;
        let [d, a, b, rest @ ..] = operands else { return self.wrong() };
        let f = compare::comparison(comparison, packed::lane(ty).unwrap_or(ty)).ok_or_else(|| m.unknown())?;
        let sources = [self.compared(a, ty, flush)?, self.compared(b, ty, flush)?, 0];
        let (first, second) = match d {
            Operand::Pair(first, second) => (Operand::Name(first), Some(Operand::Name(second))),
            _ => (d.clone(), None),
        };
        let first = self.destination(&first)?.0;
        if second.is_none() && join.is_none() {
            self.alu(f, first, sources);
            return Ok(());
        }
        let holds = self.alu_temporary(f, sources)?;
        // For single values, the second predicate is the opposite of the first. For packed values, it is the
        // result of the upper halves.
        let other = match packed::lane(ty) {
            Some(_) => self.upper_halves(f, sources)?,
            None => self.alu_temporary(|a, _, _| a ^ 1, [holds, 0, 0])?,
        };
        let second = second.map(|name| self.destination(&name)).transpose()?;
        let with = match (join, rest) {
            (None, []) => None,
            (Some(join), [with]) => {
                let with = self.source(with, Ty::Pred)?;
                let kept = self.temporary()?; // the predicate may be a destination too
                self.emit(Op::Move { d: kept, a: with });
                Some((joined(join), kept))
            }
            _ => return self.wrong(),
        };
        let outcomes = [(Some(first), holds), (second.map(|(slot, _)| slot), other)];
        for (d, value) in outcomes {
            match (d, with) {
                (Some(d), Some((f, with))) => self.alu(f, d, [value, with, 0]),
                (Some(d), None) => self.emit(Op::Move { d, a: value }),
                (None, _) => {}
            }
        }
        Ok(())
    }

    /// `set`: writes all ones or 1.0 where the comparison holds, else 0.
    fn set(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let comparison = m.take_first().unwrap_or_default();
        let join = m.take_one(&["and", "or", "xor"]);
        let flush = m.take("ftz");
        let (to, from) = (m.ty()?, m.ty()?);
        let [d, a, b, rest @ ..] = operands else { return self.wrong() };
        let f =
            compare::comparison(comparison, packed::lane(from).unwrap_or(from)).ok_or_else(|| m.unknown())?;
        let sources = [self.compared(a, from, flush)?, self.compared(b, from, flush)?, 0];
        let mut holds = self.alu_temporary(f, sources)?;
        match (join, rest) {
            (None, []) => {}
            (Some(join), [with]) => {
                let with = self.source(with, Ty::Pred)?;
                holds = self.alu_temporary(joined(join), [holds, with, 0])?;
            }
            _ => return self.wrong(),
        }
        let one = match (to, packed::lane(from)) {
            (Ty::U32 | Ty::S32, Some(_)) => 0xffff,
            (Ty::F16x2, Some(_)) | (Ty::F16, None) => 0x3c00,
            (Ty::Bf16x2, Some(_)) | (Ty::Bf16, None) => 0x3f80,
            (Ty::F32, None) => u64::from(1_f32.to_bits()),
            (Ty::U32 | Ty::S32 | Ty::U16 | Ty::S16, None) => to.mask(),
            _ => return Err(m.unknown()),
        };
        let one = self.constant(one)?;
        let d = self.destination(d)?.0;
        if packed::lane(from).is_none() {
            self.alu(packed::SELECT, d, [one, 0, holds]);
            return Ok(());
        }
        if join.is_some() {
            return Err(m.unknown());
        }
        let high = self.upper_halves(f, sources)?;
        let low = self.alu_temporary(packed::SELECT, [one, 0, holds])?;
        let high = self.alu_temporary(packed::SELECT, [one, 0, high])?;
        self.alu(packed::join, d, [low, high, 0]);
        Ok(())
    }

    /// `f` applied to the upper halves of packed values.
    fn upper_halves(&mut self, f: Alu, [a, b, _]: [Slot; 3]) -> Result<Slot, PtxError> {
        let a = self.alu_temporary(packed::upper, [a, 0, 0])?;
        let b = self.alu_temporary(packed::upper, [b, 0, 0])?;
        self.alu_temporary(f, [a, b, 0])
    }

    fn select(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let by_sign = m.name == "slct";
        m.ignore(&["ftz"]);
        let ty = m.ty()?;
        let (f, chooser) = if by_sign {
            let chooser = m.ty()?;
            (packed::select_by_sign(chooser).ok_or_else(|| m.unknown())?, chooser)
        } else {
            (packed::SELECT, Ty::Pred)
        };
        let [d, a, b, c] = operands else { return self.wrong() };
        let sources = [self.source(a, ty)?, self.source(b, ty)?, self.source(c, chooser)?];
        let d = self.destination(d)?.0;
        self.alu(f, d, sources);
        Ok(())
    }
}

fn joined(name: &str) -> Alu {
    match name {
        "and" => |a, b, _| a & b,
        "or" => |a, b, _| a | b,
        _ => |a, b, _| a ^ b,
    }
}
