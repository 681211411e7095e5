//! The fundamental types of PTX, and literals of them.

use crate::alu::half::{BF16, F16, Rounding};

/// A fundamental type. `B` types carry bits; the others say how an instruction reads the bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Ty {
    Pred,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    U16x2,
    S16x2,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Ty {
    /// The type of a name without its dot.
    pub(crate) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "u16x2" => Self::U16x2,
            "s16x2" => Self::S16x2,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of a value.
    pub(crate) fn size(self) -> u8 {
        match self {
            Self::Pred | Self::B8 | Self::U8 | Self::S8 => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::Bf16 => 2,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 => 4,
            Self::U16x2 | Self::S16x2 | Self::F16x2 | Self::Bf16x2 => 4,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
        }
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::F16x2 | Self::Bf16 | Self::Bf16x2 | Self::F32 | Self::F64)
    }

    /// The bits that a value of the type occupies in a 64-bit slot.
    pub(crate) fn mask(self) -> u64 {
        mask(self.size())
    }
}

/// A mask of the low `bytes` bytes, 1 to 8.
pub(crate) fn mask(bytes: u8) -> u64 {
    u64::MAX >> (64 - 8 * u32::from(bytes))
}

/// A number as written. Its type follows from where it stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Literal {
    /// Two's complement.
    Int(u64),
    /// `0f` and eight digits: the bits of an `f32`.
    Single(u32),
    /// `0d` and sixteen digits, or a decimal number: an `f64`.
    Double(f64),
}

impl Literal {
    /// The literal that `word` spells; `None` if it spells none.
    pub(crate) fn of(word: &str) -> Option<Self> {
        if !word.strip_prefix('.').unwrap_or(word).starts_with(|first: char| first.is_ascii_digit()) {
            return None;
        }
        let radix = |digits, radix| u64::from_str_radix(digits, radix).ok().map(Self::Int);
        match word.get(..2) {
            Some("0f" | "0F") => return u32::from_str_radix(&word[2..], 16).ok().map(Self::Single),
            Some("0d" | "0D") => {
                return u64::from_str_radix(&word[2..], 16)
                    .ok()
                    .map(|bits| Self::Double(f64::from_bits(bits)));
            }
            Some("0x" | "0X") => return radix(word[2..].trim_end_matches('U'), 16),
            Some("0b" | "0B") => return radix(word[2..].trim_end_matches('U'), 2),
            _ => {}
        }
        let digits = word.trim_end_matches('U');
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return word.parse().ok().map(Self::Double);
        }
        if digits.len() > 1 && digits.starts_with('0') { radix(&digits[1..], 8) } else { radix(digits, 10) }
    }

    pub(crate) fn negated(self) -> Self {
        match self {
            Self::Int(value) => Self::Int(value.wrapping_neg()),
            Self::Single(bits) => Self::Single(bits ^ 1 << 31),
            Self::Double(value) => Self::Double(-value),
        }
    }

    /// The literal as the bits of a `ty`, in the low part of a slot.
    pub(crate) fn bits(self, ty: Ty) -> u64 {
        let real = match self {
            Self::Int(value) if ty == Ty::Pred => return u64::from(value != 0),
            Self::Int(value) if !matches!(ty, Ty::F32 | Ty::F64) => return value & ty.mask(),
            Self::Single(bits) if !ty.is_float() || ty == Ty::F32 => return u64::from(bits),
            Self::Double(value) if !ty.is_float() => return value.to_bits() & ty.mask(),
            Self::Int(value) => real(value),
            Self::Single(bits) => f64::from(f32::from_bits(bits)),
            Self::Double(value) => value,
        };
        match ty {
            Ty::F64 => real.to_bits(),
            Ty::F16 | Ty::F16x2 => u64::from(F16::narrow(real, Rounding::Nearest).0),
            Ty::Bf16 | Ty::Bf16x2 => u64::from(BF16::narrow(real, Rounding::Nearest).0),
            _ => crate::alu::half::narrow(real, crate::alu::half::SINGLE, Rounding::Nearest),
        }
    }
}

/// The value of an integer literal where a real number stands; `-1` comes here as two's complement.
fn real(value: u64) -> f64 {
    let signed = i64::from_ne_bytes(value.to_ne_bytes());
    signed as f64
}
