//! The container's init, held by a pidfd and by a descriptor of its folder in /proc, so that it stays the
//! same process. Everything about it is read through that folder. Once the process ends, both report that and
//! never mean another process.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{FileStat, Mode, fstat};

use super::LiveError;
use crate::sys;

/// Bytes; longer than any of the files read here.
const MAX_BYTES: u64 = 4 << 20;

/// A process that is a container's init.
#[derive(Debug)]
pub(super) struct Process {
    pid: i32,
    pidfd: OwnedFd,
    folder: OwnedFd,
}

impl Process {
    /// Takes hold of the process `pid`. It must have a mount namespace of its own, and must not have started
    /// after `newest` (clock ticks since boot): a younger process only has the pid that the container's init
    /// once had.
    pub fn open(pid: i32, newest: u64) -> Result<Self, LiveError> {
        let gone = |errno| match errno {
            Errno::ESRCH | Errno::ENOENT => LiveError::Gone { pid },
            errno => LiveError::kernel("hold a process by descriptor", errno),
        };
        let pidfd = sys::pidfd_open(pid).map_err(gone)?;
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let folder = open(Path::new(&format!("/proc/{pid}")), flags, Mode::empty()).map_err(gone)?;
        let process = Self { pid, pidfd, folder };
        // The process is alive after the folder was opened, so the pid was its own all the time, and so is
        // the folder.
        process.check_alive()?;
        let started = start_time(&process.read("stat")?).ok_or(LiveError::Gone { pid })?;
        if started > newest {
            return Err(process.is_not_it("started after its hook"));
        }
        if same(&process.mount_namespace()?, "/proc/self/ns/mnt")? {
            return Err(process.is_not_it("lives in this hook's own mount namespace"));
        }
        Ok(process)
    }

    /// The error for a process that is no container's init; `what` shows this, as words after "it".
    pub fn is_not_it(&self, what: &'static str) -> LiveError {
        LiveError::NotTheContainer { pid: self.pid, what }
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// # Errors
    /// When the process has ended.
    pub fn check_alive(&self) -> Result<(), LiveError> {
        let mut ended = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ended, PollTimeout::ZERO) {
            Ok(0) => Ok(()),
            _ => Err(LiveError::Gone { pid: self.pid }),
        }
    }

    pub fn mount_namespace(&self) -> Result<OwnedFd, LiveError> {
        self.open_in("ns/mnt", OFlag::O_RDONLY)
    }

    /// The root folder that the process sees: the host's, until it calls pivot_root.
    pub fn root(&self) -> Result<OwnedFd, LiveError> {
        self.open_in("root", OFlag::O_PATH | OFlag::O_DIRECTORY)
    }

    /// Whether its user namespace differs from ours.
    pub fn has_user_namespace(&self) -> Result<bool, LiveError> {
        Ok(!same(&self.open_in("ns/user", OFlag::O_RDONLY)?, "/proc/self/ns/user")?)
    }

    /// Reads a file of its folder in /proc, at most [`MAX_BYTES`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>, LiveError> {
        let file = File::from(self.open_in(name, OFlag::O_RDONLY)?);
        let mut bytes = Vec::new();
        let read = file.take(MAX_BYTES).read_to_end(&mut bytes);
        // If the process ends meanwhile, the read fails with ESRCH.
        read.map_err(|_| LiveError::Gone { pid: self.pid })?;
        Ok(bytes)
    }

    fn open_in(&self, name: &str, flags: OFlag) -> Result<OwnedFd, LiveError> {
        openat(&self.folder, name, flags | OFlag::O_CLOEXEC, Mode::empty()).map_err(|errno| match errno {
            Errno::ESRCH | Errno::ENOENT => LiveError::Gone { pid: self.pid },
            errno => LiveError::at("look into the container's process", Path::new(name), errno),
        })
    }
}

fn same(namespace: &OwnedFd, ours: &str) -> Result<bool, LiveError> {
    let theirs = fstat(namespace).map_err(|errno| LiveError::at("look at a namespace", ours, errno))?;
    let ours = fs::metadata(ours).map_err(|source| LiveError::io("look at the namespace", ours, source))?;
    Ok(identity(&theirs) == (ours.dev(), ours.ino()))
}

