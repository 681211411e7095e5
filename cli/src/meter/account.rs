//! One GPU's time and memory by container. Pure computation: clock readings are handed in.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gpushare_quota::{Grant, Lease};
use gpushare_region::Measurement;
use gpushare_request::ComputePolicy;

use super::audit::Held;
use super::burst::{Allowance, Tenant, WHOLE, WINDOWS, allowances};
use super::record::Use;
use super::windows::{Sample, Spent, Windows};
use crate::clock::Clock;

/// A window without any sample counts as idle after this many periods, since drivers hand samples out late.
const SILENCE: u64 = 3;

/// The time and memory of one GPU's containers.
#[derive(Debug)]
pub struct Account {
    windows: Windows,
    /// Whether the driver has answered: without per-process samples nothing is measured.
    counted: bool,
    /// Whether its own record told the time last, and not samples.
    is_by_record: bool,
    /// End of the last window for which use was computed, in microseconds since 1970.
    closed: u64,
    members: BTreeMap<i64, Member>,
    /// GPU time since `closed` of all that have no compute share, in nanoseconds.
    foreign_open: u64,
    foreign: [u32; WINDOWS],
}

/// One container on the GPU.
#[derive(Debug, Default)]
pub struct Member {
    /// Its line in the limits file.
    pub line: usize,
    /// Device memory of its processes, as the driver counts it.
    pub held: Held,
    /// The part of it that the container's books do not explain, in bytes.
    pub unbooked: u64,
    /// Whether the container's limit is lowered by that.
    pub is_withheld: bool,
    /// All its GPU time that was ever measured, in nanoseconds.
    pub own: u64,
    /// How many looks found anybody else on the GPU.
    others: u64,
    /// GPU time since the last closed window, in nanoseconds.
    open: u64,
    /// `None` without a compute limit.
    tenant: Option<Tenant>,
}

impl Account {
    /// An account that begins now, or goes on where the `known` measurements of this GPU's containers end.
    /// `period` is the driver's sampling period in microseconds.
    pub fn new(known: &[Measurement], period: u64, clock: Clock) -> Self {
        let until = known.iter().map(|line| line.until).filter(|until| *until <= clock.monotonic).max();
        let begin = until.filter(|until| *until > 0).map_or(clock.wall_micros(), |until| clock.stamp(until));
        let windows = Windows::since(begin, period);
        Self {
            closed: clock.wall_micros(),
            windows,
            counted: false,
            is_by_record: false,
            members: BTreeMap::new(),
            foreign_open: 0,
            foreign: [0; WINDOWS],
        }
    }

    /// Adds a container, or takes its new figures. One that was measured before goes on from `known`. Only
    /// the container itself could have forged `known`, and only to its own account.
    pub fn admit(&mut self, lease: &Lease, line: usize, grant: &Grant, known: &Measurement, clock: Clock) {
        let believable =
            known.until > 0 && known.until <= clock.monotonic && known.own_nanoseconds <= known.until;
        let was_limited = self.is_limited();
        let member = self.members.entry(lease.id).or_insert_with(|| match believable {
            true => Member { own: known.own_nanoseconds, others: known.others_windows, ..Member::default() },
            false => Member::default(),
        });
        member.line = line;
        let last = member.tenant.take();
        member.tenant = tenant(lease, grant).map(|new| match last {
            Some(last) => Tenant { recent: last.recent, last: last.last, ..new },
            None => new,
        });
        if self.counted && !was_limited && self.is_limited() {
            self.begin_anew(clock.wall_micros());
        }
    }

    /// Leaves out what came before `now`, in microseconds since 1970: use before the first limit, while
    /// nobody asked for samples, is not counted against a limit.
    fn begin_anew(&mut self, now: u64) {
        self.windows = Windows::since(now, self.windows.period());
        self.closed = now;
    }

    /// Removes the containers that `living` does not name.
    pub fn retain(&mut self, living: impl Fn(i64) -> bool) {
        self.members.retain(|lease, _| living(*lease));
    }

    /// Whether a container here has a compute limit. Only then does anybody wait for samples.
    pub fn is_limited(&self) -> bool {
        self.members.values().any(|member| member.tenant.is_some())
    }

    /// The end of what was counted, in microseconds since 1970; `None` while the driver tells no GPU time.
    pub fn counted_until(&self) -> Option<u64> {
        self.counted.then(|| self.windows.newest())
    }

    /// Whether the GPU's own record told the time last.
    pub fn is_by_record(&self) -> bool {
        self.is_by_record
    }

    /// The length of the driver's windows.
    pub fn period(&self) -> Duration {
        Duration::from_micros(self.windows.period())
    }

    /// Whether no container is left.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The stamp to ask NVML from, in microseconds since 1970. If the wall clock is more than 2 s behind the
    /// newest stamp, it was set back. The account then begins anew from now: otherwise no sample would count
    /// until the clock has caught up.
    pub fn ask_from(&mut self, clock: Clock) -> u64 {
        self.follow(clock);
        self.windows.ask_from()
    }

    fn follow(&mut self, clock: Clock) {
        let now = clock.wall_micros();
        if self.windows.newest() > now + 2_000_000 {
            self.begin_anew(now);
        }
    }

    /// Counts the driver's samples. `owner` names the lease of a host pid. Returns whether a window ended.
    pub fn count(
        &mut self,
        samples: Vec<Sample>,
        clock: Clock,
        owner: impl FnMut(u32) -> Option<i64>,
    ) -> bool {
        let spent = self.windows.count(samples);
        self.is_by_record = false;
        self.charge(spent, clock, owner)
    }

