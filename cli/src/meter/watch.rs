//! Looks for what a container can do against its share from inside, by what the kernel says of its processes and
//! never by what they wrote: files put over the lease's own, GPU programs without the limits, file leases.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpushare_inject::Region;
use gpushare_inventory::FileIdentity;
use gpushare_quota::{Holder, Lease};
use gpushare_region::path as inner;
use nix::sys::stat::{major, minor};

use super::kept::Kept;
use super::owner::Owners;
use crate::leases::ids;
use crate::violation::{Kind, Violation};

/// How long a GPU process that has loaded its limits is not asked again.
const TRUSTED: Duration = Duration::from_secs(30);
/// How long what a mount namespace shows is not looked at again: its list of mounts is long.
const SHOWN: Duration = Duration::from_millis(1900);
/// A process that has just begun to use a GPU is not judged before the next look.
const LOOKS: u32 = 2;

/// What the looks before this one found.
#[derive(Debug, Default)]
pub struct Watch {
    /// GPU processes that have loaded their limits, by pid and start time.
    limited: HashMap<(u32, u64), Instant>,
    /// Looks in a row that found a process without.
    unlimited: HashMap<(u32, u64), u32>,
    /// What lies over the files of a lease in a mount namespace, and since when that is known.
    covered: HashMap<(i64, PathBuf), (Instant, Option<String>)>,
}

/// What the kernel calls the files that a share's processes have.
struct Expected {
    /// Where each is mounted, the device number of its file system, and its path there.
    mounts: Vec<(String, u64, String)>,
    limits: Option<FileIdentity>,
    libcuda: Option<FileIdentity>,
}

impl Expected {
    fn of(state: &Path, lease: &Lease, libcuda: &Path) -> Self {
        let region = Region::of(state, lease.id);
        let limits = FileIdentity::of(&region.limits()).ok();
        let usage = FileIdentity::of(&region.usage()).ok();
        let text = |path: &CStr| path.to_string_lossy().into_owned();
        let mounts = [
            (text(inner::LIMITS), limits, below_mount(&region.limits())),
            (text(inner::USAGE), usage, below_mount(&region.usage())),
        ];
        let mounts = mounts.into_iter().filter_map(|(at, file, path)| Some((at, file?.device, path)));
        Self { mounts: mounts.collect(), limits, libcuda: FileIdentity::of(libcuda).ok() }
    }
}

/// The path on its own file system of a file that lies at the top of one.
fn below_mount(path: &Path) -> String {
    format!("/{}", path.file_name().unwrap_or_default().to_string_lossy())
}

impl Watch {
    /// What the processes of `lease` do, of which `on_gpu` use one.
    pub fn look(
        &mut self,
        state: &Path,
        lease: &Lease,
        libcuda: &Path,
        on_gpu: &HashSet<u32>,
    ) -> Vec<Violation> {
        let expected = Expected::of(state, lease, libcuda);
        let mut found = Vec::new();
        let mut processes: HashSet<u32> =
            lease.members().flat_map(|member| processes(&member.holder)).collect();
        processes.extend(on_gpu);
        for pid in processes {
            let namespace = fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap_or_default();
            let shown = self.covered.entry((lease.id, namespace));
            let shown = shown.or_insert_with(|| (Instant::now(), covered(pid, &expected)));
            if let Some(path) = &shown.1 {
                found.push(of(
                    lease,
                    Some(pid),
                    Kind::Files,
                    format!("something else is mounted over {path}"),
                ));
            } else if on_gpu.contains(&pid) && self.is_unlimited(pid, &expected) {
                let text = "it uses a GPU without having loaded the share's limits: it speaks to the driver by itself";
                found.push(of(lease, Some(pid), Kind::Unlimited, text.to_owned()));
            }
        }
        found
    }

    /// Whether a process that uses a GPU has not mapped the lease's limits and the driver's libcuda, at two looks in a row.
    fn is_unlimited(&mut self, pid: u32, expected: &Expected) -> bool {
        let (Some(limits), Some(libcuda), Some(begun)) = (expected.limits, expected.libcuda, begun(pid))
        else {
            return false;
        };
        let process = (pid, begun);
        if self.limited.get(&process).is_some_and(|seen| seen.elapsed() < TRUSTED) {
            return false;
        }
        // One that ends meanwhile has no maps.
        let Some(maps) = fs::read(format!("/proc/{pid}/maps")).ok().filter(|maps| !maps.is_empty()) else {
            return false;
        };
        if has_mapped(&maps, limits) && has_inode(&maps, libcuda.inode) {
            self.limited.insert(process, Instant::now());
            self.unlimited.remove(&process);
            return false;
        }
        let looks = self.unlimited.entry(process).or_default();
        *looks += 1;
        *looks >= LOOKS
    }

