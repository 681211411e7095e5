//! When the programs of containers run on a card, as it is set from outside of the containers.
//!
//! A card's own scheduler lets each channel group run for its slice, in turn with the others, and not at all
//! while its channels are stopped. This crate says what a container's supervisor has to tell the card. It
//! performs nothing and knows no clock, so that whole days of it can be tried in a second.
//!
//! | policy | how | module |
//! |---|---|---|
//! | `fixed` | a window in each frame, outside of which the container is stopped | [`windows`], its place in [`frame`] |
//! | `burst`, and no limit | slices in proportion to shares | [`slices`] |
//! | `latency` | a long slice, beside the shortest ones for the others, which run one after the other | both |
//! | a ceiling | slices, in a window of what `fixed` containers leave | both |
//!
//! All times are microseconds. Those of an H200 with driver 580: stopping a container's channels takes a call
//! of 500, starting them one of 300, and a switch between two groups 185 of work.

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
        /// The most that it gets, in per cent of what `fixed` containers leave; 100 is no ceiling.
        ceiling: u32,
    },
    /// Answers at once: the others have the shortest slices beside it, one group at a time. It falls back to
    /// its share where it uses more than that.
    Latency {
        /// Per cent of the card.
        share: u32,
    },
    /// A part of what is left, without a promise.
    Unlimited,
}

/// What the card's own record says of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// How many of its channel groups had the engine of late.
    pub working: u32,
    /// Whether it has used more than its share of a second, and not less since.
    pub is_over: bool,
    /// Mean length of a turn in microseconds while the container has less than its share; see [`stay`].
    pub stay: u32,
}

/// Whether a container with so many per cent is over its share, which it was before or not, after it used so
/// many microseconds of the last second. One that comes to its share in a window of that size is still over
/// it.
pub fn is_over(was_over: bool, used: u64, share: u32) -> bool {
    const PER_CENT: u64 = 10_000;
    let share = u64::from(share) * PER_CENT;
    used > share || (was_over && used > share * 9 / 10)
}

/// Returns the mean length of a turn in microseconds, for a container that used `used` microseconds of the last second in
/// `taken` turns. Returns 0 if there were no turns, or if the container reached its share. Others make room while the
/// last figure `before` was not 0, so the share then counts as reached only if it is clearly exceeded.
pub fn stay(before: u32, used: u64, taken: u32, share: u32) -> u32 {
    let most = u64::from(share) * if before > 0 { 11_500 } else { 9_500 };
    let is_short = taken > 0 && used < most;
    if is_short { u32::try_from(used / u64::from(taken)).unwrap_or(u32::MAX) } else { 0 }
}

impl Policy {
    /// The policy that counts, where the record says this. Without a record nobody can see who uses more than
    /// his share, so that nobody is put before others.
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

/// A container on a card, as everybody knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its lease.
    pub lease: i64,
    /// How it shares.
    pub policy: Policy,
    /// Whether it has a context and is not paused. The window of one that has none belongs to the others.
    pub is_present: bool,
    /// How many of its channel groups work.
    pub working: u32,
    /// Whether none had the engine of late, by the card's own record.
    pub rests: bool,
    /// Microseconds by which its current or next window is shortened to pay for earlier overruns. For a supervisor's own
    /// lease this is the figure of the lease's other supervisors.
    pub pays: u32,
    /// When its channels were last started, in microseconds of the clock that counts frames; 0 if unknown.
    pub started: u64,
    /// [`Recorded::stay`]; 0 without a record.
    pub stay: u32,
    /// Microseconds of a slice that its groups use before they run out of work; 0 if they use all of it.
    pub stint: u32,
}

/// How many of so many channel groups of a container work, where the card's own record says how many had the
/// engine of late. One that has contexts counts, whether it works or not: it may begin at any time.
pub fn working(groups: u32, recorded: Option<Recorded>) -> u32 {
    recorded.map_or(groups, |recorded| recorded.working.clamp(groups.min(1), groups))
}

/// A card and who shares it.
#[derive(Clone, Copy, Debug)]
pub struct Card<'l> {
    /// The frame of its windows.
    pub frame: Frame,
    /// Containers that share it, each lease once.
    pub tenants: &'l [Tenant],
}

impl Card<'_> {
    /// Whether somebody is there who is to be answered at once, whenever his next request comes.
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
