//! `cvt` between every pair of scalar types.

use super::half::{BF16, F16, Rounding, SINGLE, narrow};
use super::scalar::{Integer, Scalar};
use super::{Alu, alu, alu_by_integer};
use crate::types::Ty;

/// Calls a function with a rounding direction as its constant parameter.
macro_rules! by_direction {
    ($rounding:expr, $function:ident($($argument:expr),*)) => {
        match $rounding {
            Rounding::Nearest => $function::<0>($($argument),*),
            Rounding::Zero => $function::<1>($($argument),*),
            Rounding::Down => $function::<2>($($argument),*),
            Rounding::Up => $function::<3>($($argument),*),
        }
    };
}

/// Conversion from an integer to an integer: the low bits, or with `saturate` the nearest value.
pub(crate) fn integer(to: Ty, from: Ty, saturate: bool) -> Option<Alu> {
    macro_rules! from {
        ($target:ty) => {
            match saturate {
                false => match from.is_signed() {
                    true => alu_by_integer!(from, |a, _, _| <$target>::of(sign_extended(a))),
                    false => alu_by_integer!(from, |a, _, _| <$target>::of(a.bits())),
                },
                true => alu_by_integer!(from, |a, _, _| <$target>::clamp_from(a.wide())),
            }
        };
    }
    match to {
        Ty::U8 | Ty::B8 => from!(u8),
        Ty::U16 | Ty::B16 => from!(u16),
        Ty::U32 | Ty::B32 => from!(u32),
        Ty::U64 | Ty::B64 => from!(u64),
        Ty::S8 => from!(i8),
        Ty::S16 => from!(i16),
        Ty::S32 => from!(i32),
        Ty::S64 => from!(i64),
        _ => None,
    }
}

/// The low 64 bits of the value in two's complement.
fn sign_extended<T: Integer>(value: T) -> u64 {
    i64::clamp_from(value.wide()).bits()
}

/// Widens the low part of a slot to 64 bits, for a register wider than the instruction's signed type.
pub(crate) fn sign_extend(from: Ty) -> Option<Alu> {
    Some(match from {
        Ty::S8 => |a, _, _| i64::from(i8::of(a)).bits(),
        Ty::S16 => |a, _, _| i64::from(i16::of(a)).bits(),
        Ty::S32 => |a, _, _| i64::from(i32::of(a)).bits(),
        _ => return None,
    })
}

/// Conversion from an integer to a floating-point type.
pub(crate) fn to_real(to: Ty, from: Ty, rounding: Rounding) -> Option<Alu> {
    by_direction!(rounding, to_real_in(to, from))
}

fn to_real_in<const D: u8>(to: Ty, from: Ty) -> Option<Alu> {
    match to {
        Ty::F64 => alu_by_integer!(from, |a, _, _| double(a.wide(), Rounding::of(D))),
        Ty::F32 => alu_by_integer!(from, |a, _, _| f32::of(narrow(odd(a.wide()), SINGLE, Rounding::of(D)))),
        Ty::F16 => alu_by_integer!(from, |a, _, _| F16::narrow(odd(a.wide()), Rounding::of(D))),
        Ty::Bf16 => alu_by_integer!(from, |a, _, _| BF16::narrow(odd(a.wide()), Rounding::of(D))),
        _ => None,
    }
}

/// The integer as a double, rounded in a direction.
fn double(value: i128, rounding: Rounding) -> f64 {
    let nearest = value as f64;
    let lost = value - exact(nearest);
    match rounding {
        Rounding::Up if lost > 0 => nearest.next_up(),
        Rounding::Down if lost < 0 => nearest.next_down(),
        Rounding::Zero if lost != 0 && (lost > 0) != (value > 0) => f64::from_bits(nearest.to_bits() - 1),
        _ => nearest,
    }
}

/// The integer as a double that is odd if it is inexact, so that a second rounding gives the right result.
fn odd(value: i128) -> f64 {
    let truncated = double(value, Rounding::Zero);
    if exact(truncated) == value { truncated } else { f64::from_bits(truncated.to_bits() | 1) }
}

