//! Who holds a lease, and how to prove that nobody does any more.
//!
//! A bare pid proves nothing: it is reused. The kernel's start time makes it unique within a boot. A container
//! without a pid namespace of its own can outlive its init, so its cgroup is remembered too.

use std::fs;
use std::path::{Path, PathBuf};

use procfs::process::{Process, Stat};

/// A process by pid and start time, and the cgroup of its container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The pid in the host's pid namespace.
    pub pid: i32,
    /// The kernel's start time in clock ticks since boot.
    pub start_time: u64,
    /// The container's cgroup folder below /sys/fs/cgroup, known once the container exists.
    pub cgroup: Option<PathBuf>,
}

/// Why a process cannot hold a lease.
#[derive(Debug, thiserror::Error)]
#[error("cannot read process {pid} in /proc")]
pub struct HolderError {
    /// The process.
    pid: i32,
    /// What the reader said.
    source: procfs::ProcError,
}

impl Holder {
    /// This process, which becomes the low-level runtime by execve and keeps its pid.
    ///
    /// # Errors
    /// When /proc is not readable.
    pub fn this_process() -> Result<Self, HolderError> {
        let error = |source| HolderError { pid: 0, source };
        let stat = Process::myself().and_then(|process| process.stat()).map_err(error)?;
        Ok(Self { pid: stat.pid, start_time: stat.starttime, cgroup: None })
    }

    /// The init process of a container, with its cgroup.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn init(pid: i32) -> Result<Self, HolderError> {
        let error = |source| HolderError { pid, source };
        let process = Process::new(pid).map_err(error)?;
        let stat = process.stat().map_err(error)?;
        Ok(Self { pid, start_time: stat.starttime, cgroup: cgroup(&process) })
    }

    /// Whether holder and container are proved gone. What cannot be read counts as living.
    pub fn is_gone(&self) -> bool {
        self.process_is_gone() && self.cgroup.as_deref().is_none_or(|cgroup| !populated(cgroup))
    }

    /// Whether the living process `pid`, whose cgroup is `cgroup`, is one of this container. A container without a cgroup of
    /// its own is told by its pid namespace.
    pub fn contains(&self, pid: i32, cgroup: &Path) -> bool {
        match &self.cgroup {
            Some(own) => cgroup.starts_with(own),
            None => {
                let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
                let theirs = namespace(&self.pid.to_string());
                theirs.is_some() && theirs == namespace(&pid.to_string()) && theirs != namespace("self")
            }
        }
    }

    fn process_is_gone(&self) -> bool {
        match Process::new(self.pid).and_then(|process| process.stat()) {
            Ok(stat) => stat.starttime != self.start_time || is_zombie(&stat),
            Err(procfs::ProcError::NotFound(_)) => true,
            Err(_) => false,
        }
    }
}

/// A main thread that ended while others run also shows as a zombie: dead means alone as well.
fn is_zombie(stat: &Stat) -> bool {
    matches!(stat.state, 'Z' | 'X') && stat.num_threads <= 1
}

/// The cgroup folder of a process: the devices controller's on v1, the only one on v2. The root cgroup is nobody's.
fn cgroup(process: &Process) -> Option<PathBuf> {
    folder(process).filter(|(path, found)| path != "/" && found.is_dir()).map(|(_, found)| found)
}

/// The folder of the living process `pid`'s cgroup, chosen as for [`Holder::cgroup`]; `None` when the process is gone.
pub fn cgroup_of(pid: i32) -> Option<PathBuf> {
    folder(&Process::new(pid).ok()?).map(|(_, found)| found)
}

fn folder(process: &Process) -> Option<(String, PathBuf)> {
    let groups = process.cgroups().ok()?;
    let folder = |base: &str, path: &str| Path::new(base).join(path.trim_start_matches('/'));
    let v1 = groups.0.iter().find(|group| group.controllers.iter().any(|controller| controller == "devices"));
    let (base, group) = match v1 {
        Some(group) => ("/sys/fs/cgroup/devices", group),
        None => ("/sys/fs/cgroup", groups.0.iter().find(|group| group.hierarchy == 0)?),
    };
    Some((group.pathname.clone(), folder(base, &group.pathname)))
}

/// Whether any process lives in the cgroup or below it.
fn populated(cgroup: &Path) -> bool {
    let procs = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    if !procs.trim().is_empty() {
        return true;
    }
    let Ok(entries) = fs::read_dir(cgroup) else { return false };
    entries.filter_map(Result::ok).map(|entry| entry.path()).any(|path| path.is_dir() && populated(&path))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_living_process_is_not_gone_and_a_dead_one_is() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let mut holder = Holder::init(i32::try_from(child.id()).unwrap()).unwrap();
        holder.cgroup = None; // the test's own cgroup stays populated
        assert!(!holder.is_gone());
        let reused = Holder { start_time: holder.start_time + 1, ..holder.clone() };
        assert!(reused.is_gone(), "the same pid with another start time is another process");
        child.kill().unwrap();
        while !holder.is_gone() {
            std::thread::yield_now(); // a zombie counts as gone before it is reaped
        }
        child.wait().unwrap();
        assert!(holder.is_gone());
    }

    #[test]
    fn a_populated_cgroup_keeps_a_lease_when_init_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let holder = Holder { pid: i32::MAX, start_time: 1, cgroup: Some(folder.path().into()) };
        fs::create_dir(folder.path().join("inner")).unwrap();
        fs::write(folder.path().join("inner/cgroup.procs"), "1\n").unwrap();
        assert!(!holder.is_gone());
        fs::write(folder.path().join("inner/cgroup.procs"), "").unwrap();
        assert!(holder.is_gone());
    }
}
