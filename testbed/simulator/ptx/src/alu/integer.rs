//! Integer instructions and bit instructions.

use super::scalar::{Integer, Scalar};
use super::{Alu, Alu4, alu, alu_by_integer};
use crate::types::Ty;

/// Arithmetic on one to three operands of one type.
pub(crate) fn arithmetic(name: &str, ty: Ty) -> Option<Alu> {
    match name {
        "add" => alu_by_integer!(ty, |a, b, _| a.wrapping_add(b)),
        "sub" => alu_by_integer!(ty, |a, b, _| a.wrapping_sub(b)),
        "add.sat" => alu_by_integer!(ty, |a, b, _| a.saturating_add(b)),
        "sub.sat" => alu_by_integer!(ty, |a, b, _| a.saturating_sub(b)),
        "mul.lo" => alu_by_integer!(ty, |a, b, _| a.wrapping_mul(b)),
        "mul.hi" => alu_by_integer!(ty, |a, b, _| a.mul_high(b)),
        "mad.lo" => alu_by_integer!(ty, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        "mad.hi" => alu_by_integer!(ty, |a, b, c| a.mul_high(b).wrapping_add(c)),
        "sad" => alu_by_integer!(ty, |a, b, c| c.wrapping_add(a.max(b).wrapping_sub(a.min(b)))),
        "div" => alu_by_integer!(ty, |a, b, _| a.quotient(b)),
        "rem" => alu_by_integer!(ty, |a, b, _| a.remainder(b)),
        "min" => alu_by_integer!(ty, |a, b, _| a.min(b)),
        "max" => alu_by_integer!(ty, |a, b, _| a.max(b)),
        "neg" => match ty {
            Ty::S16 => Some(alu!(i16, |a, _, _| a.wrapping_neg())),
            Ty::S32 => Some(alu!(i32, |a, _, _| a.wrapping_neg())),
            Ty::S64 => Some(alu!(i64, |a, _, _| a.wrapping_neg())),
            _ => None,
        },
        "abs" => match ty {
            Ty::S16 => Some(alu!(i16, |a, _, _| a.wrapping_abs())),
            Ty::S32 => Some(alu!(i32, |a, _, _| a.wrapping_abs())),
            Ty::S64 => Some(alu!(i64, |a, _, _| a.wrapping_abs())),
            _ => None,
        },
        _ => None,
    }
}

/// `and`, `or`, `xor`, `not`, `cnot`, also of predicates.
pub(crate) fn logic(name: &str, ty: Ty) -> Option<Alu> {
    Some(match (name, ty) {
        ("and", _) => |a, b, _| a & b,
        ("or", _) => |a, b, _| a | b,
        ("xor", _) => |a, b, _| a ^ b,
        ("not", Ty::Pred) => |a, _, _| a ^ 1,
        ("not", _) => return alu_by_integer!(ty, |a, _, _| !a),
        ("cnot", _) => |a, _, _| u64::from(a == 0),
        _ => return None,
    })
}

/// `shl` and `shr`. An amount beyond the width shifts everything out.
pub(crate) fn shift(name: &str, ty: Ty) -> Option<Alu> {
    macro_rules! shifts {
        ($($ty:ident => $int:ty),*) => {
            match (name, ty) {
                $(
                    ("shl", Ty::$ty) => |a, b, _| <$int>::of(a).checked_shl(u32::of(b)).unwrap_or(0).bits(),
                    ("shr", Ty::$ty) => |a, b, _| {
                        let value = <$int>::of(a);
                        let half = <$int>::BITS / 2;
                        let out = (value >> half >> (half - 1)) >> 1;
                        value.checked_shr(u32::of(b)).unwrap_or(out).bits()
                    },
                )*
                _ => return None,
            }
        };
    }
    Some(shifts!(B16 => u16, U16 => u16, S16 => i16, B32 => u32, U32 => u32, S32 => i32,
                 B64 => u64, U64 => u64, S64 => i64))
}

/// `mul.wide`, `mad.wide`, `mul24` and `mad24`, whose product is wider than the operands.
pub(crate) fn wide(name: &str, ty: Ty) -> Option<Alu> {
    Some(match (name, ty) {
        ("mul.wide", Ty::U16) => |a, b, _| (u32::from(u16::of(a)) * u32::from(u16::of(b))).bits(),
        ("mul.wide", Ty::S16) => |a, b, _| (i32::from(i16::of(a)) * i32::from(i16::of(b))).bits(),
        ("mul.wide", Ty::U32) => |a, b, _| u64::from(u32::of(a)) * u64::from(u32::of(b)),
        ("mul.wide", Ty::S32) => |a, b, _| (i64::from(i32::of(a)) * i64::from(i32::of(b))).bits(),
        ("mad.wide", Ty::U16) => {
            |a, b, c| (u32::from(u16::of(a)) * u32::from(u16::of(b))).wrapping_add(u32::of(c)).bits()
        }
        ("mad.wide", Ty::S16) => {
            |a, b, c| (i32::from(i16::of(a)) * i32::from(i16::of(b))).wrapping_add(i32::of(c)).bits()
        }
        ("mad.wide", Ty::U32) => {
            |a, b, c| (u64::from(u32::of(a)) * u64::from(u32::of(b))).wrapping_add(u64::of(c))
        }
        ("mad.wide", Ty::S32) => {
            |a, b, c| (i64::from(i32::of(a)) * i64::from(i32::of(b))).wrapping_add(i64::of(c)).bits()
        }
        ("mul24.lo", Ty::U32) => |a, b, _| (unsigned24(a) * unsigned24(b)) & 0xffff_ffff,
        ("mul24.hi", Ty::U32) => |a, b, _| (unsigned24(a) * unsigned24(b)) >> 16,
        ("mul24.lo", Ty::S32) => |a, b, _| u32::of((signed24(a) * signed24(b)).bits()).bits(),
        ("mul24.hi", Ty::S32) => |a, b, _| u32::of(((signed24(a) * signed24(b)) >> 16).bits()).bits(),
        ("mad24.lo", Ty::U32) => {
            |a, b, c| u32::of(unsigned24(a) * unsigned24(b)).wrapping_add(u32::of(c)).bits()
        }
        ("mad24.lo", Ty::S32) => {
            |a, b, c| u32::of((signed24(a) * signed24(b)).bits()).wrapping_add(u32::of(c)).bits()
        }
        _ => return None,
    })
}

fn unsigned24(slot: u64) -> u64 {
    slot & 0xff_ffff
}

fn signed24(slot: u64) -> i64 {
    i64::from(i32::of(slot << 8) >> 8)
}

/// Instructions that count and rearrange bits.
pub(crate) fn bits(name: &str, ty: Ty) -> Option<Alu> {
    Some(match (name, ty) {
        ("popc", _) => |a, _, _| u64::from(a.count_ones()),
        ("clz", Ty::B32) => |a, _, _| u64::from(u32::of(a).leading_zeros()),
        ("clz", Ty::B64) => |a, _, _| u64::from(a.leading_zeros()),
        ("brev", Ty::B32) => |a, _, _| u32::of(a).reverse_bits().bits(),
        ("brev", Ty::B64) => |a, _, _| a.reverse_bits(),
        ("bfind", Ty::U32) => |a, _, _| find(u64::from(u32::of(a))),
        ("bfind", Ty::U64) => |a, _, _| find(a),
        ("bfind", Ty::S32) => |a, _, _| find((i32::of(a) ^ (i32::of(a) >> 31)).bits()),
        ("bfind", Ty::S64) => |a, _, _| find((i64::of(a) ^ (i64::of(a) >> 63)).bits()),
        ("bfind.shiftamt", Ty::U32) => |a, _, _| shift_amount(u64::from(u32::of(a)), 31),
        ("bfind.shiftamt", Ty::U64) => |a, _, _| shift_amount(a, 63),
        ("bfe", Ty::U32) => |a, b, c| extract(u64::from(u32::of(a)), b, c, 32, false) & 0xffff_ffff,
        ("bfe", Ty::S32) => |a, b, c| extract(i64::from(i32::of(a)).bits(), b, c, 32, true) & 0xffff_ffff,
        ("bfe", Ty::U64) => |a, b, c| extract(a, b, c, 64, false),
        ("bfe", Ty::S64) => |a, b, c| extract(a, b, c, 64, true),
        ("bmsk.clamp", Ty::B32) => |a, b, _| (low_ones(b) << (a & 0xffff_ffff).min(32)) & 0xffff_ffff,
        ("bmsk.wrap", Ty::B32) => |a, b, _| (low_ones(b & 31) << (a & 31)) & 0xffff_ffff,
        ("shf.l.wrap", Ty::B32) => |a, b, c| funnel(a, b) << (c & 31) >> 32,
        ("shf.l.clamp", Ty::B32) => |a, b, c| funnel(a, b) << u32::of(c).min(32) >> 32,
        ("shf.r.wrap", Ty::B32) => |a, b, c| (funnel(a, b) >> (c & 31)) & 0xffff_ffff,
        ("shf.r.clamp", Ty::B32) => |a, b, c| (funnel(a, b) >> u32::of(c).min(32)) & 0xffff_ffff,
        ("fns", Ty::B32) => nth_set,
        _ => return None,
    })
}

fn find(value: u64) -> u64 {
    value.checked_ilog2().map_or(0xffff_ffff, u64::from)
}

fn shift_amount(value: u64, top: u64) -> u64 {
    value.checked_ilog2().map_or(0xffff_ffff, |bit| top - u64::from(bit))
}

fn low_ones(count: u64) -> u64 {
    (1 << (count & 0xffff_ffff).min(32)) - 1
}

fn funnel(low: u64, high: u64) -> u64 {
    (high << 32) | (low & 0xffff_ffff)
}

/// `length` bits from bit `start`; both are the low bytes of their operands.
fn extract(value: u64, start: u64, length: u64, width: u64, signed: bool) -> u64 {
    let (start, length) = (start & 0xff, length & 0xff);
    if length == 0 {
        return 0;
    }
    let sign_at = (start + length - 1).min(width - 1);
    let negative = signed && value >> sign_at & 1 == 1;
    let shifted = if start >= width { 0 } else { value >> start };
    let taken = length.min(width.saturating_sub(start));
    let mask = if taken >= 64 { u64::MAX } else { (1 << taken) - 1 };
    if negative { shifted | !mask } else { shifted & mask }
}

/// Position of the `offset`-th set bit at or above `base`; below it for a negative offset.
fn nth_set(value: u64, base: u64, offset: u64) -> u64 {
    let (value, base, offset) = (u32::of(value), u32::of(base) & 31, i32::of(offset));
    let set = |&bit: &u32| value >> bit & 1 == 1;
    let wanted = usize::try_from(offset.unsigned_abs()).unwrap_or(usize::MAX);
    let found = match offset {
        0 => Some(base).filter(set),
        1.. => (base..32).filter(set).nth(wanted - 1),
        _ => (0..=base).rev().filter(set).nth(wanted - 1),
    };
    found.map_or(0xffff_ffff, u64::from)
}

/// Instructions with four operands: `bfi` (inserts a into b at bit c, d bits) and `lop3` (truth table in d).
pub(crate) fn four(name: &str, ty: Ty) -> Option<Alu4> {
    Some(match (name, ty) {
        ("bfi", Ty::B32) => |a, b, c, d| insert(a, b, c, d, 32) & 0xffff_ffff,
        ("bfi", Ty::B64) => |a, b, c, d| insert(a, b, c, d, 64),
        ("lop3", Ty::B32) => |a, b, c, table| {
            let mut result = 0;
            for case in (0..8_u64).filter(|case| table >> case & 1 == 1) {
                let pick = |value: u64, bit: u64| if case >> bit & 1 == 1 { value } else { !value };
                result |= pick(a, 2) & pick(b, 1) & pick(c, 0);
            }
            result & 0xffff_ffff
        },
        _ => return None,
    })
}

fn insert(from: u64, into: u64, start: u64, length: u64, width: u64) -> u64 {
    let (start, length) = (start & 0xff, length & 0xff);
    if start >= width || length == 0 {
        return into;
    }
    let taken = length.min(width - start);
    let mask = if taken >= 64 { u64::MAX } else { ((1 << taken) - 1) << start };
    (into & !mask) | (from << start & mask)
}

/// `prmt` in its default mode. Each nibble of the selector names a byte of b:a; its top bit asks for that
/// byte's sign.
pub(crate) fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = funnel(a, b).to_le_bytes();
    let mut result = [0_u8; 8];
    for (position, byte) in result.iter_mut().take(4).enumerate() {
        let nibble = selector.to_le_bytes()[position / 2] >> (4 * (position % 2)) & 15;
        let picked = bytes[usize::from(nibble & 7)];
        *byte = if nibble & 8 == 0 { picked } else { 0_u8.wrapping_sub(picked >> 7) };
    }
    u64::from_le_bytes(result)
}

