//! Varies the time of kernels while a program runs, according to `GPUSHARE_SIMULATOR_KERNEL_SHAPE`.
//!
//! The variable contains terms joined by `+`. At a kernel's launch, each term multiplies the time given in
//! the kernel's name. `sine:0.8:700ms` multiplies by 0.2 to 1.8, in waves of 700 ms. `steps:1,4,0.5:1500ms`
//! multiplies by each of the numbers in turn, for 1.5 s each. `jitter:0.1` multiplies by a random number from
//! 0.9 to 1.1. Waves and steps follow the device clock, so they are the same in all processes. The random
//! numbers are seeded with `GPUSHARE_SIMULATOR_SEED`, or with the pid if that is not set.

use std::sync::atomic::{AtomicU64, Ordering};

use gpushare_simulator::{clock, span};

/// Environment variable that holds the terms.
pub const VARIABLE: &str = "GPUSHARE_SIMULATOR_KERNEL_SHAPE";

#[derive(Clone, Debug, PartialEq)]
enum Term {
    Sine { height: f64, period: u64 },
    Steps { factors: Vec<f64>, length: u64 },
    Jitter { width: f64 },
}

/// The terms, and the count of random numbers drawn.
#[derive(Debug, Default)]
pub struct Shape {
    terms: Vec<Term>,
    seed: u64,
    drawn: AtomicU64,
}

/// A part of a time, from 0 to below 1, so that a time reduced by it stays above zero.
fn part(text: &str) -> Option<f64> {
    text.parse().ok().filter(|value| (0.0..1.0).contains(value))
}

fn factor(text: &str) -> Option<f64> {
    text.parse().ok().filter(|value: &f64| *value > 0.0 && *value <= 1e6)
}

impl Term {
    fn parse(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.trim().split(':').collect();
        match parts[..] {
            ["sine", height, period] => {
                Some(Self::Sine { height: part(height)?, period: span::parse(period).ok()? })
            }
            ["steps", factors, length] => Some(Self::Steps {
                factors: factors.split(',').map(factor).collect::<Option<_>>()?,
                length: span::parse(length).ok()?,
            }),
            ["jitter", width] => Some(Self::Jitter { width: part(width)? }),
            _ => None,
        }
    }

    /// The factor at `now` in nanoseconds of the device clock; `random` gives a number from 0 to 1.
    #[allow(clippy::cast_precision_loss)]
    fn at(&self, now: u64, random: impl FnOnce() -> f64) -> f64 {
        match self {
            Self::Sine { height, period } => {
                let phase = (now % period) as f64 / *period as f64;
                1.0 + height * (phase * std::f64::consts::TAU).sin()
            }
            Self::Steps { factors, length } => {
                let step = usize::try_from(now / length).unwrap_or(0) % factors.len();
                factors[step]
            }
            Self::Jitter { width } => 1.0 + width * (2.0 * random() - 1.0),
        }
    }
}

impl Shape {
    /// Parses the terms; `None` if one of them is invalid.
    fn parse(text: &str, seed: u64) -> Option<Self> {
        let terms = text.split('+').map(Term::parse).collect::<Option<_>>()?;
        Some(Self { terms, seed, drawn: AtomicU64::new(0) })
    }

    /// Reads the shape from the environment. Without the variable, times stay unchanged.
    ///
    /// # Errors
    /// The variable's text, if it is invalid.
    pub fn of_environment() -> Result<Self, String> {
        let Ok(text) = std::env::var(VARIABLE) else { return Ok(Self::default()) };
        let seed = crate::driver::number_of("GPUSHARE_SIMULATOR_SEED");
        Self::parse(&text, seed.unwrap_or_else(|| std::process::id().into())).ok_or(text)
    }

    /// Returns the nanoseconds that a kernel of `length` nanoseconds takes if it is launched now.
    pub fn shaped(&self, length: u64) -> u64 {
        if self.terms.is_empty() { length } else { self.shaped_at(length, clock::now()) }
    }

    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn shaped_at(&self, length: u64, now: u64) -> u64 {
        let factors = self.terms.iter().map(|term| term.at(now, || self.random()));
        (length as f64 * factors.product::<f64>()).round() as u64
    }

    /// The next random number from 0 to 1, by splitmix64.
    #[allow(clippy::cast_precision_loss)]
    fn random(&self) -> f64 {
        let step = self.drawn.fetch_add(1, Ordering::Relaxed).wrapping_add(self.seed << 32).wrapping_add(1);
        let mut word = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) as f64 / u64::MAX as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn waves_and_steps_go_by_the_clock() {
        for (text, now, want) in [
            ("sine:0.8:700ms", 0, 1_000),
            ("sine:0.8:700ms", 175, 1_800),
            ("sine:0.8:700ms", 525, 200),
            ("sine:0.8:700ms", 7_175, 1_800),
            ("steps:1,4,0.5:1500ms", 1_499, 1_000),
            ("steps:1,4,0.5:1500ms", 1_500, 4_000),
            ("steps:1,4,0.5:1500ms", 3_000, 500),
            ("steps:1,4,0.5:1500ms", 4_500, 1_000),
            ("steps:2:1s + sine:0.5:1s", 250, 3_000),
        ] {
            let shape = Shape::parse(text, 1).expect("a shape");
            assert_eq!(shape.shaped_at(1_000, now * MS), want, "{text} at {now} ms");
        }
    }

    #[test]
    fn jitter_keeps_its_bounds_and_mean_and_differs_by_seed() {
        let times = |seed| -> Vec<u64> {
            let shape = Shape::parse("jitter:0.1", seed).expect("a shape");
            (0..10_000).map(|_| shape.shaped_at(100_000, 0)).collect()
        };
        let (one, other) = (times(1), times(2));
        assert!(one.iter().all(|time| (90_000..=110_000).contains(time)));
        assert!(one.iter().any(|time| *time < 91_000) && one.iter().any(|time| *time > 109_000));
        let mean = one.iter().sum::<u64>() / 10_000;
        assert!((99_800..=100_200).contains(&mean), "{mean}");
        assert!(one != other && one == times(1));
    }

    #[test]
    fn what_is_no_shape_is_refused() {
        for text in
            ["", "sine", "sine:1:1s", "sine:0.5:1", "steps::1s", "steps:1,0:1s", "jitter:-1", "jitter:0.1+"]
        {
            assert!(Shape::parse(text, 1).is_none(), "{text:?}");
        }
    }
}
