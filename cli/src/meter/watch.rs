//! Looks for what a container can do against its share from inside: files mounted over the lease's own, GPU
//! programs without the limits, file leases. It uses what the kernel says of the processes, never what they
//! wrote.

use std::collections::{BTreeSet, HashMap, HashSet};
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

use super::kept::Kept;
use super::owner::Owners;
use super::process::{MOST_KEPT, Process};
use crate::container::ids;
use crate::violation::{Kind, Violation};

/// How long a GPU process that has loaded its limits is not looked at again.
const TRUSTED: Duration = Duration::from_secs(30);
/// How many looks in a row must find a process without limits, so that one that has just begun to use a GPU
/// is not judged.
const LOOKS: u32 = 2;

/// The most lists of mounts that are kept open for one lease, since a container may make any number of mount
/// namespaces.
const MOST_VIEWS: usize = 16;
/// The most bytes of a list of mounts that are read: some thousand mounts.
const LONGEST_LIST: u64 = 1 << 20;

/// What the looks before this one found.
#[derive(Debug, Default)]
pub struct Watch {
    /// GPU processes that had loaded their limits, and when that was found.
    limited: HashMap<u32, (Process, Instant)>,
    /// How many looks in a row found a process without them.
    unlimited: HashMap<u32, Unlimited>,
    views: HashMap<i64, Views>,
    /// By lease, of `limits` and `usage`, which stay the same files for its life. To look for the second takes a
    /// thread, for its mount namespace.
    identities: HashMap<i64, [FileIdentity; 2]>,
}

/// A GPU process without its limits.
#[derive(Debug)]
struct Unlimited {
    /// `None` where too many are kept open.
    process: Option<Process>,
    looks: u32,
    /// Whether the look under way, or the last one, found it.
    is_seen: bool,
}

/// Views by mount namespace. Those of processes on a GPU are also by process: one may be shown less than
/// another of its namespace.
type Views = HashMap<(PathBuf, Option<u32>), View>;

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
struct Expected {
    /// Where each is mounted, the device number of its file system, and its path there.
    mounts: Vec<(String, u64, String)>,
    limits: Option<FileIdentity>,
    libcuda: Option<FileIdentity>,
}

