//! How long the channel groups of containers without a window run at a stretch.
//!
//! The card gives each group its slice in turn. A container's part of a round is in proportion to its share,
//! whatever number of groups it has; what the switches to its groups take is its own.

use crate::{Card, Policy, Tenant};

/// Microseconds of a round for each group that works.
const FOR_EACH: u32 = 6_000;
/// Groups of one container that lengthen the round: else its neighbours would wait for all of them.
const MOST_COUNTED: u32 = 2;
/// The longest round.
const LONGEST: u32 = 30_000;
/// Time of the card that a switch to another group takes.
const SWITCH: u32 = 185;
/// The shortest slice that a group runs for.
const SHORTEST: u32 = 500;
/// The slice of one that is to be answered at once.
const LATENCY: u32 = 6_000;
/// A slice of 100 that is asked for runs for so much.
const RUNS_FOR: u32 = 102;
/// After which time other groups of a container have their turn, where not all can run at once.
const TURN: u64 = 100_000;
/// Per cent that containers without a limit share at least.
const LEAST_LEFT: u32 = 5;
/// A per cent of weight.
const UNIT: u64 = 1_000;
/// All of the time.
const WHOLE: u64 = 100 * UNIT;

/// Slices of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// The slice of each of its groups, in microseconds as the card is asked for it.
    pub slice: u32,
    /// How many of its working groups run at a time. The others are stopped.
    pub at_once: u32,
}

impl Slices {
    /// Which of so many working groups run now where they cannot all run at once: the first one, and how many
    /// from there on, counted in a circle.
    pub fn turn(&self, groups: u32, now: u64) -> Option<(u32, u32)> {
        if self.at_once >= groups {
            return None;
        }
        let turns = now / TURN % u64::from(groups);
        let first = turns * u64::from(self.at_once) % u64::from(groups);
        Some((u32::try_from(first).unwrap_or(0), self.at_once))
    }
}

impl Slices {
    /// The same for those `groups` that one supervisor has of the container's `working` ones.
    pub(crate) fn part(self, groups: u32, working: u32) -> Self {
        let at_once = u64::from(self.at_once) * u64::from(groups) / u64::from(working.max(1));
        Self { at_once: u32::try_from(at_once).unwrap_or(u32::MAX).max(1), ..self }
    }

    /// When the next turn begins.
    pub(crate) fn next_turn(now: u64) -> u64 {
        (now / TURN + 1) * TURN
    }
}

impl Card<'_> {
    /// The slices of the container of this lease; `None` for one with a window, or not there.
    pub fn slices(&self, lease: i64) -> Option<Slices> {
        let tenant = self.tenant(lease)?;
        if let Policy::Latency { .. } = tenant.policy {
            // A request is over in one slice, and who has none gives it away.
            return Some(Slices { slice: asked(LATENCY), at_once: u32::MAX });
        }
        if self.has_latency() && !matches!(tenant.policy, Policy::Fixed(_)) {
            return Some(Slices { slice: asked(SHORTEST), at_once: 1 });
        }
        let sharing: Vec<&Tenant> =
            self.tenants.iter().filter(|other| other.lease == lease || is_working(other)).collect();
        let weights = weights(&sharing);
        let own = sharing.iter().zip(&weights).find(|(other, _)| other.lease == lease)?.1.as_ref()?;
        let with_slices = || sharing.iter().zip(&weights).filter(|(_, weight)| weight.is_some());
        let groups: u32 = with_slices().map(|(other, _)| other.working.clamp(1, MOST_COUNTED)).sum();
        let all: u64 = weights.iter().flatten().sum();
        // Shorten the round until the short turns of such a container are its part of it.
        let stints = with_slices().filter(|(other, _)| other.stint > 0).map(|(other, weight)| {
            let used = u64::from(other.stint) * u64::from(other.working.max(1));
            round_for(used, weight.unwrap_or(0), all)
        });
        let full = groups.saturating_mul(FOR_EACH).min(LONGEST);
        // Keep it long enough that no container loses groups that run at once.
        let room = with_slices().map(|(other, weight)| {
            let (weight, slice) = (weight.unwrap_or(1).max(1), u64::from(SHORTEST + SWITCH));
            let at_once = (u64::from(full) * weight / all.max(1) / slice).min(other.working.into());
            u32::try_from(if at_once > 1 { (at_once * slice * all).div_ceil(weight) } else { 0 })
                .unwrap_or(u32::MAX)
        });
        let round = stints.fold(full, u32::min).max(room.fold(0, u32::max)).min(full);
        let part = u32::try_from(u64::from(round) * own / all.max(1)).unwrap_or(round);
        let at_once = (part / (SHORTEST + SWITCH)).max(1);
        let each = part / tenant.working.clamp(1, at_once);
        // A longer slice than it uses shows when it begins to use all of it.
        let least = SHORTEST.max(tenant.stint.saturating_mul(2));
        Some(Slices { slice: asked(each.saturating_sub(SWITCH).max(least)), at_once })
    }
}

