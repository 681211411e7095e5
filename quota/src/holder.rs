//! Who holds a lease, and how to prove that nobody does any more.
//!
//! A bare pid proves nothing: it is reused. The kernel's start time makes it unique within a boot. A container
//! without a pid namespace of its own can outlive its init, so its cgroup is remembered too.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use procfs::process::{Process, Stat};

use crate::pod::PidNamespace;

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
        Ok(Self { pid, start_time: stat.starttime, cgroup: cgroup(pid) })
    }

    /// Whether holder and container are proved gone. What cannot be read counts as living.
    pub fn is_gone(&self) -> bool {
        self.process_is_gone() && self.cgroup.as_deref().is_none_or(|cgroup| !populated(cgroup))
    }

    /// Whether the holding process itself, not merely one of its container, lives.
    pub fn lives(&self) -> bool {
        !self.process_is_gone()
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

    /// Whether the living holder is the first process of this pid namespace. In a namespace that is not its
    /// own, as that of a pod whose containers share one, it is not.
    pub fn leads(&self, namespace: PidNamespace) -> bool {
        let its = || PidNamespace::at(Path::new(&format!("/proc/{}/ns/pid", self.pid)));
        let numbers = || Process::new(self.pid).and_then(|process| process.status()).ok()?.nspid;
        // Alive at last: what was read was its own.
        its() == Some(namespace) && numbers().is_some_and(|pids| pids.last() == Some(&1)) && self.lives()
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
fn cgroup(pid: i32) -> Option<PathBuf> {
    folder(pid).filter(|(path, found)| path != "/" && found.is_dir()).map(|(_, found)| found)
}

/// The folder of the living process `pid`'s cgroup, chosen as for [`Holder::cgroup`]; `None` when the process is gone.
pub fn cgroup_of(pid: i32) -> Option<PathBuf> {
    folder(pid).map(|(_, found)| found)
}

/// Path inside the hierarchy, and folder. Read as bytes: a container that may make cgroups names them as it likes, and
/// procfs gives up the whole file for one name that is no UTF-8.
fn folder(pid: i32) -> Option<(OsString, PathBuf)> {
    let text = fs::read(format!("/proc/{pid}/cgroup")).ok()?;
    let groups = || {
        text.split(|byte| *byte == b'\n').filter_map(|line| {
            let mut fields = line.splitn(3, |byte| *byte == b':'); // hierarchy, controllers, path
            Some((fields.next()?, fields.next()?, fields.next()?))
        })
    };
    let has_devices =
        |controllers: &[u8]| controllers.split(|byte| *byte == b',').any(|name| name == b"devices");
    let (base, path) = match groups().find(|(_, controllers, _)| has_devices(controllers)) {
        Some((_, _, path)) => ("/sys/fs/cgroup/devices", path),
        None => ("/sys/fs/cgroup", groups().find(|(hierarchy, ..)| *hierarchy == b"0")?.2),
    };
    let path = OsStr::from_bytes(path);
    Some((path.to_owned(), Path::new(base).join(Path::new(path).strip_prefix("/").ok()?)))
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
    #[ignore = "needs root: makes a cgroup"]
    fn a_process_is_found_in_a_cgroup_whose_name_is_no_utf_8() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let folder = cgroup_of(pid).unwrap().join(OsStr::from_bytes(b"gpushare-test-\xff"));
        fs::create_dir(&folder).unwrap();
        let moved = fs::write(folder.join("cgroup.procs"), pid.to_string());
        let found = cgroup_of(pid);
        child.kill().unwrap();
        child.wait().unwrap();
        while fs::remove_dir(&folder).is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy) {
            std::thread::yield_now();
        }
        moved.unwrap();
        assert_eq!(found, Some(folder));
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
