//! Files that are mounted over a lease's own.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpushare_inject::Region;
use gpushare_inventory::FileIdentity;
use gpushare_quota::Lease;
use gpushare_region::path as inner;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{major, minor};

use super::Budget;
use crate::violation::Kind;

/// How long a list of mounts is not read again, unless the kernel tells of a change.
const TRUSTED: Duration = Duration::from_secs(30);
/// The most lists of mounts of one container, which may make any number of mount namespaces: those that are
/// kept open, and those that are read anew at a time.
pub(super) const MOST_LISTS: usize = 16;
/// The most bytes of a list of mounts that are read: some thousand mounts.
const LONGEST_LIST: u64 = 1 << 20;

/// What the looks before this one found, by lease.
#[derive(Debug, Default)]
pub(super) struct Mounts {
    views: HashMap<i64, Known>,
    /// Of `limits` and `usage`, which stay the same files for the lease's life. To look for the second takes a
    /// thread, for its mount namespace.
    identities: HashMap<i64, [FileIdentity; 2]>,
}

/// Views by mount namespace. Those of processes on a GPU are also by process: one may be shown less than
/// another of its namespace.
type Known = HashMap<(PathBuf, Option<u32>), View>;

/// One container's views, at a look.
pub(super) struct Views {
    before: Known,
    now: Known,
}

/// How a process sees the files of its lease.
#[derive(Debug)]
struct View {
    wrong: Option<(Kind, String)>,
    since: Instant,
    list: Option<File>,
}

impl View {
    /// Finds the first of the lease's files over which the process has something else mounted. It reads the
    /// kernel's list and looks no path up, since a file system of the container's own could make that wait. A
    /// process in a root of its own has no such mount, and finds no driver there.
    fn of(pid: u32, expected: &Expected) -> Self {
        let (list, wrong) = match read_mounts(pid) {
            Ok((list, text)) if text.len() as u64 > LONGEST_LIST => {
                let text = "its list of mounts is too long to be searched for what lies over its limits";
                (Some(list), Some((Kind::Files, text.to_owned())))
            }
            Ok((list, text)) => {
                // A container names its folders as it likes, in UTF-8 or not.
                let text = String::from_utf8_lossy(&text);
                let covered = covering(&text.lines().filter_map(mounted).collect::<Vec<_>>(), expected);
                let told = |path| (Kind::Files, format!("something else is mounted over {path}"));
                (Some(list), covered.map(told))
            }
            Err(error) if has_ended(&error) => (None, None),
            Err(error) => {
                (None, Some((Kind::Unreadable, format!("its list of mounts cannot be read: {error}"))))
            }
        };
        Self { wrong, since: Instant::now(), list }
    }

    /// Whether nothing was mounted since then. The kernel tells this by the open list (poll(2),
    /// proc_pid_mounts(5)).
    fn is_current(&self) -> bool {
        let is_same = |list: &File| {
            matches!(poll(&mut [PollFd::new(list.as_fd(), PollFlags::POLLPRI)], PollTimeout::ZERO), Ok(0))
        };
        self.since.elapsed() < TRUSTED && self.list.as_ref().is_some_and(is_same)
    }
}

/// The kernel's list of what a process has mounted: open, and its text up to one byte beyond the longest.
fn read_mounts(pid: u32) -> io::Result<(File, Vec<u8>)> {
    let (mut list, mut text) = (File::open(format!("/proc/{pid}/mountinfo"))?, Vec::new());
    list.by_ref().take(LONGEST_LIST + 1).read_to_end(&mut text)?;
    Ok((list, text))
}

/// Whether a file of /proc says that its process has ended, or has let go of its mounts on the way (`EINVAL`;
/// Linux, fs/proc_namespace.c).
fn has_ended(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::ENOENT | Errno::ESRCH | Errno::EINVAL))
}

/// The kernel's identities of the files that a share's processes have.
pub(super) struct Expected {
    /// Where each is mounted, the device number of its file system, and its path there.
    mounts: Vec<(String, u64, String)>,
    pub(super) limits: Option<FileIdentity>,
    pub(super) libcuda: Option<FileIdentity>,
}

impl Expected {
    pub(super) fn of(
        region: &Region,
        identities: [Option<FileIdentity>; 2],
        lease: &Lease,
        libcuda: &Path,
    ) -> Self {
        let [limits, usage] = identities;
        let text = |path: &CStr| path.to_string_lossy().into_owned();
        let mounts = [
            (text(inner::LIMITS), limits, below_mount(&region.limits())),
            (text(inner::USAGE), usage, below_mount(&region.staged(&lease.member.key.container))),
        ];
        let mounts = mounts.into_iter().filter_map(|(at, file, path)| Some((at, file?.device, path)));
        Self { mounts: mounts.collect(), limits, libcuda: FileIdentity::of(libcuda).ok() }
    }
}

