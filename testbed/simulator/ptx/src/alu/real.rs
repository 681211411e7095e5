//! The basic operations and the square root of singles and doubles in all four rounding directions. The host
//! rounds to nearest. The other directions follow from the sign of what that rounding lost.

use super::half::{Rounding, SINGLE, narrow};
use super::scalar::Scalar;

/// A type with directed rounding.
pub(crate) trait Real: Scalar {
    fn add(self, other: Self, rounding: Rounding) -> Self;
    fn mul(self, other: Self, rounding: Rounding) -> Self;
    fn fma(self, other: Self, added: Self, rounding: Rounding) -> Self;
    fn div(self, other: Self, rounding: Rounding) -> Self;
    fn root(self, rounding: Rounding) -> Self;
}

/// What rounding a + b to `sum` lost.
fn lost_by_sum(a: f64, b: f64, sum: f64) -> f64 {
    let from_b = sum - a;
    (a - (sum - from_b)) + (b - from_b)
}

/// `value` with its last bit set if something was lost, so that a second rounding sees it.
fn sticky(value: f64, lost: f64) -> f64 {
    if lost == 0.0 || lost.is_nan() || !value.is_finite() || value.to_bits() & 1 == 1 {
        return value;
    }
    if value == 0.0 {
        return lost.signum() * f64::from_bits(1);
    }
    let outwards = (lost > 0.0) == (value > 0.0);
    f64::from_bits(if outwards { value.to_bits() + 1 } else { value.to_bits() - 1 })
}

fn single(value: f64, rounding: Rounding) -> f32 {
    f32::of(narrow(value, SINGLE, rounding))
}

impl Real for f32 {
    #[inline]
    fn add(self, other: Self, rounding: Rounding) -> Self {
        if rounding == Rounding::Nearest {
            return self + other;
        }
        let (a, b) = (f64::from(self), f64::from(other));
        single(sticky(a + b, lost_by_sum(a, b, a + b)), rounding)
    }
    #[inline]
    fn mul(self, other: Self, rounding: Rounding) -> Self {
        if rounding == Rounding::Nearest {
            return self * other;
        }
        single(f64::from(self) * f64::from(other), rounding) // exact before the rounding: 48 bits
    }
    #[inline]
    fn fma(self, other: Self, added: Self, rounding: Rounding) -> Self {
        if rounding == Rounding::Nearest {
            return self.mul_add(other, added);
        }
        let (product, added) = (f64::from(self) * f64::from(other), f64::from(added));
        let sum = product + added;
        single(sticky(sum, lost_by_sum(product, added, sum)), rounding)
    }
    #[inline]
    fn div(self, other: Self, rounding: Rounding) -> Self {
        if rounding == Rounding::Nearest {
            return self / other;
        }
        let (a, b) = (f64::from(self), f64::from(other));
        let quotient = a / b;
        single(sticky(quotient, quotient.mul_add(-b, a) * b.signum()), rounding)
    }
    #[inline]
    fn root(self, rounding: Rounding) -> Self {
        if rounding == Rounding::Nearest {
            return self.sqrt();
        }
        let root = f64::from(self).sqrt();
        single(sticky(root, root.mul_add(-root, f64::from(self))), rounding)
    }
}

/// `nearest`, moved by one step if the exact value lies on the other side of it. An infinity from finite
/// operands is an overflow, which directions towards zero turn into the largest finite number.
fn directed(nearest: f64, lost: f64, operands: &[f64], rounding: Rounding) -> f64 {
    if nearest.is_infinite() {
        let away = matches!((rounding, nearest > 0.0), (Rounding::Up, true) | (Rounding::Down, false));
        let overflow = operands.iter().all(|operand| operand.is_finite());
        return if away || !overflow { nearest } else { f64::MAX.copysign(nearest) };
    }
    match rounding {
        Rounding::Down if lost < 0.0 => nearest.next_down(),
        Rounding::Up if lost > 0.0 => nearest.next_up(),
        Rounding::Zero if lost != 0.0 && nearest != 0.0 && (lost > 0.0) != (nearest > 0.0) => {
            f64::from_bits(nearest.to_bits() - 1)
        }
        _ => nearest,
    }
}

impl Real for f64 {
    #[inline]
    fn add(self, other: Self, rounding: Rounding) -> Self {
        let sum = self + other;
        if rounding == Rounding::Nearest {
            return sum;
        }
        directed(sum, lost_by_sum(self, other, sum), &[self, other], rounding)
    }
    #[inline]
    fn mul(self, other: Self, rounding: Rounding) -> Self {
        let product = self * other;
        if rounding == Rounding::Nearest {
            return product;
        }
        directed(product, self.mul_add(other, -product), &[self, other], rounding)
    }
    #[inline]
    fn fma(self, other: Self, added: Self, rounding: Rounding) -> Self {
        let nearest = self.mul_add(other, added);
        if rounding == Rounding::Nearest {
            return nearest;
        }
        let product = self * other;
        let sum = product + added;
        let lost = (sum - nearest) + (self.mul_add(other, -product) + lost_by_sum(product, added, sum));
        directed(nearest, lost, &[self, other, added], rounding)
    }
    #[inline]
    fn div(self, other: Self, rounding: Rounding) -> Self {
        let quotient = self / other;
        if rounding == Rounding::Nearest {
            return quotient;
        }
        let lost = quotient.mul_add(-other, self) * other.signum();
        let by_zero = if other == 0.0 { f64::INFINITY } else { 1.0 }; // an exact infinity
        directed(quotient, lost, &[self, by_zero], rounding)
    }
    #[inline]
    fn root(self, rounding: Rounding) -> Self {
        let root = self.sqrt();
        if rounding == Rounding::Nearest {
            return root;
        }
        directed(root, root.mul_add(-root, self), &[self], rounding)
    }
}
