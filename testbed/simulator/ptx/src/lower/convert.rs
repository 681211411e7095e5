//! Moves, conversions of addresses, and conversions of types.

use crate::alu::half::Rounding;
use crate::alu::{Alu, convert, float, packed};
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
            _ => self.is_space(m, operands),
        }
    }

    pub(super) fn wrong<T>(&self) -> Result<T, PtxError> {
        Err(syntax(self.line, "the operands do not fit the instruction"))
    }

    /// `mov`, also between a register and the parts in `{a, b}`.
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

    /// Bits of each part, if a value of `ty` is split into `count` parts.
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

    /// `cvta`: shared addresses are offsets in the block's shared memory; all other spaces are the generic
    /// one.
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

    /// Writes a value of type `ty` to a register that may be wider. Signed values keep their sign.
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
}
