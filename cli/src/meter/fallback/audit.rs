//! Device memory beyond a container's books or limit, and GPU time beyond its share.

use std::collections::HashMap;

use gpushare_inventory::DeviceMemory;
use gpushare_quota::{Enforcement, Lease};
use gpushare_request::ComputePolicy;

use crate::meter::account::Held;

/// How many looks in a row must find memory beyond the books. The driver and the container note an allocation
/// at different instants.
const LOOKS: u32 = 3;

/// GPU time beyond a share that is never reported, in nanoseconds, in addition to sampling noise. A running
/// kernel is never cut off; its container waits afterwards.
const MOST_EXCESS: u64 = 1_500_000_000;

/// Tolerance in percent of the earned time. The libraries time kernels and cannot see their own error:
/// training had 34.5 of 30 % on an H200, and kernels of 200 ms had 36.8 of 30 % on a simulated one.
const TOLERANCE: u64 = 25;

/// Length of one driver sample, in nanoseconds. While several programs work, a sample attributes all of it to
/// one of them: of 16 samples, an H200 gave 6 and 10 to two equally busy programs.
const SAMPLE: u128 = 200_000_000;

/// Number of standard deviations that count as noise. One honest container in a thousand million exceeds six.
const DEVIATIONS: u64 = 6;

/// GPU time that a share did not earn. It grows by what is used and shrinks by what is earned, never below 0.
#[derive(Debug)]
struct Excess {
    used: u64,
    at: u64,
    nanoseconds: u64,
    /// When it last was 0.
    since: u64,
}

impl Excess {
    /// The part that sampling noise explains. Each sample is all or nothing; a share of one half has the
    /// largest variance.
    fn noise(&self) -> u64 {
        let length = u128::from(self.at.saturating_sub(self.since));
        let deviation = u64::try_from((length * SAMPLE / 4).isqrt()).unwrap_or(u64::MAX);
        DEVIATIONS.saturating_mul(deviation)
    }
}

/// The most compute that `lease` may use on the GPU of grant `line`, in percent; `None` without a limit.
fn most_percent(lease: &Lease, line: usize) -> Option<u8> {
    let cores = lease.grants.get(line)?.cores.filter(|_| lease.enforcement.terms().shares_time)?;
    match lease.compute_policy {
        ComputePolicy::Fixed => Some(cores.percent()),
        ComputePolicy::Burst | ComputePolicy::Latency => Some(lease.ceiling.max(cores).percent()),
        ComputePolicy::None => None,
    }
    .filter(|percent| *percent < 100)
}

/// How many looks in a row must fail to read the books: those of a container that is being created come in
/// steps.
const UNREAD_LOOKS: u32 = 2;

/// What earlier looks found.
#[derive(Debug, Default)]
pub struct Audit {
    /// By lease and line: how many looks in a row could not read the books.
    unread: HashMap<(i64, usize), u32>,
    /// By lease and line: how many looks in a row found memory beyond the books.
    unbooked: HashMap<(i64, usize), u32>,
    /// By lease and line: bytes that may be held. A limit that shrank takes nothing away.
    allowed: HashMap<(i64, usize), u64>,
    /// By lease and line: GPU time beyond the share.
    excess: HashMap<(i64, usize), Excess>,
}

impl Audit {
    /// Whether the books of one line have been unreadable for long enough, after a look that `fails` to read
    /// them or does not.
    pub fn is_unread(&mut self, lease: i64, line: usize, fails: bool) -> bool {
        let looks = self.unread.entry((lease, line)).or_default();
        *looks = if fails { looks.saturating_add(1) } else { 0 };
        *looks >= UNREAD_LOOKS
    }