/// `dp4a`: c plus the products of four pairs of bytes.
pub(crate) fn dot4(a: Ty, b: Ty) -> Option<Alu> {
    macro_rules! dot {
        ($a:ty, $b:ty) => {
            |a, b, c| {
                let mut sum = i64::from(i32::of(c));
                for byte in 0..4 {
                    sum += i64::from(<$a>::of(a >> (8 * byte))) * i64::from(<$b>::of(b >> (8 * byte)));
                }
                u32::of(sum.bits()).bits()
            }
        };
    }
    Some(match (a, b) {
        (Ty::U32, Ty::U32) => dot!(u8, u8),
        (Ty::U32, Ty::S32) => dot!(u8, i8),
        (Ty::S32, Ty::U32) => dot!(i8, u8),
        (Ty::S32, Ty::S32) => dot!(i8, i8),
        _ => return None,
    })
}

/// `add.cc` and the like: the functions for the sum and the carry of a + b + the carry in c.
pub(crate) fn add_with_carry(ty: Ty) -> Option<(Alu, Alu)> {
    Some(match ty.size() {
        4 => {
            (|a, b, c| (a + b + c) & 0xffff_ffff, |a, b, c| ((a & 0xffff_ffff) + (b & 0xffff_ffff) + c) >> 32)
        }
        8 => (
            |a, b, c| a.wrapping_add(b).wrapping_add(c),
            |a, b, c| u64::from(u128::from(a) + u128::from(b) + u128::from(c) > u128::from(u64::MAX)),
        ),
        _ => return None,
    })
}

/// `sub.cc` and the like: the functions for the difference and the borrow of a − b − the borrow in c.
pub(crate) fn subtract_with_borrow(ty: Ty) -> Option<(Alu, Alu)> {
    Some(match ty.size() {
        4 => (
            |a, b, c| a.wrapping_sub(b).wrapping_sub(c) & 0xffff_ffff,
            |a, b, c| u64::from((a & 0xffff_ffff) < (b & 0xffff_ffff) + c),
        ),
        8 => (
            |a, b, c| a.wrapping_sub(b).wrapping_sub(c),
            |a, b, c| u64::from(u128::from(a) < u128::from(b) + u128::from(c)),
        ),
        _ => return None,
    })
}
