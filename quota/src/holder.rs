//! The process that holds a lease, and how to prove that it is gone.
//!
//! A bare pid proves nothing, since pids are reused. Pid and start time together are unique within a boot.
//! When the first process of a pid namespace ends, the kernel kills all others in that namespace. A container
//! without a pid namespace of its own can outlive its init, so the holder includes the cgroup too.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use gpushare_inventory::FileIdentity;
use nix::sys::statfs::{CGROUP_SUPER_MAGIC, statfs};
use procfs::process::Stat;
use serde::{Deserialize, Serialize, Serializer};

use crate::pid_namespace::PidNamespace;
use crate::process::{living_thread, own_pid, pids, stat};

/// A process, identified by pid and start time, and the cgroup of its container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Holder {
    /// The pid in the host's pid namespace; 0 if no process holds the lease ([`Holder::agent`]).
    pub pid: i32,
    /// The kernel's start time in clock ticks since boot.
    pub start_time: u64,
    /// The container's cgroup folder below /sys/fs/cgroup, known once the container exists.
    #[serde(serialize_with = "lossy")]
    pub cgroup: Option<PathBuf>,
    /// Whether it is the first process of a pid namespace other than ours. All processes of the container
    /// then end with it, even if other processes share the cgroup.
    pub leads: bool,
}

/// The pid of [`Holder::agent`]. No process has this pid.
const AGENT: i32 = 0;

/// Why a process cannot hold a lease.
#[derive(Debug, thiserror::Error)]
#[error("cannot read process {pid} in /proc")]
pub struct HolderError {
    /// Pid of the process; 0 stands for this process.
    pid: i32,
    /// The error from procfs.
    source: procfs::ProcError,
}

impl Holder {
    /// Returns this process, which becomes the low-level runtime by execve and keeps its pid.
    ///
    /// # Errors
    /// When /proc is not readable.
    pub fn this_process() -> Result<Self, HolderError> {
        let error = |source| HolderError { pid: 0, source };
        let stat = own_pid().and_then(stat).map_err(error)?;
        Ok(Self { pid: stat.pid, start_time: stat.starttime, cgroup: None, leads: false })
    }

    /// Returns the holder of a lease whose containers do not exist yet: the node's agent. The holder is not a
    /// process; the lease lasts until it is released, even if the agent is not running.
    pub fn agent() -> Self {
        Self { pid: AGENT, start_time: 0, cgroup: None, leads: false }
    }

    /// Whether this is [`Holder::agent`].
    pub fn is_agent(&self) -> bool {
        self.pid == AGENT
    }

