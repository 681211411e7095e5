//! Loads, stores, atomic operations, and asynchronous copies, which are done at once.

use crate::alu::scalar::Scalar;
use crate::alu::{Alu, alu, float, integer, packed};
use crate::code::{Access, Atomic, Op, Slot};
use crate::error::PtxError;
use crate::lower::Lowering;
use crate::lower::modifiers::Modifiers;
use crate::lower::operand::Operand;
use crate::parse::syntax;
use crate::types::{Literal, Ty};

/// Order, scope and cache modifiers. They are ignored, because one interpreter executes everything in order.
const HINTS: &[&str] = &[
    "volatile", "weak", "relaxed", "acquire", "release", "acq_rel", "mmio", "cta", "cluster", "gpu", "sys",
    "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "noftz", "aligned", "unified",
];

/// Place that an address operand points to.
struct Target {
    base: Slot,
    offset: i64,
}

impl<'t> Lowering<'_, 't> {
    pub(super) fn memory(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore_cache_hints();
        if m.name == "cp" {
            return self.copy(m, operands);
        }
        m.ignore(HINTS);
        let shared = m.take("shared") || m.take("shared::cta") || m.take("shared::cluster");
        m.ignore(&["global", "local", "param", "param::entry", "param::func", "const"]);
        if matches!(m.name, "atom" | "red") {
            return self.atomic(m, shared, operands);
        }
        let lanes = m.lanes();
        let ty = m.ty()?;
        let [d, a] = operands else { return Err(syntax(self.line, "two operands expected")) };
        let align = ty.size() * lanes;
        let access = Access { size: ty.size(), align, shared, extend: 0 };
        if m.name == "st" {
            return self.store(d, a, ty, access);
        }
        self.load(d, a, ty, access)
    }

    fn address(&mut self, operand: &Operand<'t>) -> Result<Target, PtxError> {
        match operand {
            Operand::Address(base, offset) => {
                Ok(Target { base: self.source(base, Ty::U64)?, offset: *offset })
            }
            _ => Err(syntax(self.line, "an address in brackets expected")),
        }
    }

    fn load(&mut self, d: &Operand<'t>, a: &Operand<'t>, ty: Ty, access: Access) -> Result<(), PtxError> {
        let mut target = self.address(a)?;
        let elements = self.elements(d)?.unwrap_or_else(|| vec![d.clone()]);
        if usize::from(access.align / access.size) != elements.len() {
            return Err(syntax(self.line, "the vector does not fit the instruction"));
        }
        if elements.len() > 1 {
            let base = self.temporary()?; // the first element may overwrite the address
            self.emit(Op::Move { d: base, a: target.base });
            target.base = base;
        }
        for (element, mut access) in elements.iter().zip(self.lanes_of(access)) {
            let (d, register) = self.destination(element)?;
            if ty.is_signed() && register.size() > ty.size() {
                access.extend = register.size();
            }
            self.emit(Op::Load { d, base: target.base, offset: target.offset, access });
            target.offset += i64::from(access.size);
        }
        Ok(())
    }

    fn store(&mut self, d: &Operand<'t>, a: &Operand<'t>, ty: Ty, access: Access) -> Result<(), PtxError> {
        let mut target = self.address(d)?;
        let elements = self.elements(a)?.unwrap_or_else(|| vec![a.clone()]);
        if usize::from(access.align / access.size) != elements.len() {
            return Err(syntax(self.line, "the vector does not fit the instruction"));
        }
        for (element, access) in elements.iter().zip(self.lanes_of(access)) {
            let a = self.source(element, ty)?;
            self.emit(Op::Store { a, base: target.base, offset: target.offset, access });
            target.offset += i64::from(access.size);
        }
        Ok(())
    }

    /// The accesses of a vector's elements. The first one checks the alignment of the whole vector.
    fn lanes_of(&self, access: Access) -> impl Iterator<Item = Access> + use<> {
        let rest = Access { align: access.size, ..access };
        std::iter::once(access).chain(std::iter::repeat(rest))
    }

    fn atomic(
        &mut self,
        m: &mut Modifiers<'t>,
        shared: bool,
        operands: &[Operand<'t>],
    ) -> Result<(), PtxError> {
        let names = ["add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"];
        let name = m.take_one(&names).ok_or_else(|| m.unknown())?;
        let ty = m.ty()?;
        let f = operation(name, ty).filter(|_| ty.size() > 1).ok_or_else(|| m.unknown())?;
        let (d, operands) = match (m.name, operands) {
            ("atom", [d, rest @ ..]) => (Some(self.destination(d)?.0), rest),
            _ => (None, operands),
        };
        let (a, b, c) = match operands {
            [a, b] if name != "cas" => (a, b, None),
            [a, b, c] if name == "cas" => (a, b, Some(c)),
            _ => return Err(syntax(self.line, "wrong number of operands")),
        };
        let target = self.address(a)?;
        let b = self.source(b, ty)?;
        let c = c.map_or(Ok(0), |c| self.source(c, ty))?;
        let access = Access { size: ty.size(), align: ty.size(), shared, extend: 0 };
        let atomic = Atomic { f, d, base: target.base, offset: target.offset, b, c, access };
        self.emit(Op::Atomic(Box::new(atomic)));
        Ok(())
    }

    /// `cp.async` from global to shared memory, and the waits for it, which do nothing.
    fn copy(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        if !m.take("async") {
            return Err(m.unknown());
        }
        if m.take("commit_group") || m.take("wait_group") || m.take("wait_all") {
            return Ok(());
        }
        m.ignore(&["ca", "cg"]);
        if !m.take("shared") && !m.take("shared::cta") || !m.take("global") {
            return Err(m.unknown());
        }
        let [to, from, Operand::Literal(Literal::Int(total)), rest @ ..] = operands else {
            return Err(syntax(self.line, "two addresses and a constant size expected"));
        };
        let total = u8::try_from(*total).ok().filter(|total| matches!(total, 4 | 8 | 16));
        let total = total.ok_or_else(|| m.unknown())?;
        let (to, from) = (self.address(to)?, self.address(from)?);
        let bytes = match rest {
            [] => self.constant(u64::from(total))?,
            [bytes] => self.source(bytes, Ty::U32)?,
            _ => return Err(m.unknown()),
        };
        self.emit(Op::CopyToShared {
            to: to.base,
            to_offset: to.offset,
            from: from.base,
            from_offset: from.offset,
            bytes,
            total,
        });
        Ok(())
    }
}

