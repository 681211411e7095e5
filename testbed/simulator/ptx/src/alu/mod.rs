//! What instructions compute: pure functions from slots to a slot, chosen once when a module is read. This
//! module knows no registers, memory or threads.

pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod integer;
pub(crate) mod packed;
pub(crate) mod real;
pub(crate) mod scalar;

/// A function of up to three operands; it ignores unused operands.
pub(crate) type Alu = fn(u64, u64, u64) -> u64;

/// A function of four operands.
pub(crate) type Alu4 = fn(u64, u64, u64, u64) -> u64;

/// Makes an [`Alu`] whose operands are all of one type.
macro_rules! alu {
    ($ty:ty, |$a:tt, $b:tt, $c:tt| $body:expr) => {
        (|a: u64, b: u64, c: u64| -> u64 {
            let ($a, $b, $c) = (<$ty as Scalar>::of(a), <$ty as Scalar>::of(b), <$ty as Scalar>::of(c));
            Scalar::bits($body)
        }) as Alu
    };
}

/// Makes an [`Alu`] for whichever integer type `$selected` is; `None` for another type.
macro_rules! alu_by_integer {
    ($selected:expr, |$a:tt, $b:tt, $c:tt| $body:expr) => {
        match $selected {
            Ty::U8 | Ty::B8 => Some(alu!(u8, |$a, $b, $c| $body)),
            Ty::U16 | Ty::B16 => Some(alu!(u16, |$a, $b, $c| $body)),
            Ty::U32 | Ty::B32 => Some(alu!(u32, |$a, $b, $c| $body)),
            Ty::U64 | Ty::B64 => Some(alu!(u64, |$a, $b, $c| $body)),
            Ty::S8 => Some(alu!(i8, |$a, $b, $c| $body)),
            Ty::S16 => Some(alu!(i16, |$a, $b, $c| $body)),
            Ty::S32 => Some(alu!(i32, |$a, $b, $c| $body)),
            Ty::S64 => Some(alu!(i64, |$a, $b, $c| $body)),
            _ => None,
        }
    };
}

pub(crate) use alu;
pub(crate) use alu_by_integer;
