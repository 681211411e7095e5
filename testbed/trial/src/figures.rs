//! Measures how far a container was from its share.

use gpushare_simulator::virtual_gpu::BIN;

use crate::time::{MILLISECOND, SECOND};

/// Limits beyond which a run is a miss: percentage points of the mean, percentage points of the worst second,
/// and percent of the share in the first second.
pub const MISS: (f64, f64, f64) = (1.5, 4.0, 110.0);

/// What one container got in a run.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Mean use after the first second minus the share, in percentage points.
    pub mean: f64,
    /// The largest difference to the share in any second after the first, in percentage points. Seconds begin
    /// every 50 ms.
    pub worst: f64,
    /// Use in the first second, in percent of what the share allows in a second.
    pub first: f64,
    /// Use of the GPU in each second, in percent.
    pub seconds: Vec<f64>,
}

impl Figures {
    /// The figures of a container with a share of `cores` percent that began at `begin` and used the GPU as
    /// `bins` say.
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
        Self {
            mean: percent(begin + SECOND, end) - want,
            worst,
            first: percent(begin, begin + SECOND) / want * 100.0,
            seconds: (0..end / SECOND)
                .map(|second| percent(second * SECOND, (second + 1) * SECOND))
                .collect(),
        }
    }

    /// The worse of the two, figure by figure; without seconds.
    #[must_use]
    pub(crate) fn worse(&self, other: &Self) -> Self {
        Self {
            mean: if other.mean.abs() > self.mean.abs() { other.mean } else { self.mean },
            worst: self.worst.max(other.worst),
            first: self.first.max(other.first),
            seconds: Vec::new(),
        }
    }

    /// Whether the run missed a target of [`MISS`].
    #[must_use]
    pub fn is_miss(&self) -> bool {
        self.mean.abs() > MISS.0 || self.worst > MISS.1 || self.first > MISS.2
    }
}
