//! Pseudo-random numbers, the same in every run with one seed.

/// A xorshift generator.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        let mut chance = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        (0..8).for_each(|_| _ = chance.number());
        chance
    }

    fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// A number below `bound`, which is above 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// `length` changed by at most `percent`.
    pub fn around(&mut self, length: u64, percent: u64) -> u64 {
        let spread = length * percent / 100;
        if spread == 0 { length } else { length - spread + self.below(2 * spread + 1) }
    }
}
