//! Which lease a host process belongs to: told by its cgroup as the kernel shows it, never by anything that a
//! container wrote.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use gpushare_quota::{Holder, Lease, cgroup_of, living_thread};
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};

use super::process::{MOST_KEPT, Process};
use crate::clock::Clock;

/// How long a process that has ended is remembered, since its last sample comes after its end.
const MEMORY: Duration = Duration::from_secs(2);
/// How long a living process is assumed to be in the cgroup in which it was found.
const SETTLED: Duration = Duration::from_secs(5);

/// The lease of a process in this cgroup. The innermost one counts: a container that was started inside
/// another one may have a share of its own.
pub fn innermost(leases: &[Lease], number: i32, cgroup: &Path) -> Option<i64> {
    let members = leases.iter().flat_map(|lease| lease.members().map(|member| (lease.id, &member.holder)));
    let within = members.filter(|(_, holder)| holder.contains(number, cgroup));
    let depth =
        |(_, holder): &(i64, &Holder)| holder.cgroup.as_ref().map_or(0, |path| path.components().count());
    within.max_by_key(depth).map(|(lease, _)| lease)
}

/// Microseconds of the clock by which the kernel tells when a process began.
const TICK: u64 = 10_000;

/// When a process began that the kernel says to have begun so many clock ticks after boot, in microseconds
/// since 1970.
fn began(ticks: u64) -> u64 {
    let boot = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| time.num_microseconds());
    let age = u64::try_from(boot).unwrap_or(0).saturating_sub(ticks * TICK);
    Clock::now().wall_micros().saturating_sub(age)
}

/// The last known leases of processes.
#[derive(Debug, Default)]
pub struct Owners {
    known: HashMap<u32, Known>,
}

#[derive(Debug)]
struct Known {
    lease: i64,
    /// The process as it was found in its cgroup; `None` once it has to be looked up anew.
    process: Option<Process>,
    /// When it began, in microseconds since 1970; 0: not known.
    born: u64,
    found: Instant,
    seen: Instant,
}

impl Owners {
    /// Finds the lease of `pid` while the process lives, since its samples may come after its end.
    pub fn note(&mut self, pid: u32, leases: &[Lease]) {
        if !self.known.contains_key(&pid) {
            self.of(pid, leases);
        }
    }

    /// Whether use of a GPU up to `stamp`, in microseconds since 1970, may be that of the process that has
    /// the pid now, and not of an earlier one.
    pub fn was_there(&mut self, pid: u32, stamp: u64, leases: &[Lease]) -> bool {
        self.note(pid, leases);
        self.known.get(&pid).is_none_or(|known| known.born <= stamp + TICK)
    }

    /// The lease that the process `pid` belongs to.
    pub fn of(&mut self, pid: u32, leases: &[Lease]) -> Option<i64> {
        if let Some(known) = self.known.get_mut(&pid)
            && known.found.elapsed() < SETTLED
            && known.process.as_ref().is_some_and(Process::lives)
        {
            known.seen = Instant::now();
            return Some(known.lease);
        }
        self.look_up(pid, leases)
    }

    fn look_up(&mut self, pid: u32, leases: &[Lease]) -> Option<i64> {
        let number = i32::try_from(pid).ok()?;
        // Opened before the cgroup is read: if the process ends in between, a later one with its pid is not
        // taken for it.
        let process = (self.known.len() < MOST_KEPT).then(|| Process::open(pid)).flatten();
        let number = living_thread(number).unwrap_or(number);
        let Some(cgroup) = cgroup_of(number) else {
            return self.known.get(&pid).map(|known| known.lease);
        };
        let lease = innermost(leases, number, &cgroup);
        let now = Instant::now();
        match lease {
            Some(lease) => {
                let born = process.as_ref().and_then(Process::start_time).map_or(0, began);
                drop(self.known.insert(pid, Known { lease, process, born, found: now, seen: now }));
            }
            None => drop(self.known.remove(&pid)),
        }
        lease
    }

    /// Makes every process be looked up anew, since other containers hold leases now.
    pub fn settle_anew(&mut self) {
        self.known.values_mut().for_each(|known| known.process = None);
    }

    /// Forgets processes that ended some time ago.
    pub fn forget(&mut self) {
        self.known.retain(|_, known| known.seen.elapsed() < MEMORY);
    }
}

#[cfg(test)]
pub use tests::lease as lease_of_this_process;

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::{Command, id};

    use gpushare_quota::{Enforcement, LeaseKey, LeaseState, Member};
    use gpushare_request::{ComputePolicy, Cores, Priority};

    use super::*;

    fn member(container: &str, cgroup: Option<PathBuf>) -> Member {
        Member {
            key: LeaseKey { root: String::new(), container: container.into() },
            state: LeaseState::Active,
            holder: Holder { pid: i32::try_from(id()).unwrap(), start_time: 1, cgroup, leads: false },
            name: None,
            called: gpushare_quota::Called::default(),
            has_driver_limit: false,
        }
    }

    #[test]
    fn a_process_is_its_pods_whichever_container_it_is_of() {
        let elsewhere = Some(PathBuf::from("/sys/fs/cgroup/elsewhere"));
        let pod = Lease { member: member("sidecar", elsewhere.clone()), ..lease() };
        let pod = Lease { others: vec![member("web", lease().member.holder.cgroup)], ..pod };
        assert_eq!(Owners::default().of(id(), std::slice::from_ref(&pod)), Some(7));
        let alone = Lease { others: vec![member("other", elsewhere)], ..pod };
        assert_eq!(Owners::default().of(id(), &[alone]), None);
    }

    /// A lease of all processes in the cgroup of this one.
    pub fn lease() -> Lease {
        let pid = i32::try_from(id()).unwrap();
        Lease {
            id: 7,
            member: member("web", cgroup_of(pid)),
            others: Vec::new(),
            grants: Vec::new(),
            enforcement: Enforcement::Intercepted,
            compute_policy: ComputePolicy::Fixed,
            ceiling: Cores::ALL,
            elastic: None,
            host_memory: gpushare_inventory::DeviceMemory::ZERO,
            priority: Priority::default(),
            granted_at: 0,
            restated: std::collections::BTreeMap::new(),
            shrunk_from: Vec::new(),
        }
    }

    #[test]
    fn what_was_used_before_a_process_began_is_not_its_own() {
        let leases = [lease()];
        let mut owners = Owners::default();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let now = Clock::now().wall_micros();
        assert!(owners.was_there(child.id(), now + 1_000_000, &leases));
        assert!(!owners.was_there(child.id(), now - 1_000_000, &leases));
        assert!(owners.was_there(id(), now, &leases) && owners.was_there(0, 0, &leases));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_was_noted_while_it_lived_is_known_after_its_end() {
        let leases = [lease()];
        for (noted, want) in [(false, None), (true, Some(7))] {
            let mut owners = Owners::default();
            let mut child = Command::new("sleep").arg("60").spawn().unwrap();
            if noted {
                owners.note(child.id(), &leases);
            }
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(owners.of(child.id(), &leases), want, "noted: {noted}");
        }
    }
}