/// The function that gives the new value from the old one and the operands.
fn operation(name: &str, ty: Ty) -> Option<Alu> {
    Some(match (name, ty) {
        ("exch", _) => |_, b, _| b,
        ("cas", Ty::B16 | Ty::B32 | Ty::B64) => |old, b, c| if old == b { c } else { old },
        ("and" | "or" | "xor", Ty::B32 | Ty::B64) => return integer::logic(name, ty),
        ("inc", Ty::U32) => alu!(u32, |old, b, _| if old >= b { 0_u32 } else { old + 1 }),
        ("dec", Ty::U32) => alu!(u32, |old, b, _| if old == 0 || old > b { b } else { old - 1 }),
        ("add", Ty::F16x2) => |old, b, _| both_halves(Ty::F16, old, b),
        ("add", Ty::Bf16x2) => |old, b, _| both_halves(Ty::Bf16, old, b),
        ("add", _) if ty.is_float() => return float::rounded("add", ty, crate::alu::half::Rounding::Nearest),
        ("add" | "min" | "max", _) => return integer::arithmetic(name, ty),
        _ => return None,
    })
}

fn both_halves(lane: Ty, old: u64, b: u64) -> u64 {
    let Some(add) = float::rounded("add", lane, crate::alu::half::Rounding::Nearest) else { return old };
    packed::join(add(old, b, 0), add(packed::upper(old, 0, 0), packed::upper(b, 0, 0), 0), 0)
}