    /// Compares the driver's figures for one line with the bytes that are booked for it, by the container's
    /// libraries or by its supervisors. Returns the bytes that the books do not explain, once enough looks in
    /// a row have found some, else 0.
    pub fn compare(
        &mut self,
        lease: &Lease,
        line: usize,
        held: &Held,
        booked: u64,
        tolerance: DeviceMemory,
    ) -> u64 {
        let Some(grant) = lease.grants.get(line) else { return 0 };
        let limit = grant.memory.bytes();
        let most = lease.most_memory(line).bytes().max(limit);
        let allowed = self.allowed.entry((lease.id, line)).or_insert(most);
        // What is booked may be on its way to the card; it comes down with the books.
        *allowed = booked.min(*allowed).max(held.bytes.min(*allowed)).max(limit);
        let allowed = DeviceMemory::from_bytes(*allowed);
        // Another system's library keeps books of its own: what is within the grant is explained.
        let booked = if lease.enforcement == Enforcement::Foreign { allowed.bytes() } else { booked };
        let looks = self.unbooked.entry((lease.id, line)).or_default();
        let Some(bytes) = unbooked(held, booked, allowed, tolerance) else {
            *looks = 0;
            return 0;
        };
        *looks = looks.saturating_add(1);
        if *looks < LOOKS { 0 } else { bytes }
    }

    /// Whether the memory of one line, as the last comparison found it, is beyond the limit and not only
    /// beyond the books. A process that ended without freeing its memory, while a child keeps its files, is
    /// only beyond the books.
    pub fn is_beyond_limit(&self, lease: i64, line: usize, held: &Held, tolerance: DeviceMemory) -> bool {
        let allowed = self.allowed.get(&(lease, line)).copied().unwrap_or(0);
        held.bytes.saturating_sub(allowed) > slack(held, DeviceMemory::from_bytes(allowed), tolerance)
    }

    /// Returns the GPU time beyond the share of one line, in nanoseconds, once a running kernel and sampling
    /// noise do not explain it. `used` is the container's total GPU time until `now`; both are in
    /// nanoseconds.
    pub fn excess(&mut self, lease: &Lease, line: usize, used: u64, now: u64) -> Option<u64> {
        let percent = most_percent(lease, line)?;
        let begin = Excess { used, at: now, nanoseconds: 0, since: now };
        let excess = self.excess.entry((lease.id, line)).or_insert(begin);
        let earned = now.saturating_sub(excess.at) / 10_000 * u64::from(percent) * (100 + TOLERANCE);
        excess.nanoseconds = (excess.nanoseconds + used.saturating_sub(excess.used)).saturating_sub(earned);
        (excess.used, excess.at) = (used, now);
        if excess.nanoseconds == 0 {
            excess.since = now;
        }
        (excess.nanoseconds > MOST_EXCESS.saturating_add(excess.noise())).then_some(excess.nanoseconds)
    }

    /// Forgets leases that ended.
    pub fn retain(&mut self, living: impl Fn(i64) -> bool) {
        self.unread.retain(|(lease, _), _| living(*lease));
        self.unbooked.retain(|(lease, _), _| living(*lease));
        self.allowed.retain(|(lease, _), _| living(*lease));
        self.excess.retain(|(lease, _), _| living(*lease));
    }
}

/// Device memory in bytes beyond the books, if it is more than a slack; `None` when all is explained. Books
/// that claim more than the limit explain only the limit, since the container writes them.
fn unbooked(held: &Held, booked: u64, limit: DeviceMemory, tolerance: DeviceMemory) -> Option<u64> {
    let beyond = held.bytes.saturating_sub(booked.min(limit.bytes()));
    (beyond > slack(held, limit, tolerance)).then_some(beyond)
}

