//! Measures each container's distance from its share.

use std::ops::RangeInclusive;

use gpushare_simulator::virtual_gpu::BIN;

use crate::time::{MILLISECOND, SECOND};

/// The maximum distance of a container from its share.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Percentage points between the mean and the share.
    pub mean: f64,
    /// Percentage points between any second and the share.
    pub second: f64,
    /// Percent of the share in the first second.
    pub first: RangeInclusive<f64>,
}

/// One container's results in a run.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Mean use after the first second minus the share, in percentage points.
    pub mean: f64,
    /// The largest difference from the share in any second after the first, in percentage points. Seconds
    /// begin every 50 ms.
    pub worst: f64,
    /// Use in the first second, in percent of the share of a second.
    pub first: f64,
    /// The lowest [`Self::first`] of the containers in a summary.
    pub least_first: f64,
    /// Use of the GPU in each second, in percent.
    pub seconds: Vec<f64>,
}

impl Figures {
    /// Computes the figures of a container with a share of `cores` percent that began at `begin` and used the
    /// GPU according to `bins`.
    pub(crate) fn new(bins: &[u64], begin: u64, end: u64, cores: u32) -> Self {
        let mut sums = vec![0u64];
        for index in 0..usize::try_from(end / BIN).unwrap_or(0) {
            sums.push(sums[index] + bins.get(index).copied().unwrap_or(0));
        }
        let percent = |from: u64, to: u64| {
            let at = |time: u64| sums[usize::try_from(time / BIN).unwrap_or(0).min(sums.len() - 1)];
            #[expect(clippy::cast_precision_loss, reason = "seconds in nanoseconds")]
            let share = (at(to) - at(from)) as f64 / (to - from) as f64;
            share * 100.0
        };
        let want = f64::from(cores);
        let windows = (begin + SECOND..=end - SECOND).step_by(50 * usize::try_from(MILLISECOND).unwrap_or(1));
        let worst = windows.map(|from| (percent(from, from + SECOND) - want).abs()).fold(0.0, f64::max);
        let first = percent(begin, begin + SECOND) / want * 100.0;
        Self {
            mean: percent(begin + SECOND, end) - want,
            worst,
            first,
            least_first: first,
            seconds: (0..end / SECOND)
                .map(|second| percent(second * SECOND, (second + 1) * SECOND))
                .collect(),
        }
    }

    /// Returns the worse of the two, figure by figure, without the seconds.
    #[must_use]
    pub(crate) fn worse(&self, other: &Self) -> Self {
        Self {
            mean: if other.mean.abs() > self.mean.abs() { other.mean } else { self.mean },
            worst: self.worst.max(other.worst),
            first: self.first.max(other.first),
            least_first: self.least_first.min(other.least_first),
            seconds: Vec::new(),
        }
    }

    /// Whether the figures are within `bounds`.
    #[must_use]
    pub fn is_within(&self, bounds: &Bounds) -> bool {
        self.mean.abs() <= bounds.mean
            && self.worst <= bounds.second
            && bounds.first.contains(&self.first)
            && bounds.first.contains(&self.least_first)
    }
}
