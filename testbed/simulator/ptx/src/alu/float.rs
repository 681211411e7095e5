//! Floating-point instructions on singles, doubles and the 16-bit formats. Approximate instructions are
//! computed exactly where the host can, because PTX only limits their error.

use super::half::{BF16, F16, Rounding, SINGLE, narrow};
use super::real::Real;
use super::scalar::Scalar;
use super::{Alu, alu};
use crate::types::Ty;

/// `add`, `sub`, `mul`, `fma`, `div`, `sqrt` and `rcp`, rounded in a direction.
pub(crate) fn rounded(name: &str, ty: Ty, rounding: Rounding) -> Option<Alu> {
    match rounding {
        Rounding::Nearest => directed::<0>(name, ty).or_else(|| short(name, ty)),
        Rounding::Zero => directed::<1>(name, ty),
        Rounding::Down => directed::<2>(name, ty),
        Rounding::Up => directed::<3>(name, ty),
    }
}

fn directed<const D: u8>(name: &str, ty: Ty) -> Option<Alu> {
    Some(match (name, ty) {
        ("add", Ty::F32) => alu!(f32, |a, b, _| a.add(b, Rounding::of(D))),
        ("sub", Ty::F32) => alu!(f32, |a, b, _| a.add(-b, Rounding::of(D))),
        ("mul", Ty::F32) => alu!(f32, |a, b, _| a.mul(b, Rounding::of(D))),
        ("fma", Ty::F32) => alu!(f32, |a, b, c| a.fma(b, c, Rounding::of(D))),
        ("div", Ty::F32) => alu!(f32, |a, b, _| a.div(b, Rounding::of(D))),
        ("rcp", Ty::F32) => alu!(f32, |a, _, _| 1_f32.div(a, Rounding::of(D))),
        ("sqrt", Ty::F32) => alu!(f32, |a, _, _| a.root(Rounding::of(D))),
        ("add", Ty::F64) => alu!(f64, |a, b, _| a.add(b, Rounding::of(D))),
        ("sub", Ty::F64) => alu!(f64, |a, b, _| a.add(-b, Rounding::of(D))),
        ("mul", Ty::F64) => alu!(f64, |a, b, _| a.mul(b, Rounding::of(D))),
        ("fma", Ty::F64) => alu!(f64, |a, b, c| a.fma(b, c, Rounding::of(D))),
        ("div", Ty::F64) => alu!(f64, |a, b, _| a.div(b, Rounding::of(D))),
        ("rcp", Ty::F64) => alu!(f64, |a, _, _| 1_f64.div(a, Rounding::of(D))),
        ("sqrt", Ty::F64) => alu!(f64, |a, _, _| a.root(Rounding::of(D))),
        _ => return None,
    })
}

/// The same for the 16-bit formats: computed in double precision, then rounded to the format.
fn short(name: &str, ty: Ty) -> Option<Alu> {
    macro_rules! near {
        ($format:ident, $value:expr) => {
            $format::narrow($value, Rounding::Nearest)
        };
    }
    macro_rules! short {
        ($format:ident) => {
            match name {
                "add" => alu!($format, |a, b, _| near!($format, a.widen() + b.widen())),
                "sub" => alu!($format, |a, b, _| near!($format, a.widen() - b.widen())),
                "mul" => alu!($format, |a, b, _| near!($format, a.widen() * b.widen())),
                "fma" => alu!($format, |a, b, c| near!($format, a.widen().mul_add(b.widen(), c.widen()))),
                _ => return None,
            }
        };
    }
    match ty {
        Ty::F16 => Some(short!(F16)),
        Ty::Bf16 => Some(short!(BF16)),
        _ => None,
    }
}

/// Instructions that do not round, or that only approximate.
pub(crate) fn plain(name: &str, ty: Ty) -> Option<Alu> {
    match ty {
        Ty::F32 => plain_single(name),
        Ty::F64 => plain_double(name),
        Ty::F16 => plain_half(name),
        Ty::Bf16 => plain_brain(name),
        _ => None,
    }
}

fn plain_single(name: &str) -> Option<Alu> {
    Some(match name {
        "abs" => |a, _, _| a & 0x7fff_ffff,
        "neg" => |a, _, _| a ^ 0x8000_0000,
        "copysign" => |a, b, _| (b & 0x7fff_ffff) | (a & 0x8000_0000),
        "min" => alu!(f32, |a, b, _| minimum(a, b)),
        "max" => alu!(f32, |a, b, _| -minimum(-a, -b)),
        "rsqrt" => alu!(f32, |a, _, _| f32::of(narrow(1.0 / f64::from(a).sqrt(), SINGLE, Rounding::Nearest))),
        "sin" => alu!(f32, |a, _, _| a.sin()),
        "cos" => alu!(f32, |a, _, _| a.cos()),
        "tanh" => alu!(f32, |a, _, _| a.tanh()),
        "lg2" => alu!(f32, |a, _, _| a.log2()),
        "ex2" => alu!(f32, |a, _, _| a.exp2()),
        _ => return None,
    })
}

fn plain_double(name: &str) -> Option<Alu> {
    const LOW: u64 = 0xffff_ffff;
    Some(match name {
        "abs" => |a, _, _| a & !(1 << 63),
        "neg" => |a, _, _| a ^ (1 << 63),
        "copysign" => |a, b, _| (b & !(1 << 63)) | (a & (1 << 63)),
        "min" => alu!(f64, |a, b, _| pick(a, b, true)),
        "max" => alu!(f64, |a, b, _| pick(a, b, false)),
        "rsqrt" => alu!(f64, |a, _, _| 1.0 / a.sqrt()),
        // PTX: the low word of operand and result is ignored and zero.
        "rcp.ftz" => |a, _, _| (1.0 / flushed(f64::of(a & !LOW))).bits() & !LOW,
        "rsqrt.ftz" => |a, _, _| (1.0 / flushed(f64::of(a & !LOW)).sqrt()).bits() & !LOW,
        _ => return None,
    })
}

