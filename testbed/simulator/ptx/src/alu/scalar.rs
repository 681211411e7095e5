//! Values in register slots. A slot has 64 bits and a value is its low part; `of` reads a value, `bits`
//! writes one with zeros above it.

/// A value that lives in the low bits of a slot.
pub(crate) trait Scalar: Copy {
    /// The value in `slot`; higher bits are ignored.
    fn of(slot: u64) -> Self;
    /// The slot that holds the value.
    fn bits(self) -> u64;
}

/// Integer arithmetic that the standard library names differently per type, or not at all.
pub(crate) trait Integer: Scalar {
    /// Upper half of the product.
    fn mul_high(self, other: Self) -> Self;
    /// The value of the type that is nearest to `wide`.
    fn clamp_from(wide: i128) -> Self;
    fn wide(self) -> i128;
    /// Division as GPUs do it: a division by zero gives all ones.
    fn quotient(self, other: Self) -> Self;
    /// Remainder as GPUs do it: a division by zero gives the dividend.
    fn remainder(self, other: Self) -> Self;
}

macro_rules! integer {
    ($($ty:ty, $unsigned:ty, $wide:ty;)*) => {$(
        impl Scalar for $ty {
            #[inline]
            #[allow(clippy::cast_possible_truncation, reason = "the low bits of a slot are the value")]
            #[allow(trivial_numeric_casts, reason = "one of the types is u64")]
            fn of(slot: u64) -> Self {
                slot as $ty
            }
            #[inline]
            #[allow(clippy::unnecessary_cast, reason = "one of the types is u64")]
            fn bits(self) -> u64 {
                self as $unsigned as u64
            }
        }
        impl Integer for $ty {
            #[inline]
            #[allow(clippy::cast_possible_truncation, reason = "the upper half fits after the shift")]
            fn mul_high(self, other: Self) -> Self {
                ((self as $wide * other as $wide) >> <$ty>::BITS) as $ty
            }
            #[expect(clippy::cast_possible_truncation, reason = "clamped to the type's range")]
            fn clamp_from(wide: i128) -> Self {
                wide.clamp(<$ty>::MIN as i128, <$ty>::MAX as i128) as $ty
            }
            fn wide(self) -> i128 {
                self as i128
            }
            #[inline]
            fn quotient(self, other: Self) -> Self {
                if other == 0 { !0 } else { self.wrapping_div(other) }
            }
            #[inline]
            fn remainder(self, other: Self) -> Self {
                if other == 0 { self } else { self.wrapping_rem(other) }
            }
        }
    )*};
}

integer! {
    u8, u8, u32; u16, u16, u32; u32, u32, u64; u64, u64, u128;
    i8, u8, i32; i16, u16, i32; i32, u32, i64; i64, u64, i128;
}

impl Scalar for f32 {
    #[inline]
    fn of(slot: u64) -> Self {
        Self::from_bits(u32::of(slot))
    }
    #[inline]
    fn bits(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl Scalar for f64 {
    #[inline]
    fn of(slot: u64) -> Self {
        Self::from_bits(slot)
    }
    #[inline]
    fn bits(self) -> u64 {
        self.to_bits()
    }
}

impl Scalar for bool {
    #[inline]
    fn of(slot: u64) -> Self {
        slot != 0
    }
    #[inline]
    fn bits(self) -> u64 {
        u64::from(self)
    }
}
