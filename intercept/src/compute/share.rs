//! The host's grant, read once in each pass of the slow path.

use core::sync::atomic::Ordering::Relaxed;

use gpushare_region::{ComputePolicy, LimitLine};

/// The compute that a container may use now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Part of the GPU's time, in hundredths of a percent; above 0, at most 10,000.
    pub rate: u64,
}

impl Share {
    /// The current share. `None`: launches are not limited.
    pub(super) fn now(line: &LimitLine) -> Option<Self> {
        let most = most_percent(line);
        (most < 100).then(|| Self { rate: u64::from(most.max(1)) * 100 })
    }

    /// Whether launches on the GPU of `line` are limited to a share.
    #[inline(always)]
    pub fn is_limited(line: &LimitLine) -> bool {
        most_percent(line) < 100
    }
}

/// The most that programs may use of the GPU of `line`, in percent. A container that may use idle time is
/// held only to its ceiling: this library does not know which other containers are active.
#[inline(always)]
fn most_percent(line: &LimitLine) -> u32 {
    let cores = line.cores_percent.load(Relaxed);
    match ComputePolicy::from_number(line.policy.load(Relaxed)) {
        policy if !policy.limits_time() => 100,
        ComputePolicy::Burst => line.ceiling_percent.load(Relaxed).max(cores),
        _ => cores,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_what_the_host_grants_now() {
        let (fixed, burst, none) = (1, 2, 0);
        let share = |rate| Some(Share { rate });
        for (what, policy, cores, ceiling, want) in [
            ("fixed", fixed, 30, 100, share(3_000)),
            ("burst", burst, 30, 100, None),
            ("burst with a ceiling", burst, 30, 80, share(8_000)),
            ("a ceiling below the share", burst, 30, 10, share(3_000)),
            ("no limit", none, 30, 100, None),
            ("all of the GPU", fixed, 100, 100, None),
            ("more than that", burst, u32::MAX, 0, None),
            ("nothing", fixed, 0, 0, share(100)),
            ("a policy that is not known", 7, 30, 100, share(3_000)),
        ] {
            let line = LimitLine::default();
            line.policy.store(policy, Relaxed);
            line.cores_percent.store(cores, Relaxed);
            line.ceiling_percent.store(ceiling, Relaxed);
            assert_eq!(Share::now(&line), want, "{what}");
            assert_eq!(Share::is_limited(&line), want.is_some(), "{what}");
        }
    }
}