fn flushed(value: f64) -> f64 {
    if value.is_subnormal() { 0_f64.copysign(value) } else { value }
}

fn plain_half(name: &str) -> Option<Alu> {
    Some(match name {
        "abs" => |a, _, _| a & 0x7fff,
        "neg" => |a, _, _| a ^ 0x8000,
        "min" => alu!(F16, |a, b, _| F16::narrow(pick(a.widen(), b.widen(), true), Rounding::Nearest)),
        "max" => alu!(F16, |a, b, _| F16::narrow(pick(a.widen(), b.widen(), false), Rounding::Nearest)),
        "tanh" => alu!(F16, |a, _, _| F16::narrow(a.widen().tanh(), Rounding::Nearest)),
        "ex2" => alu!(F16, |a, _, _| F16::narrow(a.widen().exp2(), Rounding::Nearest)),
        _ => return None,
    })
}

fn plain_brain(name: &str) -> Option<Alu> {
    Some(match name {
        "abs" => |a, _, _| a & 0x7fff,
        "neg" => |a, _, _| a ^ 0x8000,
        "min" => alu!(BF16, |a, b, _| BF16::narrow(pick(a.widen(), b.widen(), true), Rounding::Nearest)),
        "max" => alu!(BF16, |a, b, _| BF16::narrow(pick(a.widen(), b.widen(), false), Rounding::Nearest)),
        "tanh" => alu!(BF16, |a, _, _| BF16::narrow(a.widen().tanh(), Rounding::Nearest)),
        "ex2" => alu!(BF16, |a, _, _| BF16::narrow(a.widen().exp2(), Rounding::Nearest)),
        _ => return None,
    })
}

/// The smaller or larger of two numbers. A NaN loses; −0 is below +0.
fn pick(a: f64, b: f64, smaller: bool) -> f64 {
    let (low, high) = if b < a || (a == b && b.is_sign_negative()) { (b, a) } else { (a, b) };
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if smaller => low,
        _ => high,
    }
}

/// The smaller of two numbers like [`pick`], in single precision.
fn minimum(a: f32, b: f32) -> f32 {
    if a.is_nan() || b < a || (a == b && b.is_sign_negative()) { b } else { a }
}

/// `.ftz`: puts zero in place of a subnormal number.
pub(crate) fn flush(ty: Ty) -> Option<Alu> {
    Some(match ty {
        Ty::F32 => |a, _, _| if a & 0x7f80_0000 == 0 { a & 0x8000_0000 } else { a },
        Ty::F16 => |a, _, _| if a & 0x7c00 == 0 { a & 0x8000 } else { a },
        Ty::Bf16 => |a, _, _| if a & 0x7f80 == 0 { a & 0x8000 } else { a },
        _ => return None,
    })
}

/// `.sat`: limits to the range from 0 to 1; NaN becomes 0.
pub(crate) fn saturate(ty: Ty) -> Option<Alu> {
    Some(match ty {
        Ty::F32 => alu!(f32, |a, _, _| if a > 0.0 { a.min(1.0) } else { 0.0 }),
        Ty::F64 => alu!(f64, |a, _, _| if a > 0.0 { a.min(1.0) } else { 0.0 }),
        Ty::F16 => alu!(F16, |a, _, _| {
            let value = a.widen();
            F16::narrow(if value > 0.0 { value.min(1.0) } else { 0.0 }, Rounding::Nearest)
        }),
        _ => return None,
    })
}

/// `.relu`: limits to 0 and above; NaN stays.
pub(crate) fn rectify(ty: Ty) -> Option<Alu> {
    Some(match ty {
        Ty::F16 => alu!(F16, |a, _, _| if a.widen() < 0.0 { F16(0) } else { a }),
        Ty::Bf16 => alu!(BF16, |a, _, _| if a.widen() < 0.0 { BF16(0) } else { a }),
        Ty::S32 => alu!(i32, |a, _, _| a.max(0)),
        _ => return None,
    })
}

/// `.NaN`: NaN if one of the operands b and c is NaN, else the result a.
pub(crate) fn keep_nan(ty: Ty) -> Option<Alu> {
    Some(match ty {
        Ty::F32 => |a, b, c| if f32::of(b).is_nan() || f32::of(c).is_nan() { 0x7fff_ffff } else { a },
        Ty::F16 => {
            |a, b, c| if F16::of(b).widen().is_nan() || F16::of(c).widen().is_nan() { 0x7fff } else { a }
        }
        Ty::Bf16 => {
            |a, b, c| if BF16::of(b).widen().is_nan() || BF16::of(c).widen().is_nan() { 0x7fff } else { a }
        }
        _ => return None,
    })
}

/// `testp`: whether a number is of the class.
pub(crate) fn test(class: &str, ty: Ty) -> Option<Alu> {
    macro_rules! test {
        ($ty:ty) => {
            match class {
                "finite" => alu!($ty, |a, _, _| a.is_finite()),
                "infinite" => alu!($ty, |a, _, _| a.is_infinite()),
                "number" => alu!($ty, |a, _, _| !a.is_nan()),
                "notanumber" => alu!($ty, |a, _, _| a.is_nan()),
                "normal" => alu!($ty, |a, _, _| a.is_normal()),
                "subnormal" => alu!($ty, |a, _, _| a.is_subnormal()),
                _ => return None,
            }
        };
    }
    match ty {
        Ty::F32 => Some(test!(f32)),
        Ty::F64 => Some(test!(f64)),
        _ => None,
    }
}