/// What modules, stacks and the context itself take differs by GPU and driver, so each process has
/// `tolerance`. All together have at most a quarter of the limit, or one tolerance if that is more, since a
/// tenant can start any number of processes.
fn slack(held: &Held, limit: DeviceMemory, tolerance: DeviceMemory) -> u64 {
    let most = tolerance.bytes().max(limit.bytes() / 4);
    tolerance.bytes().saturating_mul(u64::from(held.processes)).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn books_are_unread_after_a_second_look_alone() {
        let mut audit = Audit::default();
        let looks = [true, false, true, true, true, false].map(|fails| audit.is_unread(1, 0, fails));
        assert_eq!(looks, [false, false, false, true, true, false]);
        assert!(!audit.is_unread(1, 1, true), "each line by itself");
    }

    #[test]
    fn where_another_systems_library_keeps_the_books_only_the_grant_explains_memory() {
        use gpushare_inventory::GpuUuid;
        use gpushare_quota::{Grant, Holder, LeaseKey, Member};
        use gpushare_request::{Devices, Request};

        let key = LeaseKey { root: String::new(), container: "web".to_owned() };
        let holder = Holder { pid: 1, start_time: 1, cgroup: None, leads: false };
        let gib = |count: u64| DeviceMemory::from_bytes(count << 30);
        let grant = Grant { gpu: GpuUuid::from_bytes([1; 16]), card: None, memory: gib(4), cores: None };
        let lease = Lease::new(Member::reserved(key, holder), &Request::whole(Devices::Any(1)), vec![grant]);
        for (enforcement, held, want) in [
            (Enforcement::Intercepted, 3, 3),
            (Enforcement::Supervised, 3, 3),
            (Enforcement::Foreign, 3, 0),
            (Enforcement::Foreign, 6, 2),
        ] {
            let (lease, mut audit) = (Lease { enforcement, ..lease.clone() }, Audit::default());
            let held = Held { bytes: gib(held).bytes(), processes: 1 };
            let compare = || audit.compare(&lease, 0, &held, 0, gib(1));
            let last = std::iter::repeat_with(compare).nth(LOOKS as usize);
            assert_eq!(audit.is_beyond_limit(lease.id, 0, &held, gib(1)), held.bytes > gib(5).bytes());
            assert_eq!(last.map(DeviceMemory::from_bytes), Some(gib(want)), "{enforcement:?}, {held:?}");
        }
    }

    #[test]
    fn what_was_allowed_when_it_was_taken_is_no_violation_and_comes_back_for_nobody() {
        use gpushare_inventory::GpuUuid;
        use gpushare_quota::{Grant, Holder, LeaseKey, Member};
        use gpushare_request::{Devices, Request};

        let key = LeaseKey { root: String::new(), container: "web".to_owned() };
        let holder = Holder { pid: 1, start_time: 1, cgroup: None, leads: false };
        let gib = |count: u64| DeviceMemory::from_bytes(count << 30);
        let grant = |memory| Grant {
            gpu: GpuUuid::from_bytes([1; 16]),
            card: None,
            memory: gib(memory),
            cores: None,
        };
        let lease = |memory| {
            let request = Request::whole(Devices::Any(1));
            let lease =
                Lease::new(Member::reserved(key.clone(), holder.clone()), &request, vec![grant(memory)]);
            Lease { enforcement: Enforcement::Intercepted, ..lease }
        };
        let shrunk = Lease { shrunk_from: vec![gib(8)], ..lease(1) };
        // A meter that saw the limit shrink, and one that starts anew beside it.
        for mut audit in [Audit::default(), Audit::default()] {
            let mut beyond = |lease: &Lease, held, booked| {
                let held = Held { bytes: gib(held).bytes(), processes: 1 };
                let looks = (0..LOOKS).map(|_| audit.compare(lease, 0, &held, gib(booked).bytes(), gib(0)));
                looks.last().unwrap() >> 30
            };
            assert_eq!(beyond(&lease(8), 6, 6), 0);
            assert_eq!(beyond(&shrunk, 6, 6), 0, "it keeps what it has");
            assert_eq!(beyond(&shrunk, 6, 2), 4, "but not in place of what it gave back");
            assert_eq!(beyond(&shrunk, 3, 3), 0);
            assert_eq!(beyond(&shrunk, 5, 5), 2, "and takes no more");
            assert_eq!(beyond(&lease(8), 7, 7), 0, "until the limit grows");
        }
        let mut anew = Audit::default();
        let held = |gibs| Held { bytes: gib(gibs).bytes(), processes: 1 };
        let mut look = |gibs, booked| anew.compare(&shrunk, 0, &held(gibs), gib(booked).bytes(), gib(0));
        assert_eq!([look(6, 6), look(6, 6), look(6, 6)], [0; 3]);
        assert_ne!([look(9, 9), look(9, 9), look(9, 9)][2], 0, "more than was ever granted");
    }

    /// A `fixed` share of `percent`.
    fn fixed(percent: u8) -> Lease {
        use gpushare_inventory::GpuUuid;
        use gpushare_quota::{Grant, Holder, LeaseKey, Member};
        use gpushare_request::{Cores, Devices, Request};

        let key = LeaseKey { root: String::new(), container: "web".to_owned() };
        let holder = Holder { pid: 1, start_time: 1, cgroup: None, leads: false };
        let cores = Cores::try_from(percent).ok();
        let memory = DeviceMemory::from_bytes(1 << 30);
        let grant = Grant { gpu: GpuUuid::from_bytes([1; 16]), card: None, memory, cores };
        let lease = Lease::new(Member::reserved(key, holder), &Request::whole(Devices::Any(1)), vec![grant]);
        Lease { enforcement: Enforcement::Intercepted, compute_policy: ComputePolicy::Fixed, ..lease }
    }

    /// Returns the second in which a container with this share is reported that uses `per_mille` of the GPU
    /// while its neighbours are busy; `None` if that takes more than a day. Each sample names one process.
    fn reported_after(percent: u8, per_mille: u64, seed: u64) -> Option<u64> {
        const DAY: u64 = 86_400 * 5;
        let (lease, mut audit) = (fixed(percent), Audit::default());
        let (mut used, mut random) = (0, seed);
        (0..DAY).find_map(|sample| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let is_own = (random >> 33) % 1000 < per_mille;
            used += if is_own { 200_000_000 } else { 0 };
            audit.excess(&lease, 0, used, (sample + 1) * 200_000_000).map(|_| sample / 5)
        })
    }

    #[test]
    fn sampling_noise_accuses_no_honest_container_and_hides_no_cheat() {
        for percent in [10, 30, 60] {
            for seed in 1..=10 {
                // 20 % more than the share, which is within the measured error of the libraries.
                let honest = u64::from(percent) * 12;
                assert_eq!(reported_after(percent, honest, seed), None, "{percent} % with seed {seed}");
            }
        }
        for (percent, uses, seconds) in [(10, 990, 8), (30, 990, 12), (30, 600, 60), (60, 990, 60)] {
            let worst = (1..=10).filter_map(|seed| reported_after(percent, uses, seed)).max();
            assert!(worst.is_some_and(|worst| worst <= seconds), "{percent} %: {worst:?}");
        }
    }

    #[test]
    fn memory_beyond_books_limit_and_tolerance_is_not_explained() {
        const MIB: u64 = 1 << 20;
        for (bytes, processes, booked, want) in [
            (0, 0, 0, None),
            (900 * MIB, 1, 500 * MIB, None),
            (1012 * MIB, 1, 500 * MIB, None),
            (1013 * MIB, 1, 500 * MIB, Some(513 * MIB)),
            (1013 * MIB, 100, 500 * MIB, Some(513 * MIB)), // idle processes buy nothing
            (4000 * MIB, 1, 0, Some(4000 * MIB)),
            (100 * MIB, 1, u64::MAX, None),
            (3000 * MIB, 1, u64::MAX, Some(1000 * MIB)),
            (u64::MAX, u32::MAX, 0, Some(u64::MAX)),
        ] {
            let limit = DeviceMemory::from_bytes(2000 * MIB);
            let tolerance = DeviceMemory::from_bytes(512 * MIB);
            let got = unbooked(&Held { bytes, processes }, booked, limit, tolerance);
            assert_eq!(got, want, "{bytes} bytes in {processes} processes, {booked} booked");
        }
    }
}
