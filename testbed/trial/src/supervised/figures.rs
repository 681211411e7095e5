//! What containers got of the card, compared with what they get alone.

use gpushare_simulator::virtual_gpu::BIN;

use crate::time::{MILLISECOND, SECOND};

/// What a container got.
#[derive(Clone, Debug)]
pub struct Share {
    /// Per cent of what it does alone.
    pub mean: f64,
    /// That of the second with the least, and of the one with the most. Seconds begin every 50 ms.
    pub seconds: (f64, f64),
    /// Of its requests.
    pub latencies: Latencies,
}

/// What requests took, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latencies {
    /// What half of them did not exceed.
    pub p50: f64,
    /// What 99 of 100 did not exceed.
    pub p99: f64,
    /// Milliseconds of the longest request.
    pub most: f64,
    /// How many a second.
    pub rate: f64,
}

impl Share {
    /// Of a container that kept the card busy as `bins` say, and alone for `solo` nanoseconds of a second.
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
    /// Of requests that took so many nanoseconds, within `length` nanoseconds.
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
