//! Arithmetic, logic and bit instructions.

use crate::alu::half::Rounding;
use crate::alu::{Alu, float, integer, packed};
use crate::code::{Op, Slot};
use crate::error::PtxError;
use crate::lower::Lowering;
use crate::lower::modifiers::Modifiers;
use crate::lower::operand::Operand;
use crate::parse::syntax;
use crate::types::Ty;

impl<'t> Lowering<'_, 't> {
    pub(super) fn arithmetic(
        &mut self,
        m: &mut Modifiers<'t>,
        operands: &[Operand<'t>],
    ) -> Result<(), PtxError> {
        let sets_carry = m.take("cc");
        match m.name {
            "addc" | "subc" | "madc" => return self.with_carry(m, sets_carry, operands),
            "add" | "sub" | "mad" if sets_carry => return self.with_carry(m, sets_carry, operands),
            _ if sets_carry => return Err(m.unknown()),
            "lop3" | "bfi" => return self.four(m, operands),
            "shl" | "shr" | "shf" | "bfe" | "bmsk" | "fns" | "prmt" => return self.bits(m, operands),
            "popc" | "clz" | "brev" | "bfind" => return self.bits(m, operands),
            "and" | "or" | "xor" | "not" | "cnot" => {
                let ty = m.ty()?;
                let f = integer::logic(m.name, ty).ok_or_else(|| m.unknown())?;
                return self.simple(f, ty, operands);
            }
            "testp" => {
                let class = m.take_first().unwrap_or_default();
                let ty = m.ty()?;
                let f = float::test(class, ty).ok_or_else(|| m.unknown())?;
                return self.simple(f, ty, operands);
            }
            "dp4a" => {
                let (a, b) = (m.ty()?, m.ty()?);
                let f = integer::dot4(a, b).ok_or_else(|| m.unknown())?;
                return self.simple(f, a, operands);
            }
            _ => {}
        }
        let rounding = m.rounding();
        let ty = m.ty()?;
        if ty.is_float() {
            return self.float(m, ty, rounding, operands);
        }
        self.whole(m, ty, operands)
    }

    /// Emits an instruction that is one operation on operands of one type.
    fn simple(&mut self, f: Alu, ty: Ty, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let (d, sources) = self.destination_and_sources(ty, operands)?;
        self.alu(f, d, sources);
        Ok(())
    }

    /// The first operand as destination, and one to three more as sources.
    fn destination_and_sources(
        &mut self,
        ty: Ty,
        operands: &[Operand<'t>],
    ) -> Result<(Slot, [Slot; 3]), PtxError> {
        let [d, rest @ ..] = operands else { return Err(syntax(self.line, "operands expected")) };
        if rest.is_empty() || rest.len() > 3 {
            return Err(syntax(self.line, "wrong number of operands"));
        }
        let mut sources = [0; 3];
        for (slot, operand) in sources.iter_mut().zip(rest) {
            *slot = self.source(operand, ty)?;
        }
        Ok((self.destination(d)?.0, sources))
    }

    fn bits(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let mut name = m.name.to_owned();
        for modifier in ["l", "r", "wrap", "clamp", "shiftamt"] {
            if m.take(modifier) {
                name = format!("{name}.{modifier}");
            }
        }
        let ty = m.ty()?;
        if m.name == "prmt" {
            return self.simple(integer::permute, ty, operands);
        }
        let f = match m.name {
            "shl" | "shr" => integer::shift(&name, ty),
            _ => integer::bits(&name, ty),
        };
        self.simple(f.ok_or_else(|| m.unknown())?, ty, operands)
    }

    fn four(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let ty = m.ty()?;
        let f = integer::four(m.name, ty).ok_or_else(|| m.unknown())?;
        let [d, a, b, c, e] = operands else { return Err(syntax(self.line, "five operands expected")) };
        let sources =
            [self.source(a, ty)?, self.source(b, ty)?, self.source(c, Ty::U32)?, self.source(e, Ty::U32)?];
        let d = self.destination(d)?.0;
        self.emit(Op::Alu4 { f, d, operands: sources });
        Ok(())
    }

    /// Emits integer arithmetic without carry.
    fn whole(&mut self, m: &mut Modifiers<'t>, ty: Ty, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        if let Some(lane) = packed::lane(ty) {
            let f = integer::arithmetic(m.name, lane).ok_or_else(|| m.unknown())?;
            return self.packed(f, ty, operands);
        }
        let mut name = m.name.to_owned();
        for modifier in ["lo", "hi", "wide", "sat"] {
            if m.take(modifier) {
                name = format!("{name}.{modifier}");
            }
        }
        let relu = m.take("relu");
        let f = integer::arithmetic(&name, ty).or_else(|| integer::wide(&name, ty));
        let f = f.ok_or_else(|| m.unknown())?;
        if name == "mad.wide" && matches!(operands.last(), Some(Operand::Literal(_))) {
            // The addend has twice the width of the factors, so its constant must not be cut to theirs.
            let [d, a, b, c] = operands else { return Err(syntax(self.line, "four operands expected")) };
            let sources = [self.source(a, ty)?, self.source(b, ty)?, self.source(c, Ty::U64)?];
            let d = self.destination(d)?.0;
            self.alu(f, d, sources);
            return Ok(());
        }
        let (d, sources) = self.destination_and_sources(ty, operands)?;
        self.alu(f, d, sources);
        if relu {
            let rectify = float::rectify(ty).ok_or_else(|| m.unknown())?;
            self.alu(rectify, d, [d, 0, 0]);
        }
        Ok(())
    }

    /// Emits `f` on each half of packed operands.
    fn packed(&mut self, f: Alu, ty: Ty, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let (d, sources) = self.destination_and_sources(ty, operands)?;
        self.packed_slots(f, d, sources)
    }

    fn packed_slots(&mut self, f: Alu, d: Slot, sources: [Slot; 3]) -> Result<(), PtxError> {
        let mut uppers = [0; 3];
        for (upper, source) in uppers.iter_mut().zip(sources) {
            *upper = self.alu_temporary(packed::upper, [source, 0, 0])?;
        }
        let low = self.alu_temporary(f, sources)?;
        let high = self.alu_temporary(f, uppers)?;
        self.alu(packed::join, d, [low, high, 0]);
        Ok(())
    }

    /// Emits floating-point arithmetic. Flushing comes before and after it; saturation comes last.
    fn float(
        &mut self,
        m: &mut Modifiers<'t>,
        ty: Ty,
        rounding: Option<Rounding>,
        operands: &[Operand<'t>],
    ) -> Result<(), PtxError> {
        let lane = packed::lane(ty).unwrap_or(ty);
        let (flush, approximate) = (m.take("ftz"), m.take("approx"));
        m.ignore(&["full"]);
        let name = if m.name == "mad" { "fma" } else { m.name };
        let f = match (name, ty) {
            ("rcp", Ty::F64) if approximate => float::plain("rcp.ftz", ty),
            ("rsqrt", Ty::F64) if flush => float::plain("rsqrt.ftz", ty),
            _ => float::rounded(name, lane, rounding.unwrap_or(Rounding::Nearest))
                .or_else(|| float::plain(name, lane)),
        };
        let f = f.ok_or_else(|| m.unknown())?;
        let flush = float::flush(lane).filter(|_| flush);
        let (d, mut sources) = self.destination_and_sources(ty, operands)?;
        if let Some(flush) = flush {
            for source in sources.iter_mut().take(operands.len() - 1) {
                *source = self.each(flush, ty, [*source, 0, 0])?;
            }
        }
        let after = [
            if m.take("NaN") { Some(float::keep_nan(lane).ok_or_else(|| m.unknown())?) } else { None },
            flush,
            if m.take("sat") { Some(float::saturate(lane).ok_or_else(|| m.unknown())?) } else { None },
            if m.take("relu") { Some(float::rectify(lane).ok_or_else(|| m.unknown())?) } else { None },
        ];
        if after.iter().all(Option::is_none) {
            return self.each_into(f, ty, d, sources);
        }
        let mut result = self.each(f, ty, sources)?;
        for step in after.into_iter().flatten() {
            result = self.each(step, ty, [result, sources[0], sources[1]])?;
        }
        self.emit(Op::Move { d, a: result });
        Ok(())
    }

    /// Emits `f` into a temporary, on both halves if the type is packed.
    pub(super) fn each(&mut self, f: Alu, ty: Ty, sources: [Slot; 3]) -> Result<Slot, PtxError> {
        let d = self.temporary()?;
        self.each_into(f, ty, d, sources)?;
        Ok(d)
    }

    fn each_into(&mut self, f: Alu, ty: Ty, d: Slot, sources: [Slot; 3]) -> Result<(), PtxError> {
        if packed::lane(ty).is_some() {
            return self.packed_slots(f, d, sources);
        }
        self.alu(f, d, sources);
        Ok(())
    }

    /// `add.cc`, `addc`, `sub.cc`, `subc`, `mad.cc` and `madc`. The carry is a slot of the function.
    fn with_carry(
        &mut self,
        m: &mut Modifiers<'t>,
        sets_carry: bool,
        operands: &[Operand<'t>],
    ) -> Result<(), PtxError> {
        let half = m.take_one(&["lo", "hi"]);
        let ty = m.ty()?;
        let carry = match self.carry {
            Some(slot) => slot,
            None => self.slot(0)?,
        };
        self.carry = Some(carry);
        let (d, [mut a, mut b, c]) = self.destination_and_sources(ty, operands)?;
        if let Some(half) = half {
            let product = integer::arithmetic(&format!("mul.{half}"), ty).ok_or_else(|| m.unknown())?;
            a = self.alu_temporary(product, [a, b, 0])?;
            b = c;
        }
        let subtract = m.name.starts_with("sub");
        let pair = if subtract { integer::subtract_with_borrow(ty) } else { integer::add_with_carry(ty) };
        let (value, out) = pair.ok_or_else(|| m.unknown())?;
        let carry_in = if m.name.ends_with('c') { carry } else { 0 };
        let carry_out = self.alu_temporary(out, [a, b, carry_in])?;
        self.alu(value, d, [a, b, carry_in]);
        if sets_carry {
            self.emit(Op::Move { d: carry, a: carry_out });
        }
        Ok(())
    }
}
