//! How the idle time of one GPU is given to the containers that may burst. Pure computation, once per
//! sampling window.
//!
//! Each container has a claim: what it used lately and a margin, or everything while it wants more than it
//! gets. Claims up to the guarantees are set aside. What is left goes, by weight, to those who want more.
//! What is left then is head-room for each active container that may burst. A container that comes back finds
//! its guarantee set aside after its first window, because a claim jumps where a full GPU may hide what is
//! wanted.

/// One GPU's whole time, in hundredths of a percent.
pub const WHOLE: u32 = 10_000;
/// For how many windows a container's use is remembered: about a second, so that a container with pulses
/// keeps what it needs.
pub const WINDOWS: usize = 6;
/// A container that used nothing in this many windows is gone: what was kept for it is idle.
const GONE: usize = 3;
/// Above this sum of use, a container's use no longer tells what it wants.
const FULL: u32 = 9_500;
/// Bounds of the margin over what a container used. The driver's whole percents vary by one.
const MARGIN: std::ops::RangeInclusive<u32> = 100..=300;

/// A container on one GPU, as the meter sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenant {
    /// The share that is its own, at most [`WHOLE`].
    pub guarantee: u32,
    /// The most that it may use; its guarantee unless it may burst.
    pub ceiling: u32,
    /// Its weight, above 0, when idle time is divided among those who want more.
    pub weight: u32,
    /// What it used in the last windows, newest first.
    pub recent: [u32; WINDOWS],
    /// Whether it says that launches were held back lately. It can say what it likes, so this counts only if
    /// its use bears it out, and only for idle time.
    pub held_back: bool,
    /// What was decided after the last window.
    pub last: Allowance,
}

/// What a container may use, and what is kept for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowance {
    /// Its share for now: the guarantee and what it is given of idle time.
    pub share: u32,
    /// What it is assumed to want.
    pub claim: u32,
}

/// The next window's allowances. `foreign` is the use of everybody without a compute share, newest first. It
/// cannot be held back, so only what it leaves can be given.
pub fn allowances(tenants: &[Tenant], foreign: &[u32; WINDOWS]) -> Vec<Allowance> {
    let used: u32 = tenants.iter().map(|tenant| tenant.recent[0]).fold(foreign[0], u32::saturating_add);
    let claims: Vec<u32> = tenants.iter().map(|tenant| claim(tenant, used >= FULL)).collect();
    let wanted = || tenants.iter().zip(&claims);
    // The part of its claim that each gets for certain.
    let kept: Vec<u32> = wanted().map(|(tenant, claim)| tenant.guarantee.min(*claim)).collect();
    let spoken_for = kept.iter().fold(peak(foreign), |sum, kept| sum.saturating_add(*kept));
    let mut idle = WHOLE.saturating_sub(spoken_for);

    let more: Vec<u32> =
        wanted().zip(&kept).map(|((tenant, claim), kept)| (*claim).min(tenant.ceiling) - kept).collect();
    let weights: Vec<u32> = tenants.iter().map(|tenant| tenant.weight).collect();
    let extra = fill(idle, &more, &weights);
    idle -= extra.iter().sum::<u32>();

    let given: Vec<u32> = kept.iter().zip(&extra).map(|(kept, extra)| kept + extra).collect();
    let room: Vec<u32> = wanted()
        .zip(&given)
        .map(|((tenant, claim), given)| if *claim > 0 { tenant.ceiling.saturating_sub(*given) } else { 0 })
        .collect();
    let room = fill(idle, &room, &weights);

    let share = |index: usize| tenants[index].guarantee.max(given[index] + room[index]);
    (0..tenants.len()).map(|index| Allowance { share: share(index), claim: claims[index] }).collect()
}

/// What the container is assumed to want, at most [`WHOLE`].
fn claim(tenant: &Tenant, full: bool) -> u32 {
    let (now, last) = (tenant.recent[0], tenant.last);
    let share = last.share.max(tenant.guarantee);
    // It wants more if it was held back and uses most of what it has, or if it uses all of it, whatever it
    // says.
    let wants_more = (tenant.held_back && now * 10 >= share * 6) || now * 100 >= share * 98;
    if wants_more && now > 0 {
        return WHOLE;
    }
    let peak = peak(&tenant.recent);
    let margin = (peak / 8).clamp(*MARGIN.start(), *MARGIN.end());
    // On a full GPU it reaches what was kept for it, or comes back from nothing. It may want far more.
    if full && now > 0 && now + margin / 3 >= last.claim {
        return (4 * now + WHOLE / 10).min(WHOLE);
    }
    if peak == 0 { 0 } else { (peak + margin).min(WHOLE) }
}

fn peak(recent: &[u32; WINDOWS]) -> u32 {
    if recent[..GONE].iter().all(|used| *used == 0) {
        return 0;
    }
    recent.iter().copied().max().unwrap_or(0).min(WHOLE)
}

/// Gives away at most `amount`: to each no more than it wants, and otherwise in proportion to the weights.
fn fill(amount: u32, wants: &[u32], weights: &[u32]) -> Vec<u32> {
    let mut given = vec![0; wants.len()];
    let mut left = u64::from(amount);
    loop {
        let open = || (0..wants.len()).filter(|index| given[*index] < wants[*index]);
        let weight: u64 = open().map(|index| u64::from(weights[index])).sum();
        if left == 0 || weight == 0 {
            return given;
        }
        let part = |index: usize| {
            let part = left * u64::from(weights[index]) / weight;
            part.min(u64::from(wants[index] - given[index]))
        };
        let parts: Vec<(usize, u32)> =
            open().map(|index| (index, u32::try_from(part(index)).unwrap_or(0))).collect();
        let sum: u32 = parts.iter().map(|(_, part)| part).sum();
        // Each part is less than one unit: a rounding error that can be lost.
        if sum == 0 {
            return given;
        }
        parts.into_iter().for_each(|(index, part)| given[index] += part);
        left -= u64::from(sum);
    }
}

#[cfg(test)]
mod tests;
