//! Computes how long the channel groups of containers without a window run at a time.
//!
//! The card gives each group its slice in turn. A container's part of a round is proportional to its share,
//! however many groups it has. It pays for the switches to its own groups.

use crate::{Card, Policy, Tenant};

/// Microseconds of a round for each working group.
const FOR_EACH: u32 = 6_000;
/// Most groups of one container that lengthen the round. Without a bound, its neighbours would wait for all
/// of them.
const MOST_COUNTED: u32 = 2;
/// The longest round.
const LONGEST: u32 = 30_000;
/// GPU time that a switch to another group takes.
const SWITCH: u32 = 185;
/// The shortest slice.
const SHORTEST: u32 = 500;
/// The slice of a latency container.
const LATENCY: u32 = 6_000;
/// A requested slice of 100 really runs for this long.
const RUNS_FOR: u32 = 102;
/// Interval after which a container's other groups get their turn, if not all can run at once.
const TURN: u64 = 100_000;
/// Per cent that containers without a limit share at least.
const LEAST_LEFT: u32 = 5;
/// One per cent as a weight.
const UNIT: u64 = 1_000;
/// 100 per cent as a weight.
const WHOLE: u64 = 100 * UNIT;

/// The slices of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// The slice to request for each of its groups, in microseconds.
    pub slice: u32,
    /// How many of its working groups run at a time. The others are stopped.
    pub at_once: u32,
}

impl Slices {
    /// Returns which of `groups` working groups run now: the first one, and how many from there, wrapping
    /// around. Returns `None` if all can run at once.
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
    /// Scales the slices to one supervisor's `groups` of the container's `working` groups.
    pub(crate) fn part(self, groups: u32, working: u32) -> Self {
        let at_once = u64::from(self.at_once) * u64::from(groups) / u64::from(working.max(1));
        Self { at_once: u32::try_from(at_once).unwrap_or(u32::MAX).max(1), ..self }
    }

    /// Returns the start of the next turn.
    pub(crate) fn next_turn(now: u64) -> u64 {
        (now / TURN + 1) * TURN
    }
}

impl Card<'_> {
    /// Returns the slices of this lease's container. Returns `None` if it has a window or is absent.
    pub fn slices(&self, lease: i64) -> Option<Slices> {
        let tenant = self.tenant(lease)?;
        if let Policy::Latency { .. } = tenant.policy {
            // A request completes within one slice, and an idle container gives its slice away.
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
        // Shorten the round until the short turns of such a container make up its part.
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
        // A slice longer than the stint shows when the container begins to use all of it.
        let least = SHORTEST.max(tenant.stint.saturating_mul(2));
        Some(Slices { slice: asked(each.saturating_sub(SWITCH).max(least)), at_once })
    }
}

/// Returns the round in which `used` microseconds are the part `weight` of `all`. Other containers pay for
/// the switches of a short round, so it is never so short that they lose more than 8 % of the card.
fn round_for(used: u64, weight: u64, all: u64) -> u32 {
    const SWITCHES: u64 = 400;
    let (weight, others) = (weight.max(1), all.saturating_sub(weight).max(1));
    let least = SWITCHES * 100 * all * all / (others * (100 * weight + 8 * all));
    u32::try_from((used * all / weight).max(least)).unwrap_or(u32::MAX)
}

/// Returns the slice to request so that a group runs for `runs` microseconds.
fn asked(runs: u32) -> u32 {
    (runs * 100).div_ceil(RUNS_FOR)
}

