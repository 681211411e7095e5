//! Rounds a double to a shorter format in each of four directions, and builds the two 16-bit formats on that.

use super::scalar::Scalar;

/// Direction of rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest = 0,
    Zero = 1,
    Down = 2,
    Up = 3,
}

impl Rounding {
    /// The direction with the discriminant `code`. Functions take the code as a constant parameter, which
    /// cannot be an enum.
    pub(crate) const fn of(code: u8) -> Self {
        match code {
            1 => Self::Zero,
            2 => Self::Down,
            3 => Self::Up,
            _ => Self::Nearest,
        }
    }
}

/// Number of bits of the exponent and of the stored fraction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Format {
    exponent: u32,
    fraction: u32,
}

pub(crate) const SINGLE: Format = Format { exponent: 8, fraction: 23 };
const HALF: Format = Format { exponent: 5, fraction: 10 };
const BRAIN: Format = Format { exponent: 8, fraction: 7 };

/// Bits of `value` rounded to `format`.
pub(crate) fn narrow(value: f64, format: Format, rounding: Rounding) -> u64 {
    let negative = value.is_sign_negative();
    let sign = u64::from(negative) << (format.exponent + format.fraction);
    let infinity = ((1_u64 << format.exponent) - 1) << format.fraction;
    if value.is_nan() {
        return infinity | ((1 << format.fraction) - 1);
    }
    if value.is_infinite() {
        return sign | infinity;
    }
    let away = match rounding {
        Rounding::Nearest | Rounding::Zero => false,
        Rounding::Down => negative,
        Rounding::Up => !negative,
    };
    let magnitude = narrow_magnitude(value.to_bits() & (u64::MAX >> 1), format, rounding, away);
    if magnitude < infinity {
        return sign | magnitude;
    }
    let overflow = rounding == Rounding::Nearest || away;
    sign | if overflow { infinity } else { infinity - 1 }
}

fn narrow_magnitude(bits: u64, format: Format, rounding: Rounding, away: bool) -> u64 {
    let stored = i64::from(u32::of(bits >> 52));
    let (exponent, significand) = match stored {
        0 => (-1022, bits),
        _ => (stored - 1023, bits & ((1 << 52) - 1) | 1 << 52),
    };
    let bias = (1_i64 << (format.exponent - 1)) - 1;
    let smallest = 1 - bias;
    let lost = i64::from(52 - format.fraction) + (smallest - exponent).max(0);
    let lost = u32::try_from(lost.min(63)).unwrap_or(63);
    let kept = significand >> lost;
    let rest = significand & ((1 << lost) - 1);
    let half = 1_u64 << (lost - 1);
    let up = match rounding {
        Rounding::Nearest => rest > half || (rest == half && kept & 1 == 1),
        _ => away && rest > 0,
    };
    let kept = kept + u64::from(up);
    if exponent < smallest {
        return kept; // a carry out of the fraction is the smallest normal number
    }
    let base = u64::try_from(exponent + bias - 1).unwrap_or(0);
    (base << format.fraction) + kept
}

/// Value of `bits` in `format`. A double holds every value of the short formats.
fn widen(bits: u16, format: Format) -> f64 {
    let bits = u64::from(bits);
    let fraction = bits & ((1 << format.fraction) - 1);
    let stored = bits >> format.fraction & ((1 << format.exponent) - 1);
    let bias = (1_i32 << (format.exponent - 1)) - 1;
    let width = i32::try_from(format.fraction).unwrap_or(0);
    let magnitude = if stored == (1 << format.exponent) - 1 {
        if fraction == 0 { f64::INFINITY } else { f64::NAN }
    } else if stored == 0 {
        fraction as f64 * 2_f64.powi(1 - bias - width)
    } else {
        let exponent = i32::try_from(stored).unwrap_or(0) - bias - width;
        (fraction | 1 << format.fraction) as f64 * 2_f64.powi(exponent)
    };
    if bits >> (format.exponent + format.fraction) & 1 == 1 { -magnitude } else { magnitude }
}

macro_rules! short_float {
    ($($(#[$doc:meta])* $name:ident, $format:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $name(pub(crate) u16);

        impl $name {
            pub(crate) fn narrow(value: f64, rounding: Rounding) -> Self {
                Self(u16::of(narrow(value, $format, rounding)))
            }
            pub(crate) fn widen(self) -> f64 {
                widen(self.0, $format)
            }
        }
        impl Scalar for $name {
            fn of(slot: u64) -> Self {
                Self(u16::of(slot))
            }
            fn bits(self) -> u64 {
                u64::from(self.0)
            }
        }
    )*};
}

short_float! {
    /// IEEE half precision.
    F16, HALF;
    /// The upper half of a single-precision number.
    BF16, BRAIN;
}
