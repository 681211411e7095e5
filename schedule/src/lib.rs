//! Schedules the programs of containers on a card, from outside of the containers.
//!
//! A card's own scheduler runs each channel group for its slice, in turn with the others. It never runs a
//! group whose channels are stopped. This crate computes a supervisor's orders to the card. It performs
//! nothing and has no clock, so tests can simulate whole days in a second.
//!
//! | policy | how | module |
//! |---|---|---|
//! | `fixed` | a window in each frame, outside of which the container is stopped | [`windows`], its place in [`frame`] |
//! | `burst`, and no limit | slices in proportion to shares | [`slices`] |
//! | `latency` | a long slice, beside the shortest ones for the others, which run one after the other | both |
//! | a ceiling | slices, in a window of what `fixed` containers leave | both |
//!
//! All times are microseconds. On an H200 with driver 580, stopping a container's channels takes one call of
//! 500, starting them one of 300, and a switch between two groups costs 185 of GPU time.

pub mod controller;
pub mod frame;
pub mod slices;
mod stint;
pub mod windows;

use frame::{Frame, Place};

/// How a container shares the time of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// A guarantee and a cap: a window in each frame.
    Fixed(Place),
    /// At least its share while others work, and more while they do not.
    Burst {
        /// Per cent of the card.
        share: u32,
        /// The most that it gets, in per cent of the time that `fixed` containers leave; 100 is no ceiling.
        ceiling: u32,
    },
    /// Low latency: while it is present, the others get the shortest slices, one group at a time. It falls
    /// back to its share if it uses more than that.
    Latency {
        /// Per cent of the card.
        share: u32,
    },
    /// A part of the rest, without a guarantee.
    Unlimited,
}

/// A container's figures from the card's own record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// How many of its channel groups had the engine recently.
    pub working: u32,
    /// Whether it has used more than its share of a second, and has not used less since.
    pub is_over: bool,
    /// Mean length of a turn in microseconds while the container has less than its share; see [`stay`].
    pub stay: u32,
}

/// Whether a container exceeds its share of `share` per cent after it used `used` microseconds of the last
/// second. `was_over` is the previous result: a container that was over stays over until its use drops to 90
/// % of the share, because one that reaches its share in a window of that size is still over it.
pub fn is_over(was_over: bool, used: u64, share: u32) -> bool {
    const PER_CENT: u64 = 10_000;
    let share = u64::from(share) * PER_CENT;
    used > share || (was_over && used > share * 9 / 10)
}

/// Returns the mean length of a turn in microseconds, for a container that used `used` microseconds of the
/// last second in `taken` turns. Returns 0 if there were no turns, or if the container reached its share.
/// Others make room while the last figure `before` was not 0, so the share then counts as reached only if it
/// is clearly exceeded.
pub fn stay(before: u32, used: u64, taken: u32, share: u32) -> u32 {
    let most = u64::from(share) * if before > 0 { 11_500 } else { 9_500 };
    let is_short = taken > 0 && used < most;
    if is_short { u32::try_from(used / u64::from(taken)).unwrap_or(u32::MAX) } else { 0 }
}

impl Policy {
    /// Returns the policy in force, given the record. Without a record nothing shows which container exceeds
    /// its share, so none gets precedence.
    #[must_use]
    pub fn in_force(self, recorded: Option<Recorded>) -> Self {
        match (self, recorded) {
            (Self::Latency { share }, None | Some(Recorded { is_over: true, .. })) => {
                Self::Burst { share, ceiling: 100 }
            }
            (policy, _) => policy,
        }
    }
}

/// A container on a card, as published to all supervisors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its lease.
    pub lease: i64,
    /// How it shares.
    pub policy: Policy,
    /// Whether it has a context and is not paused. The others get the window of an absent container.
    pub is_present: bool,
    /// How many of its channel groups work.
    pub working: u32,
    /// Whether none of its groups had the engine recently, according to the card's own record.
    pub rests: bool,
    /// Microseconds by which its current or next window is shortened to pay for earlier overruns. For a
    /// supervisor's own lease this is the figure of the lease's other supervisors.
    pub pays: u32,
    /// When its channels were last started, in microseconds of the clock that counts frames; 0 if unknown.
    pub started: u64,
    /// [`Recorded::stay`]; 0 without a record.
    pub stay: u32,
    /// Microseconds of a slice that its groups use before they run out of work; 0 if they use all of it.
    pub stint: u32,
}

impl Tenant {
    /// Returns a container with so many working channel groups and no further figures.
    pub fn new(lease: i64, policy: Policy, working: u32) -> Self {
        let is_present = working > 0;
        Self { lease, policy, is_present, working, rests: false, pays: 0, started: 0, stay: 0, stint: 0 }
    }
}

/// Returns how many of a container's `groups` channel groups work, given the card's own record. At least one
/// counts if there are any, working or not, because it may begin at any time.
pub fn working(groups: u32, recorded: Option<Recorded>) -> u32 {
    recorded.map_or(groups, |recorded| recorded.working.clamp(groups.min(1), groups))
}

/// A card and the containers that share it.
#[derive(Clone, Copy, Debug)]
pub struct Card<'l> {
    /// The frame of its windows.
    pub frame: Frame,
    /// Containers that share it, each lease once.
    pub tenants: &'l [Tenant],
}

impl Card<'_> {
    /// Whether a latency container is present.
    fn has_latency(&self) -> bool {
        self.tenants.iter().any(|one| one.is_present && matches!(one.policy, Policy::Latency { .. }))
    }

    fn tenant(&self, lease: i64) -> Option<&Tenant> {
        self.tenants.iter().find(|tenant| tenant.lease == lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_put_before_others_is_so_while_the_record_shows_no_more_than_the_share() {
        let latency = Policy::Latency { share: 30 };
        let falls_back = Policy::Burst { share: 30, ceiling: 100 };
        let recorded = |is_over| Some(Recorded { working: 1, is_over, stay: 0 });
        assert_eq!(latency.clone().in_force(recorded(false)), latency);
        assert_eq!(latency.clone().in_force(recorded(true)), falls_back);
        assert_eq!(latency.in_force(None), falls_back);
        assert_eq!(Policy::Unlimited.in_force(recorded(true)), Policy::Unlimited);
        assert_eq!([is_over(false, 300_000, 30), is_over(false, 300_001, 30)], [false, true]);
        assert_eq!([is_over(true, 270_001, 30), is_over(true, 270_000, 30)], [true, false]);
    }

    #[test]
    fn turns_are_measured_only_below_the_share() {
        assert_eq!([106_000, 284_999, 285_000].map(|used| stay(0, used, 100, 30)), [1_060, 2_849, 0]);
        assert_eq!([285_000, 344_999, 345_000].map(|used| stay(1, used, 100, 30)), [2_850, 3_449, 0]);
        assert_eq!(stay(1, 106_000, 0, 30), 0);
    }
}
