//! Shares of containers on a card, compared with their work alone.

use gpushare_simulator::virtual_gpu::BIN;

use crate::time::{MILLISECOND, SECOND};

/// A container's results.
#[derive(Clone, Debug)]
pub struct Share {
    /// Per cent of its work alone.
    pub mean: f64,
    /// Shares of the worst and the best second. Seconds begin every 50 ms.
    pub seconds: (f64, f64),
    /// Latencies of its requests.
    pub latencies: Latencies,
}

/// Durations of requests, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latencies {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// The longest request.
    pub most: f64,
    /// Requests per second.
    pub rate: f64,
}

impl Share {
    /// Computes the share of a container that kept the card busy according to `bins`, and does so alone for
    /// `solo` nanoseconds of a second.
    pub(super) fn new(bins: &[u64], (from, to): (u64, u64), solo: f64, latencies: Latencies) -> Self {
        let mut sums = vec![0u64];
        sums.extend(bins.iter().scan(0, |sum, bin| {
            *sum += bin;
            Some(*sum)
        }));
        let percent = |from: u64, to: u64| {
            let at = |time: u64| sums[usize::try_from(time / BIN).unwrap_or(0).min(sums.len() - 1)];
            float(at(to) - at(from)) / float(to - from) * 100.0 / solo
        };
        let step = usize::try_from(50 * MILLISECOND).unwrap_or(1);
        let seconds = (from..=to - SECOND).step_by(step).map(|begin| percent(begin, begin + SECOND));
        let seconds =
            seconds.fold((f64::INFINITY, 0.0f64), |(least, most), one| (least.min(one), most.max(one)));
        Self { mean: percent(from, to), seconds, latencies }
    }
}

impl Latencies {
    /// Computes the latencies of requests that took these nanoseconds, within `length` nanoseconds.
    pub(super) fn new(mut took: Vec<u64>, length: u64) -> Self {
        took.sort_unstable();
        let at = |percent: usize| took.get(took.len() * percent / 100).or(took.last()).copied().unwrap_or(0);
        let milliseconds = |time: u64| float(time) / float(MILLISECOND);
        let count = float(u64::try_from(took.len()).unwrap_or(0));
        Self {
            p50: milliseconds(at(50)),
            p99: milliseconds(at(99)),
            most: milliseconds(at(100)),
            rate: count * float(SECOND) / float(length),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "minutes in nanoseconds")]
pub(super) fn float(number: u64) -> f64 {
    number as f64
}
