//! Pseudo-random numbers, reproducible from a seed.

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

    /// Returns a number below `bound`, which is above 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// Returns `length` varied by at most `percent`.
    pub fn around(&mut self, length: u64, percent: u64) -> u64 {
        let spread = length * percent / 100;
        if spread == 0 { length } else { length - spread + self.below(2 * spread + 1) }
    }

    /// Returns a number in [0, 1).
    pub fn fraction(&mut self) -> f64 {
        const BITS: u32 = 48;
        #[expect(clippy::cast_precision_loss, reason = "48 bits")]
        let number = (self.number() & ((1 << BITS) - 1)) as f64;
        number / 2f64.powi(48)
    }

    /// Returns the time until the next of events at random times with mean interval `mean`.
    pub fn exponential(&mut self, mean: u64) -> u64 {
        scaled(mean, -(1.0 - self.fraction()).ln())
    }

    /// Returns a log-normally distributed time with this `median`. `spread` is the standard deviation of its
    /// logarithm.
    pub fn log_normal(&mut self, median: u64, spread: f64) -> u64 {
        let (one, two) = (1.0 - self.fraction(), self.fraction());
        let normal = (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * two).cos();
        scaled(median, (spread * normal).exp())
    }
}

fn scaled(length: u64, factor: f64) -> u64 {
    #[expect(clippy::cast_precision_loss, reason = "seconds in nanoseconds")]
    let length = length as f64 * factor;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "as long, and positive")]
    let length = length as u64;
    length
}
