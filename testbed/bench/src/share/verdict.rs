//! Figures of one container's GPU time.

use crate::books::BIN;

/// Number of bins in a second.
const SECOND: usize = 100;
/// Number of bins by which a window moves.
const STEP: usize = 5;

/// A container's GPU time, in percent of the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Its share.
    pub limit: f64,
    /// Its time after the first second.
    pub mean: f64,
    /// Its time in the worst 1-s window after the first second.
    pub least: f64,
    /// Its time in the best 1-s window after the first second.
    pub most: f64,
    /// Its time in the first second.
    pub first_second: f64,
}

impl Figures {
    /// Whether `bins` cover a first second and at least `seconds` more.
    pub fn enough(bins: &[u64], seconds: u64) -> bool {
        bins.len() >= length(seconds)
    }

    /// Computes the figures of `bins`. There must be [enough](Self::enough) of them.
    pub fn of(bins: &[u64], limit: f64, seconds: u64) -> Self {
        let bins = &bins[..length(seconds).min(bins.len())];
        let (first, rest) = bins.split_at(SECOND.min(bins.len()));
        let windows: Vec<f64> = rest.windows(SECOND).step_by(STEP).map(percent).collect();
        Self {
            limit,
            mean: percent(rest),
            least: windows.iter().copied().fold(f64::INFINITY, f64::min),
            most: windows.iter().copied().fold(0.0, f64::max),
            first_second: percent(first),
        }
    }

    /// Returns the points between the mean and the share.
    pub fn mean_error(&self) -> f64 {
        (self.mean - self.limit).abs()
    }

    /// Returns the points between the window that is furthest off and the share.
    pub fn window_error(&self) -> f64 {
        (self.most - self.limit).abs().max((self.least - self.limit).abs())
    }

    /// Returns the time in the first second, in percent of the share.
    pub fn first(&self) -> f64 {
        self.first_second * 100.0 / self.limit
    }
}

fn length(seconds: u64) -> usize {
    usize::try_from(seconds + 1).unwrap_or(usize::MAX).saturating_mul(SECOND)
}

/// Returns the percent of their length for which `bins` were busy.
fn percent(bins: &[u64]) -> f64 {
    let shares = bins.iter().map(|busy| std::time::Duration::from_nanos(*busy).as_secs_f64());
    let whole = std::time::Duration::from_nanos(BIN).as_secs_f64();
    let count = bins.iter().map(|_| whole).sum::<f64>();
    shares.sum::<f64>() * 100.0 / count.max(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_of_its_own_part_of_the_course() {
        // A first second at 60 %, then 50 %, with one second at 40 % in between.
        let mut bins = vec![6_000_000; 100];
        bins.extend(vec![5_000_000; 200]);
        bins.extend(vec![4_000_000; 100]);
        bins.extend(vec![5_000_000; 200]);
        assert!(Figures::enough(&bins, 5) && !Figures::enough(&bins, 6));
        let figures = Figures::of(&bins, 50.0, 5);
        let rounded = |value: f64| (value * 10.0).round() / 10.0;
        assert_eq!(rounded(figures.mean_error()), 2.0);
        assert_eq!((rounded(figures.least), rounded(figures.most)), (40.0, 50.0));
        assert_eq!(rounded(figures.window_error()), 10.0);
        assert_eq!(rounded(figures.first()), 120.0);
    }
}