/// Returns the round in which `used` microseconds are the part `weight` of `all`. Other containers pay for the switches of
/// a short round, so it is never so short that they lose more than 8 % of the card.
fn round_for(used: u64, weight: u64, all: u64) -> u32 {
    const SWITCHES: u64 = 400;
    let (weight, others) = (weight.max(1), all.saturating_sub(weight).max(1));
    let least = SWITCHES * 100 * all * all / (others * (100 * weight + 8 * all));
    u32::try_from((used * all / weight).max(least)).unwrap_or(u32::MAX)
}

/// The slice that is asked for to run for so long.
fn asked(runs: u32) -> u32 {
    (runs * 100).div_ceil(RUNS_FOR)
}

/// The weights of containers that share a card's time by slices; `None` for one with a window.
fn weights(sharing: &[&Tenant]) -> Vec<Option<u64>> {
    let each_of_left = each_of_left(sharing);
    let plain = |tenant: &Tenant| match tenant.policy {
        Policy::Burst { ceiling, .. } if ceiling < 100 => None,
        _ => by_share(tenant, each_of_left),
    };
    let others: u64 = sharing.iter().filter_map(|tenant| plain(tenant)).sum();
    let capped: u64 = sharing.iter().filter_map(|tenant| part_of_window(tenant)).sum();
    // Time that is left to the others while all containers with a ceiling run.
    let rest = WHOLE.saturating_sub(capped).max(WHOLE / 20);
    let weight = |tenant: &&Tenant| match part_of_window(tenant) {
        Some(part) => Some(if others > 0 { part * others / rest } else { part }),
        None => plain(tenant),
    };
    sharing.iter().map(weight).collect()
}

/// The weight of each container without a limit.
pub(crate) fn each_of_left(sharing: &[&Tenant]) -> u64 {
    let shares: u32 = sharing.iter().map(|tenant| promised(tenant)).sum();
    let unlimited = sharing.iter().filter(|tenant| tenant.policy == Policy::Unlimited).count();
    let left = 100u32.saturating_sub(shares).max(LEAST_LEFT);
    u64::from(left) * UNIT / u64::try_from(unlimited.max(1)).unwrap_or(1)
}

/// The weight of a container by its share alone; `None` for one that has its time in another way.
pub(crate) fn by_share(tenant: &Tenant, each_of_left: u64) -> Option<u64> {
    match tenant.policy {
        Policy::Burst { share, .. } => Some(u64::from(share) * UNIT),
        Policy::Unlimited => Some(each_of_left),
        Policy::Fixed(_) | Policy::Latency { .. } => None,
    }
}

/// What a container is promised, in per cent.
fn promised(tenant: &Tenant) -> u32 {
    match tenant.policy {
        Policy::Burst { share, .. } => share,
        _ => 0,
    }
}

/// What a container with a ceiling needs of the time in which it may run at all, to come to its share: also a
/// half of what its switches take, since its time begins with another's slice and ends in the middle of one.
fn part_of_window(tenant: &Tenant) -> Option<u64> {
    match tenant.policy {
        Policy::Burst { share, ceiling } if ceiling < 100 => {
            let switches = u64::from(SWITCH) * WHOLE / u64::from(4 * FOR_EACH);
            Some((u64::from(share) * WHOLE / u64::from(ceiling.max(1)) + switches).min(WHOLE))
        }
        _ => None,
    }
}