/// The path, on its own file system, of a file that lies at the top of that file system.
fn below_mount(path: &Path) -> String {
    format!("/{}", path.file_name().unwrap_or_default().to_string_lossy())
}

impl Mounts {
    /// What is known of the lease's containers. Call [`Self::end`] after the look.
    pub(super) fn begin(&mut self, lease: i64) -> Views {
        Views { before: self.views.remove(&lease).unwrap_or_default(), now: Known::new() }
    }

    /// Keeps what this look found for the next one.
    pub(super) fn end(&mut self, lease: i64, views: Views) {
        self.views.insert(lease, views.now);
    }

    /// The identities of a lease's files; `None` of one that is not there yet.
    pub(super) fn identities(&mut self, region: &Region, lease: i64) -> [Option<FileIdentity>; 2] {
        if let Some(known) = self.identities.get(&lease) {
            return known.map(Some);
        }
        let found = region.identities();
        if let [Some(limits), Some(usage)] = found {
            self.identities.insert(lease, [limits, usage]);
        }
        found
    }

    /// Lets go of what the kernel holds for containers without a lease: an open list keeps their volumes
    /// mounted.
    pub(super) fn retain(&mut self, leases: &[Lease]) {
        let is_held = |id: &i64| leases.iter().any(|lease| lease.id == *id);
        self.views.retain(|id, _| is_held(id));
        self.identities.retain(|id, _| is_held(id));
    }
}

impl Views {
    /// What is wrong with how a process sees its lease's files.
    pub(super) fn look(
        &mut self,
        pid: u32,
        uses_gpu: bool,
        expected: &Expected,
        budget: &mut Budget,
    ) -> Option<(Kind, String)> {
        let namespace = fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap_or_default();
        let has_its_own = uses_gpu && self.now.len() < MOST_LISTS;
        let key = (namespace, has_its_own.then_some(pid));
        if !self.now.contains_key(&key) {
            let view = match self.before.remove(&key).filter(View::is_current) {
                Some(known) => known,
                None if budget.lists == 0 => {
                    budget.miss("all of its mount namespaces");
                    return None;
                }
                None => {
                    budget.lists -= 1;
                    View::of(pid, expected)
                }
            };
            // Beyond that it is read anew at each look.
            let list = view.list.filter(|_| self.now.len() < MOST_LISTS);
            self.now.insert(key.clone(), View { list, ..view });
        }
        self.now[&key].wrong.clone()
    }
}

fn covering(mounts: &[(&str, &str, &str)], expected: &Expected) -> Option<String> {
    let is_covered = |(at, device, path): &&(String, u64, String)| {
        let number = format!("{}:{}", major(*device), minor(*device));
        let over =
            mounts.iter().rev().find(|(_, _, target)| *target != "/" && Path::new(at).starts_with(target));
        let is_its_own = |(found, root, target): &(&str, &str, &str)| {
            *target == at.as_str() && *found == number && *root == path.as_str()
        };
        mounts.iter().any(|(_, _, target)| target == at) && !over.is_some_and(is_its_own)
    };
    expected.mounts.iter().find(is_covered).map(|(at, ..)| at.clone())
}

/// Device number, path on the file system, and mount point in one line (proc_pid_mountinfo(5)).
fn mounted(line: &str) -> Option<(&str, &str, &str)> {
    let mut words = line.split(' ').skip(2);
    Some((words.next()?, words.next()?, words.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_counts_as_covered_only_by_a_mount_over_it() {
        let expected = Expected {
            mounts: vec![(
                "/usr/lib/gpushare/limits".to_owned(),
                nix::sys::stat::makedev(0, 77),
                "/5".to_owned(),
            )],
            limits: None,
            libcuda: None,
        };
        let own = "10 1 0:77 /5 /usr/lib/gpushare/limits ro - tmpfs x ro";
        let root = "1 0 0:40 / / rw - overlay o rw";
        for (lines, want) in [
            (&[root, own][..], false),
            (&[root], false), // a root of its own
            (&[root, own, "11 1 0:90 / /usr/lib/other rw - tmpfs x rw"], false),
            (&[root, own, "11 10 0:90 /f /usr/lib/gpushare/limits rw - tmpfs x rw"], true),
            (&[root, "10 1 0:77 /6 /usr/lib/gpushare/limits ro - tmpfs x ro"], true), // a neighbour's
            (&[root, own, "11 1 0:90 / /usr/lib/gpushare rw - tmpfs x rw"], true),
            (&["11 1 0:90 / /usr rw - tmpfs x rw", own], false),
        ] {
            let mounts: Vec<_> = lines.iter().filter_map(|line| mounted(line)).collect();
            assert_eq!(covering(&mounts, &expected).is_some(), want, "{lines:?}");
        }
    }
}