    /// Forgets what was seen long ago.
    pub fn forget(&mut self) {
        self.covered.retain(|_, (since, _)| since.elapsed() < SHOWN);
        self.limited.retain(|_, seen| seen.elapsed() < TRUSTED);
        self.unlimited.retain(|(pid, start), _| begun(*pid) == Some(*start));
    }
}

/// One violation of a lease's.
pub fn of(lease: &Lease, pid: Option<u32>, kind: Kind, text: String) -> Violation {
    Violation {
        lease: Some(lease.id),
        container: ids(lease).join(", "),
        pid,
        kind: kind.name().to_owned(),
        text,
    }
}

/// Leases (fcntl(2)) of containers' processes on files that others have to open.
pub fn file_leases(kept: &Kept, owners: &mut Owners, leases: &[Lease]) -> Vec<Violation> {
    let all = gpushare_inventory::file_leases(Path::new("/proc")).unwrap_or_default();
    if all.is_empty() {
        return Vec::new();
    }
    let watched = kept.watched();
    let mut found = Vec::new();
    for (pid, path) in all.into_iter().filter_map(|(pid, file)| Some((pid, watched.get(&file)?))) {
        let owner = owners.of(pid, leases);
        let text = format!("it has a lease (F_SETLEASE) on {}: others would wait for it", path.display());
        let lease = leases.iter().find(|lease| Some(lease.id) == owner);
        found.extend(lease.map(|lease| of(lease, Some(pid), Kind::FileLease, text)));
    }
    found
}

/// The first of the lease's files over which the process has something else mounted. The kernel's list is read, and no
/// path is looked up: a file system of the container's own could let that wait. One in a root of its own has no such
/// mount, and finds no driver there.
fn covered(pid: u32, expected: &Expected) -> Option<String> {
    let list = fs::read_to_string(format!("/proc/{pid}/mountinfo")).ok()?;
    covering(&list.lines().filter_map(mounted).collect::<Vec<_>>(), expected)
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

/// Device number, path on the file system and mount point of one line (proc_pid_mountinfo(5)).
fn mounted(line: &str) -> Option<(&str, &str, &str)> {
    let mut words = line.split(' ').skip(2);
    Some((words.next()?, words.next()?, words.next()?))
}

/// Whether the maps of a process (proc_pid_maps(5)) have this file of a tmpfs.
fn has_mapped(maps: &[u8], file: FileIdentity) -> bool {
    let words = format!(" {:02x}:{:02x} {} ", major(file.device), minor(file.device), file.inode);
    contains(maps, &words)
}

/// The same by the inode alone: some file systems show another device number there than to who looks at the file.
fn has_inode(maps: &[u8], inode: u64) -> bool {
    contains(maps, &format!(" {inode} "))
}

fn contains(text: &[u8], words: &str) -> bool {
    text.windows(words.len()).any(|window| window == words.as_bytes())
}

/// The start time of a living process, in clock ticks after boot.
fn begun(pid: u32) -> Option<u64> {
    let stat =
        procfs::process::Process::new(i32::try_from(pid).ok()?).and_then(|process| process.stat()).ok()?;
    (stat.state != 'Z').then_some(stat.starttime)
}

/// The processes in a container's cgroup and below it. Of a container without a cgroup of its own the first one, while it
/// is the one that was recorded: its number may be another process's by now.
pub fn processes(holder: &Holder) -> Vec<u32> {
    match &holder.cgroup {
        Some(cgroup) => below(cgroup),
        None => u32::try_from(holder.pid).into_iter().filter(|_| holder.lives()).collect(),
    }
}

fn below(cgroup: &Path) -> Vec<u32> {
    let text = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    // 0 is a process of a pid namespace that this one does not see; a signal to 0 would go to ourselves.
    let mut all: Vec<u32> =
        text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect();
    for entry in fs::read_dir(cgroup).into_iter().flatten().filter_map(Result::ok) {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            all.extend(below(&entry.path()));
        }
    }
    all
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