/// Device and inode.
pub(super) fn identity(stat: &FileStat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// The start time in clock ticks since boot: field 22 of /proc/PID/stat. The name before it is in parentheses
/// and may contain any byte.
fn start_time(stat: &[u8]) -> Option<u64> {
    let behind_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let rest = std::str::from_utf8(stat.get(behind_name..)?).ok()?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The host's id for the namespace's id 0, from /proc/PID/uid_map or gid_map.
pub(super) fn host_id_of_root(map: &[u8]) -> Option<u32> {
    let mut lines = std::str::from_utf8(map).ok()?.lines().map(str::split_ascii_whitespace);
    let mut of_root = lines.find(|fields| fields.clone().next() == Some("0"))?;
    of_root.nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_time_is_found_behind_any_name() {
        let rest = "S 1 2 3 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 777 0 0";
        for name in ["init", "a b", "x) S 9", "\u{fffd}(("] {
            assert_eq!(start_time(format!("1 ({name}) {rest}").as_bytes()), Some(777), "{name}");
        }
        for text in ["", "1 (init", "1 (init) S 1 2"] {
            assert_eq!(start_time(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn the_containers_root_is_the_id_that_its_map_names() {
        assert_eq!(host_id_of_root(b"         0          0 4294967295\n"), Some(0));
        assert_eq!(host_id_of_root(b"1 5 1\n0 100000 65536\n"), Some(100_000));
        assert_eq!(host_id_of_root(b"1 5 1\n"), None);
    }

    #[test]
    fn a_process_that_ended_is_gone_and_one_of_the_host_is_no_container() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let host = Process::open(pid, u64::MAX).unwrap_err();
        assert!(matches!(host, LiveError::NotTheContainer { .. }), "{host}");
        let young = Process::open(pid, 0).unwrap_err();
        assert!(young.to_string().contains("started after its hook"), "{young}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(Process::open(pid, u64::MAX), Err(LiveError::Gone { .. })));
    }

    /// A process in a mount namespace of its own, as a container's init has one.
    fn apart() -> std::process::Child {
        let child = std::process::Command::new("unshare").args(["--mount", "sleep", "60"]).spawn().unwrap();
        let link = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap();
        while link(&child.id().to_string()) == link("self") {
            std::thread::yield_now();
        }
        child
    }

    fn end(mut child: std::process::Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    #[ignore = "needs root: makes mount namespaces and chooses a pid"]
    fn a_process_that_is_held_stays_the_same_when_its_pid_is_anothers() {
        let first = apart();
        let pid = i32::try_from(first.id()).unwrap();
        let newest = start_time(&fs::read(format!("/proc/{pid}/stat")).unwrap()).unwrap();
        let held = Process::open(pid, newest).unwrap();
        assert!(held.check_alive().is_ok() && held.mount_namespace().is_ok());
        end(first);
        // Start times have a resolution of hundredths of a second.
        std::thread::sleep(std::time::Duration::from_millis(20));
        // Other programs start processes meanwhile, so it takes more than one try.
        let twin = (0..1000).find_map(|_| {
            fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).unwrap();
            let twin = apart();
            if i32::try_from(twin.id()) == Ok(pid) {
                return Some(twin);
            }
            end(twin);
            None
        });
        let twin = twin.expect("the pid is given again");
        assert!(matches!(held.check_alive(), Err(LiveError::Gone { .. })));
        assert!(matches!(held.mount_namespace(), Err(LiveError::Gone { .. })));
        assert!(matches!(held.root(), Err(LiveError::Gone { .. })));
        assert!(matches!(held.read("cgroup"), Err(LiveError::Gone { .. })));
        // A hook that comes only now, with a state from before, is refused.
        let late = Process::open(pid, newest).unwrap_err();
        assert!(late.to_string().contains("started after its hook"), "{late}");
        end(twin);
    }
}
