//! Owners of the processes that the driver lists for a GPU.
//!
//! The driver identifies processes by pid alone. It may keep a process in its list after its end, as long as
//! another process holds its files. A new process may have the pid by then, and must not be blamed for the
//! old one.

use std::collections::{HashMap, HashSet};

use gpushare_quota::Lease;

use super::owner::Owners;
use super::process::Process;

/// How many looks in a row must find an ended process in the list. It stays there for a moment after its end.
const LOOKS: u32 = 3;

/// The processes in a GPU's list.
#[derive(Debug, Default)]
pub struct Listed {
    /// Each as it was when its pid appeared there; `None` if it had already ended.
    processes: HashMap<u32, Option<Process>>,
    /// In how many looks an ended process of no known lease had memory.
    orphans: HashMap<u32, u32>,
}

impl Listed {
    /// Updates the list. A short process may end before its first sample arrives, so its owner is looked up
    /// here.
    pub fn note(&mut self, pids: &HashSet<u32>, owners: &mut Owners, leases: &[Lease]) {
        self.processes.retain(|pid, _| pids.contains(pid));
        self.orphans.retain(|pid, _| pids.contains(pid));
        for pid in pids {
            owners.note(*pid, leases);
            self.processes.entry(*pid).or_insert_with(|| Process::open(*pid));
        }
    }

    /// Whether the pid still belongs to the listed process. A pid that is not in the list does.
    pub fn is_current(&self, pid: u32) -> bool {
        self.processes.get(&pid).is_none_or(|process| process.as_ref().is_some_and(Process::lives))
    }

    /// Returns the lease of the process that the driver lists with this pid, also for a moment after its end.
    /// If a new process has the pid, the driver's figures may be of either, and belong to no lease.
    pub fn owner(&self, pid: u32, owners: &mut Owners, leases: &[Lease]) -> Option<i64> {
        let has_successor = !self.is_current(pid) && Process::open(pid).is_some();
        if has_successor { None } else { owners.of(pid, leases) }
    }

    /// Notes that a look found memory of an ended process of no known lease. Returns whether that is to be reported.
    pub fn note_orphan(&mut self, pid: u32) -> bool {
        let looks = self.orphans.entry(pid).or_default();
        *looks = looks.saturating_add(1);
        *looks >= LOOKS
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, id};

    use super::*;
    use crate::meter::owner::lease_of_this_process;

    #[test]
    fn a_new_process_is_not_taken_for_the_listed_one() {
        let (leases, mut owners) = ([lease_of_this_process()], Owners::default());
        let mut listed = Listed::default();
        assert_eq!(listed.owner(id(), &mut owners, &leases), Some(7), "not in the list");
        listed.note(&HashSet::from([id()]), &mut owners, &leases);
        assert!(listed.is_current(id()));
        assert_eq!(listed.owner(id(), &mut owners, &leases), Some(7));
        // Pretend that an earlier process with this pid is in the list.
        let mut child = Command::new("true").spawn().unwrap();
        let earlier = Process::open(child.id());
        child.wait().unwrap();
        for process in [earlier, None] {
            listed.processes.insert(id(), process);
            listed.note(&HashSet::from([id()]), &mut owners, &leases);
            assert!(!listed.is_current(id()));
            assert_eq!(listed.owner(id(), &mut owners, &leases), None);
        }
        assert_eq!([(); 3].map(|()| listed.note_orphan(id())), [false, false, true]);
        listed.note(&HashSet::new(), &mut owners, &leases);
        assert!(listed.is_current(id()), "it left the list in between");
    }
}