/// The integer that a whole double below 2^127 stands for.
#[expect(clippy::cast_possible_truncation, reason = "the value is whole and came from a 64-bit integer")]
fn exact(value: f64) -> i128 {
    value as i128
}

/// Conversion from a floating-point type, in two steps because all pairs of types occur: from the format to a
/// double, then from the double to the target.
pub(crate) fn from_real(to: Ty, from: Ty, whole: Option<Rounding>, rounding: Rounding) -> Option<(Alu, Alu)> {
    let first: Alu = match from {
        Ty::F64 => |a, _, _| a,
        Ty::F32 => |a, _, _| f64::from(f32::of(a)).bits(),
        Ty::F16 => |a, _, _| F16::of(a).widen().bits(),
        Ty::Bf16 => |a, _, _| BF16::of(a).widen().bits(),
        _ => return None,
    };
    let second = match (to.is_float(), whole) {
        (false, whole) => to_integer(to, from, whole?)?,
        (true, Some(whole)) => to_whole(to, whole)?,
        (true, None) => to_format(to, rounding)?,
    };
    Some((first, second))
}

fn to_format(to: Ty, rounding: Rounding) -> Option<Alu> {
    by_direction!(rounding, to_format_in(to))
}

fn to_format_in<const D: u8>(to: Ty) -> Option<Alu> {
    Some(match to {
        Ty::F64 => |a, _, _| a,
        Ty::F32 => |a, _, _| narrow(f64::of(a), SINGLE, Rounding::of(D)),
        Ty::F16 => |a, _, _| F16::narrow(f64::of(a), Rounding::of(D)).bits(),
        Ty::Bf16 => |a, _, _| BF16::narrow(f64::of(a), Rounding::of(D)).bits(),
        _ => return None,
    })
}

/// Conversion to a whole number of the same format (`cvt.rzi.f32.f32`).
fn to_whole(to: Ty, rounding: Rounding) -> Option<Alu> {
    by_direction!(rounding, to_whole_in(to))
}

fn to_whole_in<const D: u8>(to: Ty) -> Option<Alu> {
    Some(match to {
        Ty::F64 => |a, _, _| whole::<D>(a).bits(),
        Ty::F32 => |a, _, _| narrow(whole::<D>(a), SINGLE, Rounding::Nearest),
        Ty::F16 => |a, _, _| F16::narrow(whole::<D>(a), Rounding::Nearest).bits(),
        Ty::Bf16 => |a, _, _| BF16::narrow(whole::<D>(a), Rounding::Nearest).bits(),
        _ => return None,
    })
}

fn whole<const D: u8>(slot: u64) -> f64 {
    let value = f64::of(slot);
    match Rounding::of(D) {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// Conversion to an integer, clamped to its range. A NaN gives zero, or only the top bit where source or
/// target has 64 bits.
fn to_integer(to: Ty, from: Ty, rounding: Rounding) -> Option<Alu> {
    let top = from == Ty::F64 || to.size() == 8;
    by_direction!(rounding, to_integer_in(to, top))
}

fn to_integer_in<const D: u8>(to: Ty, top: bool) -> Option<Alu> {
    macro_rules! integers {
        ($($ty:ident => $int:ty),*) => {
            match (to, top) {
                $(
                    (Ty::$ty, true) => Some(|a, _, _| clamp::<$int, D>(a, 1 << (<$int>::BITS - 1))),
                    (Ty::$ty, false) => Some(|a, _, _| clamp::<$int, D>(a, 0)),
                )*
                _ => None,
            }
        };
    }
    integers!(U8 => u8, U16 => u16, U32 => u32, U64 => u64, S8 => i8, S16 => i16, S32 => i32, S64 => i64)
}

fn clamp<T: Integer, const D: u8>(slot: u64, for_nan: u64) -> u64 {
    let value = whole::<D>(slot);
    if value.is_nan() { for_nan } else { T::clamp_from(exact(value.clamp(-1e30, 1e30))).bits() }
}
