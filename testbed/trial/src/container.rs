//! A container of a trial: its share, and the launches of its processes.

use gpushare_region::ComputePolicy;

use crate::chance::Chance;
use crate::time::{MILLISECOND, SECOND};

/// A container.
#[derive(Clone, Debug)]
pub struct Container {
    /// Share of compute in percent.
    pub cores: u32,
    /// How strictly the share is enforced.
    pub policy: ComputePolicy,
    /// The most that `burst` may use, in percent.
    pub ceiling: u32,
    /// How many processes run its load.
    pub processes: usize,
    /// The load of each process.
    pub load: Load,
}

/// The kernels that a process launches, one after the other.
#[derive(Clone, Debug)]
pub struct Load {
    /// Lengths of its kinds of kernels in nanoseconds. Each launch picks one of them at random.
    pub kernels: Vec<u64>,
    /// Launches between two synchronisations; 0: never synchronises.
    pub synchronise: u32,
    /// How the lengths change over time.
    pub shape: Shape,
    /// How much lengths vary from launch to launch, in percent.
    pub jitter: u64,
    /// Begin and end of its launches, in nanoseconds.
    pub active: (u64, u64),
    /// Pause after each synchronisation, in nanoseconds.
    pub pause: u64,
}

/// How lengths change over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Not at all.
    Steady,
    /// By 80 % up and down, with a period of 0.7 s.
    Sine,
    /// To 1, 4 and 0.5 times the length, each for 1.5 s.
    Steps,
}

impl Shape {
    fn factor(self, now: u64) -> f64 {
        match self {
            Self::Steady => 1.0,
            Self::Sine => {
                let period = 700 * MILLISECOND;
                #[expect(clippy::cast_precision_loss, reason = "a time within a second")]
                let angle = (now % period) as f64 / period as f64 * std::f64::consts::TAU;
                1.0 + 0.8 * angle.sin()
            }
            Self::Steps => match now / (3 * SECOND / 2) % 3 {
                0 => 1.0,
                1 => 4.0,
                _ => 0.5,
            },
        }
    }
}

impl Load {
    /// Creates launches of `length` nanoseconds ±10 %, with a synchronisation after every `synchronise`
    /// launches.
    #[must_use]
    pub fn steady(length: u64, synchronise: u32) -> Self {
        Self {
            kernels: vec![length],
            synchronise,
            shape: Shape::Steady,
            jitter: 10,
            active: (0, u64::MAX),
            pause: 0,
        }
    }

    /// Returns kind and length of the next kernel.
    pub(crate) fn next(&self, chance: &mut Chance, now: u64) -> (usize, u64) {
        let kind = usize::try_from(chance.below(self.kernels.len() as u64)).unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "a length below a second")]
        let length = self.kernels[kind] as f64 * self.shape.factor(now);
        #[expect(clippy::cast_possible_truncation, reason = "a length below a second")]
        #[expect(clippy::cast_sign_loss, reason = "factors are above 0")]
        let length = length as u64;
        (kind, chance.around(length.max(1), self.jitter))
    }
}

impl Container {
    /// Creates a container with `processes` processes that run `load` under the policy `fixed`.
    #[must_use]
    pub fn fixed(cores: u32, processes: usize, load: Load) -> Self {
        Self { cores, policy: ComputePolicy::Fixed, ceiling: 100, processes, load }
    }
}