    /// Counts time by the GPU's own record, in place of samples.
    pub fn count_record(&mut self, used: Use, clock: Clock, owner: impl FnMut(u32) -> Option<i64>) -> bool {
        self.follow(clock);
        self.windows.reach(used.until);
        self.is_by_record = true;
        self.charge(used.spent, clock, owner)
    }

    fn charge(&mut self, spent: Vec<Spent>, clock: Clock, mut owner: impl FnMut(u32) -> Option<i64>) -> bool {
        self.counted = true;
        let mut spenders = BTreeSet::new();
        for spent in spent {
            let mine = owner(spent.pid).filter(|lease| self.members.contains_key(lease));
            if spent.nanoseconds > 0 {
                spenders.insert(mine);
            }
            if let Some(member) = mine.and_then(|lease| self.members.get_mut(&lease)) {
                member.own = member.own.saturating_add(spent.nanoseconds);
            }
            let limited = mine.and_then(|lease| self.members.get_mut(&lease)).filter(|m| m.tenant.is_some());
            let open = limited.map_or(&mut self.foreign_open, |member| &mut member.open);
            *open = open.saturating_add(spent.nanoseconds);
        }
        for (lease, member) in &mut self.members {
            member.others += u64::from(spenders.iter().any(|spender| *spender != Some(*lease)));
        }
        self.close(clock.wall_micros())
    }

    /// Ends the windows that are over; returns whether one was.
    fn close(&mut self, now: u64) -> bool {
        let (period, newest) = (self.windows.period(), self.windows.newest());
        let before = self.closed;
        // After a suspend, or after the wall clock was set forward, the time before `remembered` counts as
        // idle.
        let remembered = now.saturating_sub((SILENCE + WINDOWS as u64) * period);
        if newest < remembered {
            self.closed = self.closed.max(remembered);
        }
        while self.closed + SILENCE * period < now.max(newest) && newest < self.closed + period / 2 {
            self.end_window(period);
        }
        while newest >= self.closed + period / 2 {
            // A late look finds several windows at once and cannot tell them apart, so they count as one.
            let width = newest - self.closed;
            self.end_window(if width <= SILENCE * period { width } else { width - SILENCE * period });
        }
        self.closed != before
    }

    fn end_window(&mut self, width: u64) {
        self.closed += width;
        // Turns nanoseconds used in `width` microseconds into hundredths of a percent.
        let share = |open: &mut u64| {
            let share =
                u128::from(std::mem::take(open)) * u128::from(WHOLE) / (u128::from(width) * 1000).max(1);
            u32::try_from(share).unwrap_or(u32::MAX).min(2 * WHOLE)
        };
        push(&mut self.foreign, share(&mut self.foreign_open));
        for member in self.members.values_mut() {
            let used = share(&mut member.open);
            if let Some(tenant) = &mut member.tenant {
                push(&mut tenant.recent, used);
            }
        }
    }

    /// Decides anew what each container may use. `held_back` tells whether the container says that it wants
    /// more.
    pub fn decide(&mut self, held_back: impl Fn(i64, usize) -> bool) {
        let mut tenants: Vec<&mut Tenant> = Vec::new();
        for (lease, member) in &mut self.members {
            let line = member.line;
            if let Some(tenant) = &mut member.tenant {
                tenant.held_back = tenant.ceiling > tenant.guarantee && held_back(*lease, line);
                tenants.push(tenant);
            }
        }
        let figures: Vec<Tenant> = tenants.iter().map(|tenant| (**tenant).clone()).collect();
        let next = allowances(&figures, &self.foreign);
        tenants.into_iter().zip(next).for_each(|(tenant, next)| tenant.last = next);
    }

    /// The containers, so that their memory figures can be set.
    pub fn members(&mut self) -> impl Iterator<Item = (i64, &mut Member)> {
        self.members.iter_mut().map(|(lease, member)| (*lease, member))
    }

    /// What is to be published: lease, line and measurement of each container.
    pub fn measurements(&self, clock: Clock) -> impl Iterator<Item = (i64, usize, Measurement)> {
        let until = if self.counted { clock.monotonic_of(self.windows.newest()) } else { 0 };
        self.members.iter().map(move |(lease, member)| {
            let bursting = member.tenant.as_ref().filter(|tenant| tenant.ceiling > tenant.guarantee);
            let value = Measurement {
                burst_share: bursting.filter(|_| self.counted).map_or(0, |tenant| tenant.last.share),
                until,
                own_nanoseconds: member.own,
                others_windows: member.others,
                memory_bytes: member.held.bytes,
                written: clock.monotonic,
                unbooked_bytes: member.unbooked,
                is_withheld: member.is_withheld,
                is_by_record: self.is_by_record,
            };
            (*lease, member.line, value)
        })
    }
}

fn push(recent: &mut [u32; WINDOWS], newest: u32) {
    recent.rotate_right(1);
    recent[0] = newest;
}

fn tenant(lease: &Lease, grant: &Grant) -> Option<Tenant> {
    let cores = grant.cores.filter(|_| lease.compute_policy != ComputePolicy::None)?;
    let guarantee = u32::from(cores.percent()) * 100;
    let bursts = matches!(lease.compute_policy, ComputePolicy::Burst | ComputePolicy::Latency);
    let most = u32::from(lease.ceiling.percent()) * 100;
    let ceiling = if bursts { most.max(guarantee) } else { guarantee };
    (guarantee < WHOLE).then(|| Tenant {
        guarantee,
        ceiling,
        weight: u32::from(lease.priority.level()) + 1,
        last: Allowance { share: guarantee, claim: 0 },
        ..Tenant::default()
    })
}

#[cfg(test)]
mod tests;
