//! What a container uses of time: what lies between two looks.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::overview::{Overview, PartView};

/// A rate that no new window of the driver's has renewed for so long is over.
const OLD: Duration = Duration::from_secs(5);

/// Rates by lease and GPU.
#[derive(Default)]
pub struct Rates {
    parts: HashMap<(i64, String), Rate>,
}

/// What one lease used of one GPU at the last looks.
struct Rate {
    gpu_nanoseconds: u64,
    until: u64,
    throttled: u64,
    looked: Instant,
    /// When the driver told a new window.
    renewed: Instant,
    busy: Option<f64>,
    held: Option<f64>,
}

impl Rates {
    /// Takes another look into account.
    pub fn look(&mut self, overview: &Overview) {
        self.look_at(overview, Instant::now());
    }

    fn look_at(&mut self, overview: &Overview, now: Instant) {
        let mut parts = HashMap::new();
        for (share, part) in
            overview.shares.iter().flat_map(|share| share.parts.iter().map(move |part| (share, part)))
        {
            let key = (share.lease, part.uuid.clone());
            let rate = match self.parts.remove(&key) {
                Some(before) => before.then(part, now),
                None => Rate {
                    gpu_nanoseconds: part.gpu_nanoseconds.unwrap_or(0),
                    until: part.gpu_time_until,
                    throttled: part.throttled_nanoseconds,
                    looked: now,
                    renewed: now,
                    busy: None,
                    held: None,
                },
            };
            parts.insert(key, rate);
        }
        self.parts = parts;
    }

    /// The part of the time in which the lease used the GPU, 1 for all of it; `None` before it is known.
    pub fn busy(&self, lease: i64, part: &PartView) -> Option<f64> {
        self.parts.get(&(lease, part.uuid.clone()))?.busy
    }

    /// The part of the time for which its launches were held back, over all threads.
    pub fn held(&self, lease: i64, part: &PartView) -> Option<f64> {
        self.parts.get(&(lease, part.uuid.clone()))?.held
    }
}

impl Rate {
    fn then(self, part: &PartView, now: Instant) -> Self {
        let gpu_nanoseconds = part.gpu_nanoseconds.unwrap_or(0);
        let window = part.gpu_time_until.saturating_sub(self.until);
        let used = gpu_nanoseconds.saturating_sub(self.gpu_nanoseconds);
        let is_new = window > 0 && self.until > 0;
        let wall = now.saturating_duration_since(self.looked);
        let throttled = part.throttled_nanoseconds.saturating_sub(self.throttled);
        let busy = match is_new {
            true => Some(ratio(used, window)),
            false if now.saturating_duration_since(self.renewed) > OLD => None,
            false => self.busy,
        };
        Self {
            gpu_nanoseconds,
            until: part.gpu_time_until,
            throttled: part.throttled_nanoseconds,
            looked: now,
            renewed: if is_new { now } else { self.renewed },
            busy,
            held: if wall.is_zero() { self.held } else { Some(ratio(throttled, nanoseconds(wall))) },
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a rate for the eye")]
fn ratio(some: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { some as f64 / all as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overview::ShareView;

    fn overview(gpu: u64, until: u64, throttled: u64) -> Overview {
        let part = PartView {
            uuid: "GPU-1".to_owned(),
            gpu_nanoseconds: Some(gpu),
            gpu_time_until: until,
            throttled_nanoseconds: throttled,
            ..PartView::default()
        };
        let share = ShareView { lease: 1, parts: vec![part], ..ShareView::default() };
        Overview { shares: vec![share], ..Overview::default() }
    }

    #[test]
    fn a_rate_is_what_lies_between_two_windows_of_the_driver() {
        let (mut rates, start) = (Rates::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let part = overview(0, 0, 0).shares[0].parts[0].clone();
        let second = 1_000_000_000;
        rates.look_at(&overview(second, 10 * second, 0), at(0));
        assert_eq!((rates.busy(1, &part), rates.held(1, &part)), (None, None));
        rates.look_at(&overview(2 * second, 12 * second, second), at(2));
        assert_eq!((rates.busy(1, &part), rates.held(1, &part)), (Some(0.5), Some(0.5)));
        // No new window: the last one counts, but not for ever.
        rates.look_at(&overview(2 * second, 12 * second, second), at(4));
        assert_eq!((rates.busy(1, &part), rates.held(1, &part)), (Some(0.5), Some(0.0)));
        rates.look_at(&overview(2 * second, 12 * second, second), at(9));
        assert_eq!(rates.busy(1, &part), None);
        // A clock or a count that jumps back is no rate.
        rates.look_at(&overview(0, second, 0), at(10));
        assert_eq!((rates.busy(1, &part), rates.held(1, &part)), (None, Some(0.0)));
    }
}
