//! Instructions on the two 16-bit halves of a 32-bit register, each done by the scalar instruction.

use super::Alu;
use super::half::{BF16, F16, Rounding};
use super::scalar::Scalar;
use crate::types::Ty;

/// The type of each half, if `ty` is packed.
pub(crate) fn lane(ty: Ty) -> Option<Ty> {
    Some(match ty {
        Ty::F16x2 => Ty::F16,
        Ty::Bf16x2 => Ty::Bf16,
        Ty::U16x2 => Ty::U16,
        Ty::S16x2 => Ty::S16,
        _ => return None,
    })
}

/// The upper half.
pub(crate) fn upper(a: u64, _: u64, _: u64) -> u64 {
    a >> 16 & 0xffff
}

/// Joins the halves a (low) and b (high) into one value.
pub(crate) fn join(a: u64, b: u64, _: u64) -> u64 {
    a & 0xffff | (b & 0xffff) << 16
}

/// `cvt.rn.f16x2.f32 d, a, b`: a becomes the upper half.
pub(crate) fn pack_singles(to: Ty) -> Option<Alu> {
    Some(match to {
        Ty::F16x2 => |a, b, _| {
            let half = |slot| F16::narrow(f64::from(f32::of(slot)), Rounding::Nearest).bits();
            half(b) | half(a) << 16
        },
        Ty::Bf16x2 => |a, b, _| {
            let half = |slot| BF16::narrow(f64::from(f32::of(slot)), Rounding::Nearest).bits();
            half(b) | half(a) << 16
        },
        _ => return None,
    })
}

/// A select that keeps the slot's type: `c` chooses a (1) or b (0).
pub(crate) const SELECT: Alu = |a, b, c| if c != 0 { a } else { b };

/// `slct`: a if c is not negative, else b.
pub(crate) fn select_by_sign(ty: Ty) -> Option<Alu> {
    Some(match ty {
        Ty::S32 => |a, b, c| if i32::of(c) >= 0 { a } else { b },
        Ty::F32 => |a, b, c| if f32::of(c) >= 0.0 { a } else { b },
        _ => return None,
    })
}

/// Whether a lies in [b, c).
pub(crate) const IN_RANGE: Alu = |a, b, c| u64::from(a >= b && a < c);
