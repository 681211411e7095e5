//! Comparisons of `setp` and `set`.

use super::half::{BF16, F16};
use super::scalar::Scalar;
use super::{Alu, alu, alu_by_integer};
use crate::types::Ty;

/// The comparison `name` of two values of `ty`, whose result is 0 or 1; `None` if there is none.
pub(crate) fn comparison(name: &str, ty: Ty) -> Option<Alu> {
    match ty {
        Ty::F32 => real::<f32>(name),
        Ty::F64 => real::<f64>(name),
        Ty::F16 => real::<F16>(name),
        Ty::Bf16 => real::<BF16>(name),
        _ => integer(name, ty),
    }
}

fn integer(name: &str, ty: Ty) -> Option<Alu> {
    // `lo`, `ls`, `hi`, `hs` are the unsigned spellings.
    match name {
        "eq" => alu_by_integer!(ty, |a, b, _| a == b),
        "ne" => alu_by_integer!(ty, |a, b, _| a != b),
        "lt" | "lo" => alu_by_integer!(ty, |a, b, _| a < b),
        "le" | "ls" => alu_by_integer!(ty, |a, b, _| a <= b),
        "gt" | "hi" => alu_by_integer!(ty, |a, b, _| a > b),
        "ge" | "hs" => alu_by_integer!(ty, |a, b, _| a >= b),
        _ => None,
    }
}

/// A value that compares like the double of the same value.
trait Number: Scalar {
    fn number(self) -> f64;
}

impl Number for f32 {
    #[inline]
    fn number(self) -> f64 {
        f64::from(self)
    }
}

impl Number for f64 {
    #[inline]
    fn number(self) -> f64 {
        self
    }
}

impl Number for F16 {
    fn number(self) -> f64 {
        self.widen()
    }
}

impl Number for BF16 {
    fn number(self) -> f64 {
        self.widen()
    }
}

#[expect(clippy::neg_cmp_op_on_partial_ord, reason = "the unordered comparisons are true for a NaN")]
fn real<T: Number>(name: &str) -> Option<Alu> {
    Some(match name {
        "eq" => alu!(T, |a, b, _| a.number() == b.number()),
        "ne" => alu!(T, |a, b, _| a.number() < b.number() || a.number() > b.number()),
        "lt" => alu!(T, |a, b, _| a.number() < b.number()),
        "le" => alu!(T, |a, b, _| a.number() <= b.number()),
        "gt" => alu!(T, |a, b, _| a.number() > b.number()),
        "ge" => alu!(T, |a, b, _| a.number() >= b.number()),
        "equ" => alu!(T, |a, b, _| !(a.number() < b.number() || a.number() > b.number())),
        "neu" => alu!(T, |a, b, _| a.number() != b.number()),
        "ltu" => alu!(T, |a, b, _| !(a.number() >= b.number())),
        "leu" => alu!(T, |a, b, _| !(a.number() > b.number())),
        "gtu" => alu!(T, |a, b, _| !(a.number() <= b.number())),
        "geu" => alu!(T, |a, b, _| !(a.number() < b.number())),
        "num" => alu!(T, |a, b, _| !a.number().is_nan() && !b.number().is_nan()),
        "nan" => alu!(T, |a, b, _| a.number().is_nan() || b.number().is_nan()),
        _ => return None,
    })
}