    /// The init process of a container, with its cgroup.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn init(pid: i32) -> Result<Self, HolderError> {
        let error = |source| HolderError { pid, source };
        let stat = stat(pid).map_err(error)?;
        // Compare the pids: reading the namespace itself needs CAP_SYS_PTRACE.
        let its = pids(pid).unwrap_or_default();
        let own = own_pid().ok().and_then(pids);
        let leads = its.last() == Some(&1) && own.is_some_and(|own| its.len() > own.len());
        Ok(Self { pid, start_time: stat.starttime, cgroup: cgroup(pid), leads })
    }

    /// Whether both the holding process and the rest of its container are proved gone. Unreadable processes
    /// count as living.
    pub fn is_gone(&self) -> bool {
        self.is_gone_but_for(None)
    }

    /// Like [`Holder::is_gone`], for an earlier life of a container whose new first process `init` is in the
    /// same cgroup.
    pub fn is_gone_before(&self, init: &Self) -> bool {
        self.is_gone_but_for(Some(init.pid))
    }

    fn is_gone_but_for(&self, pid: Option<i32>) -> bool {
        let outlived = || self.cgroup.as_deref().is_some_and(|cgroup| populated(cgroup, pid));
        self.process_is_gone() && (self.leads || !outlived())
    }

    /// Whether the holding process itself lives. Other processes of its container do not count.
    pub fn lives(&self) -> bool {
        !self.process_is_gone()
    }

    /// Returns the processes in the container's cgroup and below it. For a container without a cgroup of its
    /// own, returns only the first process, and only while it is still the recorded one: the pid may have
    /// been reused.
    pub fn processes(&self) -> Vec<u32> {
        match &self.cgroup {
            Some(cgroup) => below(cgroup),
            None if self.is_agent() => Vec::new(), // its pid, 0, is not a real process
            None => u32::try_from(self.pid).into_iter().filter(|_| self.lives()).collect(),
        }
    }

    /// Like [`Holder::processes`], but reads at most `most` pids from at most `most` cgroups. The flag is
    /// true if the list is complete.
    pub fn some_processes(&self, most: usize) -> (Vec<u32>, bool) {
        let Some(cgroup) = &self.cgroup else { return (self.processes(), true) };
        let (mut all, mut folders, mut left) = (Vec::new(), vec![cgroup.clone()], most);
        while let Some(folder) = folders.pop() {
            if left == 0 || all.len() >= most {
                return (all, false);
            }
            left -= 1;
            // A line has a pid of at most 7 digits.
            let mut text = Vec::new();
            let longest = (most - all.len()) as u64 * 8;
            let file = fs::File::open(folder.join("cgroup.procs"));
            let read = file.and_then(|file| file.take(longest + 1).read_to_end(&mut text));
            // Reading `cgroup.procs` of a threaded cgroup fails.
            let is_unread = read.as_ref().is_err_and(|error| error.kind() != ErrorKind::NotFound);
            let is_cut = read.is_ok_and(|length| length as u64 > longest);
            let lines =
                text.split_inclusive(|byte| *byte == b'\n').filter_map(|line| line.strip_suffix(b"\n"));
            let numbers = lines.filter_map(|line| std::str::from_utf8(line).ok()?.parse().ok());
            all.extend(numbers.filter(|pid: &u32| *pid > 0));
            if is_cut || is_unread {
                return (all, false);
            }
            if !fs::metadata(&folder).is_ok_and(|folder| folder.nlink() == 2) {
                let entries = fs::read_dir(&folder).into_iter().flatten().filter_map(Result::ok);
                let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
                folders.extend(below.take(left + 1).map(|entry| entry.path()));
            }
        }
        let is_all = all.len() <= most;
        all.truncate(most);
        (all, is_all)
    }

    /// Returns the container's cgroup folder if the first process is the only one in it and below it.
    pub fn cgroup_of_its_own(&self) -> Option<&Path> {
        let cgroup = self.cgroup.as_deref()?;
        (below(cgroup) == [u32::try_from(self.pid).ok()?]).then_some(cgroup)
    }

    /// Like [`Holder::processes`], without processes in the host's mount namespace. A container with a share
    /// never uses the host's mounts, but the engine may have put it into a cgroup with host processes.
    pub fn contained(&self) -> Vec<u32> {
        let mounts = |pid: &str| FileIdentity::of(format!("/proc/{pid}/ns/mnt").as_ref()).ok();
        let ours = mounts("self");
        let is_hosts = |pid: &u32| ours.is_none() || mounts(&pid.to_string()) == ours;
        self.processes().into_iter().filter(|pid| !is_hosts(pid)).collect()
    }

    /// Whether the process that has this pid now is one of [`Holder::contained`].
    pub fn has(&self, pid: i32) -> bool {
        let mounts = |pid: &str| FileIdentity::of(format!("/proc/{pid}/ns/mnt").as_ref()).ok();
        let Some(thread) = living_thread(pid) else { return false };
        let is_in = cgroup_of(thread).is_some_and(|cgroup| self.contains(thread, &cgroup));
        is_in && mounts("self").is_some_and(|ours| mounts(&thread.to_string()) != Some(ours))
    }

    /// Waits until the holder is gone, but no longer than `most`.
    pub fn await_end(&self, most: Duration) {
        let start = Instant::now();
        while !self.is_gone() && start.elapsed() < most {
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Whether the living process `pid`, whose cgroup is `cgroup`, belongs to this container. For a container
    /// without a cgroup of its own, compares pid namespaces.
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

    /// Whether the living holder is the first process of this pid namespace. In a pod whose containers share
    /// one pid namespace, no container's holder is.
    pub fn leads_in(&self, namespace: PidNamespace) -> bool {
        let its = || PidNamespace::at(Path::new(&format!("/proc/{}/ns/pid", self.pid)));
        let is_first = || pids(self.pid)?.last().map(|pid| *pid == 1);
        // Check `lives` last: it proves that the values read above belong to this process.
        its() == Some(namespace) && is_first() == Some(true) && self.lives()
    }

    fn process_is_gone(&self) -> bool {
        if self.is_agent() {
            return false;
        }
        match stat(self.pid) {
            Ok(stat) => stat.starttime != self.start_time || is_zombie(&stat),
            Err(procfs::ProcError::NotFound(_)) => true,
            Err(_) => false,
        }
    }
}

/// JSON text is UTF-8 only. Nothing is lost: a runtime names a container's cgroup from config.json, which is
/// UTF-8 too.
fn lossy<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

/// Whether the process is dead. A main thread that ended while other threads run also shows as a zombie, but
/// a dead process has no other thread.
pub(crate) fn is_zombie(stat: &Stat) -> bool {
    matches!(stat.state, 'Z' | 'X') && stat.num_threads <= 1
}

/// The cgroup folder of a process: that of the devices controller on v1, the only one on v2. `None` for the
/// root cgroup, which never belongs to a container.
fn cgroup(pid: i32) -> Option<PathBuf> {
    folder(pid).filter(|(path, found)| path != "/" && found.is_dir()).map(|(_, found)| found)
}

/// The cgroup folder of the living process `pid`, chosen as for [`Holder::cgroup`]; `None` if the process is
/// gone.
pub fn cgroup_of(pid: i32) -> Option<PathBuf> {
    folder(pid).map(|(_, found)| found)
}

/// Checks the file system type: a cgroup of version 2 may have the same name.
fn is_v1(folder: &Path) -> bool {
    statfs(folder).is_ok_and(|found| found.filesystem_type() == CGROUP_SUPER_MAGIC)
}

const V1_DEVICES: &str = "/sys/fs/cgroup/devices";

/// The cgroup's path inside the hierarchy, and its folder.
fn folder(pid: i32) -> Option<(OsString, PathBuf)> {
    let groups = fs::read(format!("/proc/{pid}/cgroup")).ok()?;
    // The kernel lists v1 hierarchies even if only v2 is mounted.
    let of_devices = cgroup_path(&groups, Some("devices")).filter(|_| is_v1(Path::new(V1_DEVICES)));
    let (base, path) = match of_devices {
        Some(path) => (V1_DEVICES, path),
        None => ("/sys/fs/cgroup", cgroup_path(&groups, None)?),
    };
    Some((path.into(), Path::new(base).join(path.strip_prefix("/").ok()?)))
}

/// The cgroup's path in the hierarchy that has `controller`; `None` stands for the hierarchy of version 2.
/// `groups` is a file /proc/PID/cgroup as bytes: a container that may create cgroups chooses their names, and
/// procfs rejects the whole file if one name is not UTF-8.
pub fn cgroup_path<'a>(groups: &'a [u8], controller: Option<&str>) -> Option<&'a Path> {
    groups.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.splitn(3, |byte| *byte == b':'); // hierarchy, controllers, path
        let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let wanted = match controller {
            None => hierarchy == b"0",
            Some(name) => controllers.split(|byte| *byte == b',').any(|found| found == name.as_bytes()),
        };
        wanted.then(|| Path::new(OsStr::from_bytes(path)))
    })
}

