//! Whose are the processes that the driver lists for a GPU.
//!
//! The driver knows processes by number alone, and keeps one in its list for as long as somebody has its files, also
//! when it has ended. Its number may be another's by then, who is not taken for it.

use std::collections::{HashMap, HashSet};

use gpushare_quota::Lease;

use super::owner::Owners;
use super::process::Process;

/// The processes in a GPU's list.
#[derive(Debug, Default)]
pub struct Listed(HashMap<u32, Entry>);

#[derive(Debug)]
struct Entry {
    /// When the process began that had the number when it came into the list, in clock ticks after boot; `None` if it had
    /// ended by then.
    born: Option<u64>,
    /// Its lease.
    lease: Option<i64>,
}

impl Listed {
    /// Takes note of who is in the list now, since a short process may have ended by the time of its first sample.
    pub fn note(&mut self, pids: &HashSet<u32>, owners: &mut Owners, leases: &[Lease]) {
        self.0.retain(|pid, _| pids.contains(pid));
        for pid in pids {
            owners.note(*pid, leases);
            self.0.entry(*pid).or_insert_with(|| {
                let born = born(*pid);
                Entry { born, lease: born.and_then(|_| owners.of(*pid, leases)) }
            });
        }
    }

    /// Whether the number is of the process that came into the list with it, or of none in the list.
    pub fn is_its(&self, pid: u32) -> bool {
        self.0.get(&pid).is_none_or(|entry| entry.born.is_some() && entry.born == born(pid))
    }

    /// The lease of the process that the driver lists under this number.
    pub fn owner(&mut self, pid: u32, owners: &mut Owners, leases: &[Lease]) -> Option<i64> {
        let is_its = self.is_its(pid);
        match self.0.get_mut(&pid) {
            Some(entry) if is_its => {
                entry.lease = owners.of(pid, leases);
                entry.lease
            }
            Some(entry) => entry.lease,
            None => owners.of(pid, leases),
        }
    }
}

fn born(pid: u32) -> Option<u64> {
    Process::open(pid)?.start_time()
}

#[cfg(test)]
mod tests {
    use std::process::id;

    use super::*;
    use crate::meter::owner::lease_of_this_process;

    #[test]
    fn a_number_in_the_list_is_of_who_came_into_it() {
        let (leases, mut owners) = ([lease_of_this_process()], Owners::default());
        let mut listed = Listed::default();
        assert_eq!(listed.owner(id(), &mut owners, &leases), Some(7), "not in the list");
        listed.note(&HashSet::from([id()]), &mut owners, &leases);
        assert!(listed.is_its(id()));
        assert_eq!(listed.owner(id(), &mut owners, &leases), Some(7));
        // As if an earlier process of this number, of another lease or of none, were in the list.
        for (born, lease) in [(Some(1), Some(9)), (Some(1), None), (None, None)] {
            listed.0.insert(id(), Entry { born, lease });
            listed.note(&HashSet::from([id()]), &mut owners, &leases);
            assert!(!listed.is_its(id()));
            assert_eq!(listed.owner(id(), &mut owners, &leases), lease, "{born:?}");
        }
        listed.note(&HashSet::new(), &mut owners, &leases);
        assert!(listed.is_its(id()), "it left the list in between");
    }
}
