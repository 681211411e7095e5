//! Instructions that several threads execute together: barriers, shuffles, votes and the like.

use crate::alu::integer;
use crate::code::{Barrier, BarrierKind, Op, Reduction, Shuffle, Slot, Warp, WarpKind};
use crate::error::PtxError;
use crate::lower::Lowering;
use crate::lower::modifiers::Modifiers;
use crate::lower::operand::Operand;
use crate::parse::syntax;
use crate::types::Ty;

/// The mask of instructions without one (PTX before 6.0): all lanes of the warp that have not exited.
const ALL_LANES: u64 = 0xffff_ffff;

impl<'t> Lowering<'_, 't> {
    pub(super) fn warp(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let whole_warp = m.take("warp");
        match m.name {
            "bar" | "barrier" if whole_warp => {
                m.ignore(&["sync"]);
                let [mask] = operands else { return self.malformed() };
                let mask = self.source(mask, Ty::B32)?;
                let d = self.temporary()?;
                self.emit_warp(WarpKind::Sync, mask, d, None, [0; 3]);
                Ok(())
            }
            "bar" | "barrier" => self.barrier(m, operands),
            "shfl" => self.shuffle(m, operands),
            "vote" => self.vote(m, operands),
            "match" => self.match_values(m, operands),
            "redux" => self.reduce(m, operands),
            "elect" => self.elect(m, operands),
            _ => {
                m.ty()?;
                let [d] = operands else { return self.malformed() };
                let d = self.destination(d)?.0;
                self.emit_warp(WarpKind::ActiveMask, 0, d, None, [0; 3]);
                Ok(())
            }
        }
    }

    fn malformed<T>(&self) -> Result<T, PtxError> {
        Err(syntax(self.line, "the operands do not fit the instruction"))
    }

    fn emit_warp(&mut self, kind: WarpKind, mask: Slot, d: Slot, p: Option<Slot>, [a, b, c]: [Slot; 3]) {
        self.emit(Op::Warp(Box::new(Warp { kind, mask, d, p, a, b, c })));
    }

    /// Destinations of `d` or `d|p`.
    fn two_destinations(&mut self, operand: &Operand<'t>) -> Result<(Slot, Option<Slot>), PtxError> {
        match operand {
            Operand::Pair(d, p) => {
                let d = self.destination(&Operand::Name(d))?.0;
                Ok((d, Some(self.destination(&Operand::Name(p))?.0)))
            }
            _ => Ok((self.destination(operand)?.0, None)),
        }
    }

    fn barrier(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore(&["cta", "aligned"]);
        let (number, threads, kind) = match (m.take_first(), operands) {
            (Some("sync"), [number]) => (number, None, BarrierKind::Sync),
            (Some("sync"), [number, threads]) => (number, Some(threads), BarrierKind::Sync),
            (Some("arrive"), [number, threads]) => (number, Some(threads), BarrierKind::Arrive),
            (Some("red"), operands) => return self.barrier_reduction(m, operands),
            _ => return Err(m.unknown()),
        };
        let number = self.source(number, Ty::U32)?;
        let threads = threads.map(|threads| self.source(threads, Ty::U32)).transpose()?;
        self.emit(Op::Barrier(Box::new(Barrier { number, threads, kind })));
        Ok(())
    }

    fn barrier_reduction(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        let reduction = match m.take_first() {
            Some("popc") => Reduction::Count,
            Some("and") => Reduction::And,
            Some("or") => Reduction::Or,
            _ => return Err(m.unknown()),
        };
        m.ignore(&["aligned"]);
        m.ty()?;
        let (d, number, threads, predicate) = match operands {
            [d, number, predicate] => (d, number, None, predicate),
            [d, number, threads, predicate] => (d, number, Some(threads), predicate),
            _ => return self.malformed(),
        };
        let number = self.source(number, Ty::U32)?;
        let threads = threads.map(|threads| self.source(threads, Ty::U32)).transpose()?;
        let predicate = self.source(predicate, Ty::Pred)?;
        let kind = BarrierKind::Reduce { reduction, d: self.destination(d)?.0, predicate };
        self.emit(Op::Barrier(Box::new(Barrier { number, threads, kind })));
        Ok(())
    }

    /// The mask operand if there is one, else all lanes.
    fn mask(&mut self, operand: Option<&Operand<'t>>) -> Result<Slot, PtxError> {
        match operand {
            Some(mask) => self.source(mask, Ty::B32),
            None => self.constant(ALL_LANES),
        }
    }

    fn shuffle(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore(&["sync"]);
        let shuffle = match m.take_first() {
            Some("up") => Shuffle::Up,
            Some("down") => Shuffle::Down,
            Some("bfly") => Shuffle::Butterfly,
            Some("idx") => Shuffle::Index,
            _ => return Err(m.unknown()),
        };
        m.ty()?;
        let [d, a, b, c, mask @ ..] = operands else { return self.malformed() };
        let sources = [self.source(a, Ty::B32)?, self.source(b, Ty::B32)?, self.source(c, Ty::B32)?];
        let mask = self.mask(mask.first())?;
        let (d, p) = self.two_destinations(d)?;
        self.emit_warp(WarpKind::Shuffle(shuffle), mask, d, p, sources);
        Ok(())
    }

    fn vote(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore(&["sync"]);
        let kind = match m.take_first() {
            Some("ballot") => WarpKind::Ballot,
            Some("all") => WarpKind::All,
            Some("any") => WarpKind::Any,
            Some("uni") => WarpKind::Uniform,
            _ => return Err(m.unknown()),
        };
        m.ty()?;
        let [d, a, mask @ ..] = operands else { return self.malformed() };
        let a = self.source(a, Ty::Pred)?;
        let mask = self.mask(mask.first())?;
        let d = self.destination(d)?.0;
        self.emit_warp(kind, mask, d, None, [a, 0, 0]);
        Ok(())
    }

    fn match_values(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore(&["sync"]);
        let kind = match m.take_first() {
            Some("any") => WarpKind::MatchAny,
            Some("all") => WarpKind::MatchAll,
            _ => return Err(m.unknown()),
        };
        let ty = m.ty()?;
        let [d, a, mask] = operands else { return self.malformed() };
        let a = self.source(a, ty)?;
        let mask = self.source(mask, Ty::B32)?;
        let (d, p) = self.two_destinations(d)?;
        self.emit_warp(kind, mask, d, p, [a, 0, 0]);
        Ok(())
    }

    fn reduce(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore(&["sync"]);
        let name = m.take_first().unwrap_or_default();
        let ty = m.ty()?;
        let f = match name {
            "and" | "or" | "xor" => integer::logic(name, ty),
            "add" | "min" | "max" => integer::arithmetic(name, ty),
            _ => None,
        };
        let f = f.filter(|_| ty.size() == 4 && !ty.is_float()).ok_or_else(|| m.unknown())?;
        let [d, a, mask] = operands else { return self.malformed() };
        let a = self.source(a, ty)?;
        let mask = self.source(mask, Ty::B32)?;
        let d = self.destination(d)?.0;
        self.emit_warp(WarpKind::Reduce(f), mask, d, None, [a, 0, 0]);
        Ok(())
    }

    fn elect(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        m.ignore(&["sync"]);
        let [d, mask] = operands else { return self.malformed() };
        let mask = self.source(mask, Ty::B32)?;
        let (d, p) = self.two_destinations(d)?;
        self.emit_warp(WarpKind::Elect, mask, d, p, [0; 3]);
        Ok(())
    }
}