/// Returns the weights of containers that share a card's time by slices; `None` for one with a window.
fn weights(sharing: &[&Tenant]) -> Vec<Option<u64>> {
    let each_of_left = each_of_left(sharing);
    let plain = |tenant: &Tenant| match tenant.policy {
        Policy::Burst { ceiling, .. } if ceiling < 100 => None,
        _ => by_share(tenant, each_of_left),
    };
    let others: u64 = sharing.iter().filter_map(|tenant| plain(tenant)).sum();
    let capped: u64 = sharing.iter().filter_map(|tenant| part_of_window(tenant)).sum();
    // Time left to the others while all containers with a ceiling run.
    let rest = WHOLE.saturating_sub(capped).max(WHOLE / 20);
    let weight = |tenant: &&Tenant| match part_of_window(tenant) {
        Some(part) => Some(if others > 0 { part * others / rest } else { part }),
        None => plain(tenant),
    };
    sharing.iter().map(weight).collect()
}

/// Returns the weight of each container without a limit.
pub(crate) fn each_of_left(sharing: &[&Tenant]) -> u64 {
    let shares: u32 = sharing.iter().map(|tenant| promised(tenant)).sum();
    let unlimited = sharing.iter().filter(|tenant| tenant.policy == Policy::Unlimited).count();
    let left = 100u32.saturating_sub(shares).max(LEAST_LEFT);
    u64::from(left) * UNIT / u64::try_from(unlimited.max(1)).unwrap_or(1)
}

/// Returns a container's weight by its share alone; `None` if it does not share by weight.
pub(crate) fn by_share(tenant: &Tenant, each_of_left: u64) -> Option<u64> {
    match tenant.policy {
        Policy::Burst { share, .. } => Some(u64::from(share) * UNIT),
        Policy::Unlimited => Some(each_of_left),
        Policy::Fixed(_) | Policy::Latency { .. } => None,
    }
}

/// Returns a container's guaranteed share, in per cent.
fn promised(tenant: &Tenant) -> u32 {
    match tenant.policy {
        Policy::Burst { share, .. } => share,
        _ => 0,
    }
}

/// Returns the part of its allowed time that a container with a ceiling needs to reach its share. The part
/// includes half of what its switches take, because its time begins with another container's slice and ends
/// in the middle of one.
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
        Tenant::new(lease, Policy::Burst { share, ceiling: 100 }, working)
    }

    fn slices(tenants: &[Tenant]) -> Vec<(u32, u32)> {
        let card = Card { frame: Frame::SHORT, tenants };
        tenants.iter().filter_map(|one| card.slices(one.lease)).map(|one| (one.slice, one.at_once)).collect()
    }

    #[test]
    fn a_round_is_divided_by_shares_and_each_pays_its_own_switches() {
        // 12 ms: 3.6 and 8.4, minus a switch each.
        assert_eq!(slices(&[burst(1, 30, 1), burst(2, 70, 1)]), [(3349, 5), (8054, 12)]);
        // Two groups of one container split its part. More groups do not lengthen the round further.
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
        let tenant = |share, stint, working| Tenant { stint, ..burst(1, share, working) };
        let round = |one: Tenant| {
            let other = burst(2, 100 - promised(&one), 1);
            let (slice, _) = slices(&[one, other.clone()])[1];
            (slice * RUNS_FOR / 100 + SWITCH) * 100 / promised(&other)
        };
        for (one, want) in [
            (tenant(30, 1_000, 1), 3_333),
            // The bound applies: switches cost 8 points.
            (tenant(2, 10, 1), 4_081),
            (tenant(30, 5, 1), 1_503),
            (tenant(30, 100_000, 1), 12_000), // never longer than usual
            (tenant(30, 10, 4), 9_133),       // four of its groups run at once
        ] {
            let round = round(one);
            assert!(round.abs_diff(want) < 10, "{round}, and not {want}");
        }
    }

    #[test]
    fn within_a_ceiling_the_weight_is_larger() {
        // It needs half of the time in its window, plus half of its switches.
        let capped = Tenant { policy: Policy::Burst { share: 30, ceiling: 60 }, ..burst(1, 0, 1) };
        let both = slices(&[capped, burst(2, 70, 1)]);
        let ran = |one: (u32, u32)| one.0 * RUNS_FOR / 100;
        assert_eq!((ran(both[0]), ran(both[1])), (5_907, 5_722));
    }
}