/// Whether any process of a container lives in the cgroup or below it. An engine may have put the container
/// into a cgroup with processes of the host. Those do not count: they see the host's mounts, and no container
/// with a share does. The process `but` does not count either: it belongs to another container.
fn populated(cgroup: &Path, but: Option<i32>) -> bool {
    let mounts = |pid: &str| FileIdentity::of(format!("/proc/{pid}/ns/mnt").as_ref()).ok();
    let ours = mounts("self");
    let is_hosts = |pid: &str| ours.is_some() && mounts(pid) == ours;
    let procs = match fs::read_to_string(cgroup.join("cgroup.procs")) {
        Ok(procs) => procs,
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        // An unreadable file counts as living: the file of a threaded cgroup cannot be read.
        Err(_) => return true,
    };
    let is_others = |pid: &str| but.is_none_or(|but| pid.parse() != Ok(but)) && !is_hosts(pid);
    if procs.split_whitespace().any(is_others) {
        return true;
    }
    let mut inner = fs::read_dir(cgroup).into_iter().flatten().flatten().map(|entry| entry.path());
    inner.any(|path| path.is_dir() && populated(&path, but))
}

fn below(cgroup: &Path) -> Vec<u32> {
    let text = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    // 0 stands for a process of a pid namespace that we cannot see. A signal to 0 would go to our own process
    // group.
    let mut all: Vec<u32> =
        text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect();
    // The link count of a cgroup folder includes its child cgroups (kernfs). With no children, skip the slow
    // directory listing.
    if fs::metadata(cgroup).is_ok_and(|folder| folder.nlink() == 2) {
        return all;
    }
    for entry in fs::read_dir(cgroup).into_iter().flatten().filter_map(Result::ok) {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            all.extend(below(&entry.path()));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_cgroup_is_that_of_the_hierarchy_with_the_rules() {
        let groups = b"9:name=systemd:/s\n5:cpu,devices:/a/b\n3:mydevices:/x\n0::/two\n";
        assert_eq!(cgroup_path(groups, Some("devices")), Some(Path::new("/a/b")));
        assert_eq!(cgroup_path(groups, None), Some(Path::new("/two")));
        assert_eq!(cgroup_path(b"0::/two\n", Some("devices")), None);
    }

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
    fn no_more_processes_and_cgroups_are_listed_than_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let holder =
            Holder { pid: i32::MAX, start_time: 1, cgroup: Some(folder.path().into()), leads: false };
        fs::write(folder.path().join("cgroup.procs"), "0\n1\n2\n").unwrap();
        fs::create_dir(folder.path().join("inner")).unwrap();
        fs::write(folder.path().join("inner/cgroup.procs"), "3\n4194304\n").unwrap();
        assert_eq!(holder.some_processes(10), (vec![1, 2, 3, 4_194_304], true));
        assert_eq!(holder.some_processes(10).0, holder.processes());
        let (some, is_all) = holder.some_processes(2);
        assert_eq!((some, is_all), (vec![1, 2], false));
        fs::write(folder.path().join("inner/cgroup.procs"), "7\n".repeat(10_000)).unwrap();
        let (some, is_all) = holder.some_processes(100);
        assert!(some.len() <= 500 && !is_all, "{}", some.len());
        for at in 0..50 {
            fs::create_dir(folder.path().join(format!("inner{at}"))).unwrap();
        }
        fs::write(folder.path().join("inner/cgroup.procs"), "").unwrap();
        assert!(!holder.some_processes(20).1 && holder.some_processes(100).1);
    }

    #[test]
    fn a_populated_cgroup_keeps_a_lease_when_init_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let holder =
            Holder { pid: i32::MAX, start_time: 1, cgroup: Some(folder.path().into()), leads: false };
        fs::create_dir(folder.path().join("inner")).unwrap();
        let procs = folder.path().join("inner/cgroup.procs");
        fs::write(&procs, format!("{}\n", i32::MAX)).unwrap(); // no such process: its mounts cannot be read
        assert!(!holder.is_gone());
        let leader = Holder { leads: true, ..holder.clone() };
        assert!(leader.is_gone(), "none of its own can be left");
        fs::write(&procs, format!("{}\n", std::process::id())).unwrap();
        assert!(holder.is_gone(), "a process of the host's own");
        fs::write(&procs, "").unwrap();
        assert!(holder.is_gone());
    }

    #[test]
    #[ignore = "needs root: makes namespaces"]
    fn a_container_is_known_by_its_namespaces_in_a_cgroup_with_others() {
        let inside = |flags: &[&str]| {
            let mut command = Command::new("unshare");
            command.args(flags).args(["--kill-child", "sh", "-c", "echo; read x"]);
            command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
            let mut child = command.spawn().unwrap();
            std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
            let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
            (child, children.trim().parse::<i32>().unwrap())
        };
        let folder = tempfile::tempdir().unwrap();
        for (flags, leads) in [(&["--fork", "--pid", "--mount"][..], true), (&["--fork", "--mount"], false)] {
            let (mut child, init) = inside(flags);
            fs::write(folder.path().join("cgroup.procs"), format!("{init}\n")).unwrap();
            let holder = Holder { cgroup: Some(folder.path().into()), ..Holder::init(init).unwrap() };
            assert_eq!(holder.leads, leads, "{flags:?}");
            // Pretend that the container's init ended, while this process, which does not see the host's
            // mounts, still runs.
            let ended = Holder { start_time: holder.start_time + 1, ..holder };
            assert_eq!(ended.is_gone(), leads, "{flags:?}");
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_number_that_is_another_processs_by_now_and_one_that_is_not_seen_are_nobodys() {
        let mut child = Command::new("sleep").arg("60").stdout(std::process::Stdio::null()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let holder = Holder { cgroup: None, ..Holder::init(pid).unwrap() };
        assert_eq!(holder.processes(), [child.id()]);
        assert!(Holder { start_time: holder.start_time + 1, ..holder.clone() }.processes().is_empty());
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("cgroup.procs"), format!("0\n{pid}\n0\n")).unwrap();
        assert_eq!(Holder { cgroup: Some(folder.path().into()), ..holder }.processes(), [child.id()]);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