impl Expected {
    fn of(region: &Region, identities: [Option<FileIdentity>; 2], lease: &Lease, libcuda: &Path) -> Self {
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

impl Watch {
    /// What the processes of `lease` do against the share; `on_gpu` are those that use a GPU.
    pub fn look(
        &mut self,
        state: &Path,
        lease: &Lease,
        libcuda: &Path,
        on_gpu: &HashSet<u32>,
    ) -> Vec<Violation> {
        let region = Region::of(state, lease.id);
        let expected = Expected::of(&region, self.identities(&region, lease.id), lease, libcuda);
        let mut found = Vec::new();
        let mut before = self.views.remove(&lease.id).unwrap_or_default();
        let mut views = Views::new();
        let others = lease.members().flat_map(|member| member.holder.processes());
        // In an order, so that the same processes have a view of their own at each look.
        let others: BTreeSet<u32> = others.filter(|pid| !on_gpu.contains(pid)).collect();
        let on_gpu: BTreeSet<u32> = on_gpu.iter().copied().collect();
        for &pid in on_gpu.iter().chain(&others) {
            let namespace = fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap_or_default();
            let has_its_own = on_gpu.contains(&pid) && views.len() < MOST_VIEWS;
            let key = (namespace, has_its_own.then_some(pid));
            if !views.contains_key(&key) {
                let known = before.remove(&key).filter(View::is_current);
                let mut view = known.unwrap_or_else(|| View::of(pid, &expected));
                view.list = view.list.filter(|_| views.len() < MOST_VIEWS);
                views.insert(key.clone(), view);
            }
            let wrong = views[&key].wrong.clone();
            let is_judged = matches!(wrong, Some((Kind::Files, _)));
            found.extend(wrong.map(|(kind, text)| of(lease, Some(pid), kind, text)));
            if !is_judged && on_gpu.contains(&pid) && self.is_unlimited(pid, &expected) {
                let text = "it uses a GPU without having loaded the share's limits: it speaks to the driver by itself";
                found.push(of(lease, Some(pid), Kind::Unlimited, text.to_owned()));
            }
        }
        self.views.insert(lease.id, views);
        found
    }

    /// The identities of a lease's files; `None` of one that is not there yet.
    fn identities(&mut self, region: &Region, lease: i64) -> [Option<FileIdentity>; 2] {
        if let Some(known) = self.identities.get(&lease) {
            return known.map(Some);
        }
        let found = region.identities();
        if let [Some(limits), Some(usage)] = found {
            self.identities.insert(lease, [limits, usage]);
        }
        found
    }

    /// Whether two looks in a row found that a process that uses a GPU has not mapped the lease's limits and
    /// the driver's libcuda.
    fn is_unlimited(&mut self, pid: u32, expected: &Expected) -> bool {
        let (Some(limits), Some(libcuda)) = (expected.limits, expected.libcuda) else { return false };
        let is_fresh = |(process, seen): &(Process, Instant)| seen.elapsed() < TRUSTED && process.lives();
        if self.limited.get(&pid).is_some_and(is_fresh) {
            return false;
        }
        let process = Process::open(pid).filter(|_| self.unlimited.len() < MOST_KEPT);
        // A process that has ended meanwhile has no maps.
        let Some(maps) = fs::read(format!("/proc/{pid}/maps")).ok().filter(|maps| !maps.is_empty()) else {
            return false;
        };
        if has_mapped(&maps, limits) && has_inode(&maps, libcuda.inode) {
            if let Some(process) = process.filter(|_| self.limited.len() < MOST_KEPT) {
                self.limited.insert(pid, (process, Instant::now()));
            }
            self.unlimited.remove(&pid);
            return false;
        }
        let seen = self.unlimited.entry(pid).or_insert(Unlimited { process, looks: 0, is_seen: true });
        seen.is_seen = true;
        seen.looks += 1;
        seen.looks >= LOOKS
    }

    /// Lets go of what the kernel holds for containers without a lease: an open list keeps their volumes
    /// mounted.
    pub fn retain(&mut self, leases: &[Lease]) {
        let is_held = |id: &i64| leases.iter().any(|lease| lease.id == *id);
        self.views.retain(|id, _| is_held(id));
        self.identities.retain(|id, _| is_held(id));
    }

    /// Forgets what was seen long ago. Call it before each round of looks.
    pub fn forget(&mut self) {
        self.limited.retain(|_, (_, seen)| seen.elapsed() < TRUSTED);
        self.unlimited.retain(|_, one| {
            std::mem::take(&mut one.is_seen) && one.process.as_ref().is_none_or(Process::lives)
        });
    }
}

/// A violation by a container of `lease`.
pub fn of(lease: &Lease, pid: Option<u32>, kind: Kind, text: String) -> Violation {
    Violation {
        lease: Some(lease.id),
        container: ids(lease).join(", "),
        pid,
        kind: kind.name().to_owned(),
        text,
    }
}

/// Violations by leases (fcntl(2)) that containers' processes have on files that others have to open.
pub fn file_leases(kept: &Kept, owners: &mut Owners, leases: &[Lease]) -> Vec<Violation> {
    let all = gpushare_inventory::file_leases(Path::new("/proc")).unwrap_or_default();
    if all.is_empty() {
        return Vec::new();
    }
    let watched = kept.watched();
    let found = all.into_iter().filter_map(|(pid, file)| {
        let path = watched.get(&file)?.display();
        let owner = owners.of(pid, leases)?;
        let lease = leases.iter().find(|lease| lease.id == owner)?;
        let text = format!("it has a lease (F_SETLEASE) on {path}: others would wait for it");
        Some(of(lease, Some(pid), Kind::FileLease, text))
    });
    found.collect()
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

/// Whether this file of a tmpfs is in the maps of a process (proc_pid_maps(5)).
fn has_mapped(maps: &[u8], file: FileIdentity) -> bool {
    let words = format!(" {:02x}:{:02x} {} ", major(file.device), minor(file.device), file.inode);
    contains(maps, &words)
}

/// The same by the inode alone, since some file systems show another device number in the maps than for the
/// file itself.
fn has_inode(maps: &[u8], inode: u64) -> bool {
    contains(maps, &format!(" {inode} "))
}

fn contains(text: &[u8], words: &str) -> bool {
    text.windows(words.len()).any(|window| window == words.as_bytes())
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

    #[test]
    fn maps_are_searched_for_device_and_inode() {
        let maps = b"7f00-7f01 r--s 00000000 00:4d 5   /usr/lib/gpushare/limits\n";
        let file = |device, inode| FileIdentity { device: nix::sys::stat::makedev(0, device), inode };
        assert!(has_mapped(maps, file(0x4d, 5)) && has_inode(maps, 5));
        assert!(
            !has_mapped(maps, file(0x4e, 5)) && !has_mapped(maps, file(0x4d, 55)) && !has_inode(maps, 55)
        );
    }
}