fn is_working(tenant: &Tenant) -> bool {
    tenant.is_present && tenant.working > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Frame;

    fn burst(lease: i64, share: u32, working: u32) -> Tenant {
        Tenant {
            lease,
            policy: Policy::Burst { share, ceiling: 100 },
            is_present: true,
            working,
            rests: false,
            pays: 0,
            started: 0,
            stay: 0,
            stint: 0,
        }
    }

    fn slices(tenants: &[Tenant]) -> Vec<(u32, u32)> {
        let card = Card { frame: Frame::SHORT, tenants };
        tenants.iter().filter_map(|one| card.slices(one.lease)).map(|one| (one.slice, one.at_once)).collect()
    }

    #[test]
    fn a_round_is_divided_by_shares_and_each_pays_its_own_switches() {
        // 12 ms: 3.6 and 8.4, less a switch.
        assert_eq!(slices(&[burst(1, 30, 1), burst(2, 70, 1)]), [(3349, 5), (8054, 12)]);
        // Two groups of one container share its part; more lengthen the round no further.
        let two = slices(&[burst(1, 30, 1), burst(2, 70, 2)]);
        let eight = slices(&[burst(1, 30, 1), burst(2, 70, 8)]);
        assert_eq!((two[0], eight[0]), ((5113, 7), (5113, 7)));
        assert_eq!(two[1].0, (6300 - 185) * 100 / 102 + 1);
        assert_eq!(eight[1], ((12_600 / 8 - 185) * 100 / 102 + 1, 18));
    }

    #[test]
    fn who_has_more_groups_than_slices_lets_them_take_turns() {
        let slices = slices(&[burst(1, 30, 16), burst(2, 70, 1)]);
        // 30 per cent of 18 ms are seven slices of half a millisecond.
        assert_eq!(slices[0].1, 7);
        let card = Slices { slice: 500, at_once: 7 };
        let mut seen = [0; 16];
        for turn in 0..16 {
            let (first, count) = card.turn(16, turn * TURN).unwrap();
            (first..first + count).for_each(|group| seen[group as usize % 16] += 1);
        }
        assert!(seen.iter().all(|turns| *turns == 7), "{seen:?}");
        assert_eq!(card.turn(7, 5 * TURN), None);
    }

    #[test]
    fn who_does_not_work_takes_nothing_and_who_has_no_limit_what_is_left() {
        let idle = Tenant { working: 0, ..burst(2, 70, 1) };
        assert_eq!(slices(&[burst(1, 30, 1), idle])[0], slices(&[burst(1, 30, 1)])[0]);
        let free = |lease| Tenant { policy: Policy::Unlimited, ..burst(lease, 0, 1) };
        let three = slices(&[burst(1, 60, 1), free(2), free(3)]);
        assert_eq!(three[1], three[2]);
        assert_eq!(three[1].0, (18_000 / 5 - 185) * 100 / 102 + 1);
    }

    #[test]
    fn short_turns_shorten_the_round_within_bounds() {
        let of = |share, stint, working| Tenant { stint, ..burst(1, share, working) };
        let round = |one: Tenant| {
            let other = burst(2, 100 - promised(&one), 1);
            let (slice, _) = slices(&[one, other.clone()])[1];
            (slice * RUNS_FOR / 100 + SWITCH) * 100 / promised(&other)
        };
        for (one, want) in [
            (of(30, 1_000, 1), 3_333),
            // Bounded: the switches cost 8 points.
            (of(2, 10, 1), 4_081),
            (of(30, 5, 1), 1_503),
            (of(30, 100_000, 1), 12_000), // never longer than usual
            (of(30, 10, 4), 9_133),       // four of its groups run at once
        ] {
            let round = round(one);
            assert!(round.abs_diff(want) < 10, "{round}, and not {want}");
        }
    }

    #[test]
    fn within_a_ceiling_the_weight_is_larger() {
        // Half of the time in its window, and half of its switches.
        let capped = Tenant { policy: Policy::Burst { share: 30, ceiling: 60 }, ..burst(1, 0, 1) };
        let both = slices(&[capped, burst(2, 70, 1)]);
        let ran = |one: (u32, u32)| one.0 * RUNS_FOR / 100;
        assert_eq!((ran(both[0]), ran(both[1])), (5_907, 5_722));
    }
}
