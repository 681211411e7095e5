//! Which processes run, by the pids that they have in their own pid namespaces.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use procfs::process::Process;

use crate::holder::is_zombie;

/// How long the machine's processes may take to be listed, since anybody makes as many as he may.
const LONGEST: Duration = Duration::from_millis(100);

/// The processes that ran at the first question. What a container says about a process is only compared with
/// this list and never looked up, so that a false pid does not lead to another process.
#[derive(Debug, Default)]
pub struct Running(OnceCell<Option<HashSet<(u32, u64)>>>);

impl Running {
    /// Whether a process that is called `pid` in one of its pid namespaces and began at `start_time` (clock
    /// ticks after boot) may run. A start time of 0 is unknown, and such a process may run. Where /proc
    /// cannot be read, or there are too many processes, every one may.
    pub fn may_have(&self, pid: u32, start_time: u64) -> bool {
        match self.0.get_or_init(list) {
            Some(running) => start_time == 0 || running.contains(&(pid, start_time)),
            None => true,
        }
    }
}

fn list() -> Option<HashSet<(u32, u64)>> {
    let until = Instant::now() + LONGEST;
    let mut all = HashSet::new();
    for process in procfs::process::all_processes().ok()?.filter_map(Result::ok) {
        if Instant::now() >= until {
            return None;
        }
        all.extend(names(&process));
    }
    Some(all)
}

/// The process's pid in each of its pid namespaces, with its start time; empty if it has ended.
fn names(process: &Process) -> Vec<(u32, u64)> {
    let Ok(stat) = process.stat() else { return Vec::new() };
    if is_zombie(&stat) {
        return Vec::new();
    }
    let pids = process.status().ok().and_then(|status| status.nspid).unwrap_or_else(|| vec![stat.pid]);
    pids.into_iter().filter_map(|pid| Some((u32::try_from(pid).ok()?, stat.starttime))).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_runs_until_it_has_ended_and_another_of_its_pid_is_another() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let start = Process::new(i32::try_from(pid).unwrap()).unwrap().stat().unwrap().starttime;
        let running = Running::default();
        assert!(running.may_have(pid, start));
        assert!(!running.may_have(pid, start + 1));
        assert!(running.may_have(pid, 0), "a start time that is not known proves nothing");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(running.may_have(pid, start), "the list is of one moment");
        assert!(!Running::default().may_have(pid, start));
    }
}
