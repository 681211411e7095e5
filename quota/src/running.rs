//! Lists running processes by the pids that they have in their own pid namespaces.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};
use procfs::process::Process;

use crate::holder::is_zombie;
use crate::process::pids;

/// Time limit for listing the processes, since any user can start many.
const LONGEST: Duration = Duration::from_millis(100);

/// The processes that ran at the first call. A pid that a container reports is only compared with this list
/// and never looked up, so that a false pid cannot lead to another process.
#[derive(Debug, Default)]
pub struct Running(OnceCell<Option<Listed>>);

/// The processes, and the time at which the listing began, in clock ticks after boot.
#[derive(Debug)]
struct Listed {
    processes: HashSet<(u32, u64)>,
    at: u64,
}

impl Running {
    /// Whether a process that has the pid `pid` in one of its pid namespaces and began at `start_time` (clock
    /// ticks after boot) may be running. Returns true if the start time is 0 (unknown) or later than the
    /// first call, if /proc cannot be read, or if there are too many processes.
    pub fn may_have(&self, pid: u32, start_time: u64) -> bool {
        match self.0.get_or_init(list) {
            Some(Listed { processes, at }) => {
                start_time == 0 || start_time >= *at || processes.contains(&(pid, start_time))
            }
            None => true,
        }
    }
}

fn list() -> Option<Listed> {
    let boot = clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?.num_milliseconds();
    let at = u64::try_from(boot).ok()? * procfs::ticks_per_second() / 1000;
    let until = Instant::now() + LONGEST;
    let mut processes = HashSet::new();
    for process in procfs::process::all_processes().ok()?.filter_map(Result::ok) {
        if Instant::now() >= until {
            return None;
        }
        processes.extend(names(&process));
    }
    Some(Listed { processes, at })
}

/// The process's pid in each of its pid namespaces, with its start time; empty if it has ended.
fn names(process: &Process) -> Vec<(u32, u64)> {
    let Ok(stat) = process.stat() else { return Vec::new() };
    if is_zombie(&stat) {
        return Vec::new();
    }
    // Avoid parsing the name: the kernel cuts it at any byte, so it need not be valid UTF-8.
    let pids = pids(stat.pid).unwrap_or_else(|| vec![stat.pid]);
    pids.into_iter().filter_map(|pid| Some((u32::try_from(pid).ok()?, stat.starttime))).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    #[ignore = "needs root: makes a pid namespace"]
    fn a_process_whose_name_is_no_text_is_listed_by_its_inner_number_too() {
        // The kernel cuts a name at any byte, even within a character.
        let script = r"import ctypes,time; ctypes.CDLL(None).prctl(15, b'\xd0\xbe\xd0'); time.sleep(60)";
        let mut command = Command::new("unshare");
        let mut child =
            command.args(["--fork", "--pid", "--kill-child", "python3", "-c", script]).spawn().unwrap();
        let inner = || {
            let children = format!("/proc/{0}/task/{0}/children", child.id());
            std::fs::read_to_string(children).ok()?.trim().parse::<i32>().ok()
        };
        let is_named = |pid: i32| {
            std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name.first() == Some(&0xd0))
        };
        let pid = loop {
            match inner().filter(|pid| is_named(*pid)) {
                Some(pid) => break pid,
                None => std::thread::sleep(LONGEST / 10),
            }
        };
        let process = Process::new(pid).unwrap();
        let start = process.stat().unwrap().starttime;
        let listed = names(&process);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(listed, [(u32::try_from(pid).unwrap(), start), (1, start)]);
    }

    #[test]
    fn a_process_runs_until_it_has_ended_and_another_of_its_pid_is_another() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let start = Process::new(i32::try_from(pid).unwrap()).unwrap().stat().unwrap().starttime;
        // A process that begins in the same clock tick, or later, may have begun after the listing.
        while Running::default().may_have(pid, start + 1) {
            std::thread::sleep(LONGEST / 10);
        }
        let running = Running::default();
        assert!(running.may_have(pid, start) && running.may_have(pid, u64::MAX));
        assert!(running.may_have(pid, 0), "a start time that is not known proves nothing");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(running.may_have(pid, start), "the list is of one moment");
        assert!(!Running::default().may_have(pid, start));
    }
}
