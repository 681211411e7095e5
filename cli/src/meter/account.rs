//! One GPU's time and memory by container. Pure computation: clock readings are handed in.

use std::collections::BTreeMap;

use gpushare_region::Measurement;

use super::record::Use;
use super::windows::{Sample, Spent, Windows};
use crate::clock::Clock;

/// What the driver counts of a container on one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Device memory in bytes.
    pub bytes: u64,
    /// How many processes hold it.
    pub processes: u32,
}

/// The time and memory of one GPU's containers.
#[derive(Debug)]
pub struct Account {
    windows: Windows,
    /// Whether the driver has answered: without per-process samples nothing is measured.
    counted: bool,
    /// Whether its own record told the time last, and not samples.
    is_by_record: bool,
    members: BTreeMap<i64, Member>,
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
    /// All its GPU time that was ever measured, in nanoseconds.
    pub own: u64,
}

impl Account {
    /// An account that begins now, or goes on where the `known` measurements of this GPU's containers end.
    /// `period` is the driver's sampling period in microseconds.
    pub fn new(known: &[Measurement], period: u64, clock: Clock) -> Self {
        let until = known.iter().map(|line| line.until).filter(|until| *until <= clock.monotonic).max();
        let begin = until.filter(|until| *until > 0).map_or(clock.wall_micros(), |until| clock.stamp(until));
        let windows = Windows::since(begin, period);
        Self { windows, counted: false, is_by_record: false, members: BTreeMap::new() }
    }

    /// Adds a container, or takes its new line. One that was measured before goes on from `known`. Only the
    /// container itself could have forged `known`, and only to its own account.
    pub fn admit(&mut self, lease: i64, line: usize, known: &Measurement, clock: Clock) {
        let believable =
            known.until > 0 && known.until <= clock.monotonic && known.own_nanoseconds <= known.until;
        let own = if believable { known.own_nanoseconds } else { 0 };
        self.members.entry(lease).or_insert_with(|| Member { own, ..Member::default() }).line = line;
    }

    /// Removes the containers that `living` does not name.
    pub fn retain(&mut self, living: impl Fn(i64) -> bool) {
        self.members.retain(|lease, _| living(*lease));
    }

    /// The end of what was counted, in microseconds since 1970; `None` while the driver tells no GPU time.
    pub fn counted_until(&self) -> Option<u64> {
        self.counted.then(|| self.windows.newest())
    }

    /// Whether the GPU's own record told the time last.
    pub fn is_by_record(&self) -> bool {
        self.is_by_record
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
            self.windows = Windows::since(now, self.windows.period());
        }
    }

    /// Counts the driver's samples. `owner` names the lease of a host pid.
    pub fn count(&mut self, samples: Vec<Sample>, owner: impl FnMut(u32) -> Option<i64>) {
        let spent = self.windows.count(samples);
        self.is_by_record = false;
        self.charge(spent, owner);
    }

    /// Counts time by the GPU's own record, in place of samples.
    pub fn count_record(&mut self, used: Use, clock: Clock, owner: impl FnMut(u32) -> Option<i64>) {
        self.follow(clock);
        self.windows.reach(used.until);
        self.is_by_record = true;
        self.charge(used.spent, owner);
    }

    fn charge(&mut self, spent: Vec<Spent>, mut owner: impl FnMut(u32) -> Option<i64>) {
        self.counted = true;
        for spent in spent {
            if let Some(member) = owner(spent.pid).and_then(|lease| self.members.get_mut(&lease)) {
                member.own = member.own.saturating_add(spent.nanoseconds);
            }
        }
    }

    /// The containers, so that their memory figures can be set.
    pub fn members(&mut self) -> impl Iterator<Item = (i64, &mut Member)> {
        self.members.iter_mut().map(|(lease, member)| (*lease, member))
    }

    /// What is to be published: lease, line and measurement of each container.
    pub fn measurements(&self, clock: Clock) -> impl Iterator<Item = (i64, usize, Measurement)> {
        let until = if self.counted { clock.monotonic_of(self.windows.newest()) } else { 0 };
        self.members.iter().map(move |(lease, member)| {
            let value = Measurement {
                until,
                own_nanoseconds: member.own,
                memory_bytes: member.held.bytes,
                written: clock.monotonic,
                unbooked_bytes: member.unbooked,
                is_by_record: self.is_by_record,
            };
            (*lease, member.line, value)
        })
    }
}

#[cfg(test)]
mod tests;
