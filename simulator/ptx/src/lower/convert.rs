//! Moves, address and type conversions, comparisons and selections.

use crate::alu::half::Rounding;
use crate::alu::{Alu, compare, convert, float, packed};
use crate::code::{Op, Slot, Special};
use crate::error::PtxError;
use crate::lower::Lowering;
use crate::lower::modifiers::Modifiers;
use crate::lower::operand::Operand;
use crate::parse::syntax;
use crate::types::{Ty, mask};

impl<'t> Lowering<'_, 't> {
    pub(super) fn convert(
        &mut self,
        m: &mut Modifiers<'t>,
        operands: &[Operand<'t>],
    ) -> Result<(), PtxError> {
        match m.name {
            "mov" => self.mov(m, operands),
            "cvt" => self.cvt(m, operands),
            "cvta" => self.cvta(m, operands),
            "isspacep" => self.is_space(m, operands),
            "setp" => self.setp(m, operands),
            "set" => self.set(m, operands),
            _ => self.select(m, operands),
        }
    }

    fn wrong<T>(&self) -> Result<T, PtxError> {
        Err(syntax(self.line, "the operands do not fit the instruction"))
    }

    /// `mov`, also between a register and the parts of `{a, b}`.
    fn mov(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.lanes();
        let ty = m.ty()?;
        let [to, from] = operands else { return self.wrong() };
        match (self.elements(to)?, self.elements(from)?) {
            (None, None) => {
                let a = self.source(from, ty)?;
                let d = self.destination(to)?.0;
                self.emit(Op::Move { d, a });
            }
            (Some(parts), None) => self.unpack(ty, &parts, from)?,
            (None, Some(parts)) => self.pack(ty, to, &parts)?,
            (Some(to), Some(from)) => {
                let mut values = Vec::new();
                for from in &from {
                    let a = self.source(from, ty)?;
                    let d = self.temporary()?;
                    self.emit(Op::Move { d, a });
                    values.push(d);
                }
                for (to, a) in to.iter().zip(values) {
                    let d = self.destination(to)?.0;
                    self.emit(Op::Move { d, a });
                }
            }
        }
        Ok(())
    }

    /// Bits of each of `count` parts of a `ty`.
    fn part_bits(&self, ty: Ty, count: usize) -> Result<u64, PtxError> {
        match (ty.size(), count) {
            (size @ (2 | 4 | 8), 2) => Ok(u64::from(size) * 4),
            (size @ (4 | 8), 4) => Ok(u64::from(size) * 2),
            _ => self.wrong(),
        }
    }

    fn unpack(&mut self, ty: Ty, parts: &[Operand<'t>], from: &Operand<'t>) -> Result<(), PtxError> {
        let bits = self.part_bits(ty, parts.len())?;
        let source = self.source(from, ty)?;
        let whole = self.temporary()?; // a part may be the source itself
        self.emit(Op::Move { d: whole, a: source });
        let part_mask = self.constant((1 << bits) - 1)?;
        let mut shift = 0;
        for part in parts {
            let d = self.destination(part)?.0;
            let distance = self.constant(shift)?;
            self.alu(|a, b, c| (a >> b) & c, d, [whole, distance, part_mask]);
            shift += bits;
        }
        Ok(())
    }

    fn pack(&mut self, ty: Ty, to: &Operand<'t>, parts: &[Operand<'t>]) -> Result<(), PtxError> {
        let bits = self.part_bits(ty, parts.len())?;
        let part = if bits == 8 {
            Ty::B8
        } else if bits == 16 {
            Ty::B16
        } else {
            Ty::B32
        };
        let part_mask = self.constant(part.mask())?;
        let (mut whole, mut shift) = (0, 0);
        for operand in parts {
            let value = self.source(operand, part)?;
            let masked = self.alu_temporary(|a, b, _| a & b, [value, part_mask, 0])?;
            let distance = self.constant(shift)?;
            whole = self.alu_temporary(|a, b, c| a | (b << c), [whole, masked, distance])?;
            shift += bits;
        }
        let d = self.destination(to)?.0;
        self.emit(Op::Move { d, a: whole });
        Ok(())
    }

    /// Shared addresses are offsets in the block's window; all other spaces are the generic one.
    fn cvta(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let to_space = m.take("to");
        let shared = m.take("shared") || m.take("shared::cta") || m.take("shared::cluster");
        m.ignore(&["global", "local", "const", "param", "param::entry"]);
        let ty = m.ty()?;
        let [d, a] = operands else { return self.wrong() };
        let a = self.source(a, ty)?;
        let d = self.destination(d)?.0;
        if !shared {
            self.emit(Op::Move { d, a });
            return Ok(());
        }
        let start = self.special(Special::SharedStart)?;
        let f: Alu = if to_space { |a, b, _| a.wrapping_sub(b) } else { |a, b, _| a.wrapping_add(b) };
        self.alu(f, d, [a, start, 0]);
        Ok(())
    }

    fn is_space(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let space = m.take_first().unwrap_or_default();
        let [d, a] = operands else { return self.wrong() };
        let a = self.source(a, Ty::U64)?;
        let d = self.destination(d)?.0;
        let bounds = |shared| match shared {
            true => [Special::SharedStart, Special::SharedEnd],
            false => [Special::LocalStart, Special::LocalEnd],
        };
        let mut inside = [0; 2];
        for (result, shared) in inside.iter_mut().zip([true, false]) {
            let [low, high] = bounds(shared);
            let (low, high) = (self.special(low)?, self.special(high)?);
            *result = self.alu_temporary(packed::IN_RANGE, [a, low, high])?;
        }
        match space {
            "shared" | "shared::cta" | "shared::cluster" => self.emit(Op::Move { d, a: inside[0] }),
            "local" => self.emit(Op::Move { d, a: inside[1] }),
            "global" => self.alu(|a, b, _| u64::from(a | b == 0), d, [inside[0], inside[1], 0]),
            _ => return Err(m.unknown()),
        }
        Ok(())
    }

    fn cvt(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let (rounding, whole) = (m.rounding(), m.whole_rounding());
        let (flush, saturate, relu) = (m.take("ftz"), m.take("sat"), m.take("relu"));
        let (to, from) = (m.ty()?, m.ty()?);
        if let [d, a, b] = operands {
            let f =
                packed::pack_singles(to).filter(|_| from == Ty::F32 && rounding == Some(Rounding::Nearest));
            let f = f.filter(|_| !relu && !saturate).ok_or_else(|| m.unknown())?;
            let sources = [self.source(a, from)?, self.source(b, from)?, 0];
            let d = self.destination(d)?.0;
            self.alu(f, d, sources);
            return Ok(());
        }
        let [d, a] = operands else { return self.wrong() };
        let mut value = self.source(a, from)?;
        let (d, register) = self.destination(d)?;
        if flush && from == Ty::F32 {
            value = self.step(float::flush(from), m, value)?;
        }
        value = match (from.is_float(), to.is_float()) {
            (false, false) => self.step(convert::integer(to, from, saturate), m, value)?,
            (false, true) => {
                self.step(convert::to_real(to, from, rounding.unwrap_or(Rounding::Nearest)), m, value)?
            }
            (true, _) => {
                let pair = convert::from_real(to, from, whole, rounding.unwrap_or(Rounding::Nearest));
                let (first, second) = pair.ok_or_else(|| m.unknown())?;
                let double = self.step(Some(first), m, value)?;
                self.step(Some(second), m, double)?
            }
        };
        if flush && to == Ty::F32 {
            value = self.step(float::flush(to), m, value)?;
        }
        if saturate && to.is_float() {
            value = self.step(float::saturate(to), m, value)?;
        }
        if relu {
            value = self.step(float::rectify(to), m, value)?;
        }
        self.extend(value, to, d, register)
    }

    fn step(&mut self, f: Option<Alu>, m: &Modifiers<'t>, a: Slot) -> Result<Slot, PtxError> {
        self.alu_temporary(f.ok_or_else(|| m.unknown())?, [a, 0, 0])
    }

    /// Writes a value of type `ty` to a register that may be wider: signed values keep their sign.
    fn extend(&mut self, value: Slot, ty: Ty, d: Slot, register: Ty) -> Result<(), PtxError> {
        match convert::sign_extend(ty) {
            Some(f) if register.size() > ty.size() => {
                let wide = self.alu_temporary(f, [value, 0, 0])?;
                let bits = self.constant(mask(register.size()))?;
                self.alu(|a, b, _| a & b, d, [wide, bits, 0]);
            }
            _ => self.emit(Op::Move { d, a: value }),
        }
        Ok(())
    }

    /// The operands of a comparison, flushed if asked.
    fn compared(&mut self, operand: &Operand<'t>, ty: Ty, flush: bool) -> Result<Slot, PtxError> {
        let value = self.source(operand, ty)?;
        match float::flush(ty) {
            Some(f) if flush => self.alu_temporary(f, [value, 0, 0]),
            _ => Ok(value),
        }
    }

    fn setp(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let comparison = m.take_first().unwrap_or_default();
        let join = m.take_one(&["and", "or", "xor"]);
        let flush = m.take("ftz");
        let ty = m.ty()?;
        let [d, a, b, rest @ ..] = operands else { return self.wrong() };
        let f = compare::comparison(comparison, ty).ok_or_else(|| m.unknown())?;
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
        let fails = self.alu_temporary(|a, _, _| a ^ 1, [holds, 0, 0])?;
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
        let outcomes = [(Some(first), holds), (second.map(|(slot, _)| slot), fails)];
        for (d, value) in outcomes {
            match (d, with) {
                (Some(d), Some((f, with))) => self.alu(f, d, [value, with, 0]),
                (Some(d), None) => self.emit(Op::Move { d, a: value }),
                (None, _) => {}
            }
        }
        Ok(())
    }

    /// `set`: all ones or 1.0 where the comparison holds.
    fn set(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let comparison = m.take_first().unwrap_or_default();
        let join = m.take_one(&["and", "or", "xor"]);
        let flush = m.take("ftz");
        let (to, from) = (m.ty()?, m.ty()?);
        let [d, a, b, rest @ ..] = operands else { return self.wrong() };
        let f = compare::comparison(comparison, from).ok_or_else(|| m.unknown())?;
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
        let one = match to {
            Ty::F32 => u64::from(1_f32.to_bits()),
            Ty::U32 | Ty::S32 | Ty::U16 | Ty::S16 => to.mask(),
            Ty::F16 => 0x3c00,
            _ => return Err(m.unknown()),
        };
        let one = self.constant(one)?;
        let d = self.destination(d)?.0;
        self.alu(packed::SELECT, d, [one, 0, holds]);
        Ok(())
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
