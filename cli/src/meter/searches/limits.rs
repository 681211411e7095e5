//! GPU programs that have not loaded the limits of their share.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use gpushare_inventory::FileIdentity;
use gpushare_quota::{process_numbers, process_stat};
use gpushare_region::{LIMITS_LEN, ProcessUsage};
use nix::sys::stat::{major, minor};

use super::descriptors::identity;
use super::mounts::Expected;
use super::{Budget, thread_of};
use crate::meter::process::{MOST_KEPT, Process};
use crate::violation::Kind;

/// How long a GPU process that has loaded its limits is not looked at again.
const TRUSTED: Duration = Duration::from_secs(30);
/// How many looks in a row must find a process without limits, so that one that has just begun to use a GPU
/// is not judged.
const LOOKS: u32 = 2;
/// How many in a row must find one in containers of a lease, where each has ended by the next look.
const LOOKS_AT_SEVERAL: u32 = 3;
/// The most bytes of a list of what a process has mapped that are read: some ten thousand mappings.
const LONGEST_LIST: u64 = 1 << 20;
/// Bytes of a page of memory.
const PAGE: u64 = 4096;

/// Where a process says that it has mapped the limits and the driver's library. The kernel is asked whether
/// they are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pid_namespace: u64,
    pid: u32,
    start_time: u64,
    limits: Range<u64>,
    driver: Range<u64>,
}

impl Note {
    /// That of a process in a container's books; `None` of one that noted nothing.
    pub fn of(process: &ProcessUsage) -> Option<Self> {
        let [limits, begin, end] = process.mapped;
        let length = (LIMITS_LEN as u64).next_multiple_of(PAGE);
        let ProcessUsage { pid_namespace, pid, start_time, .. } = *process;
        let limits = limits..limits.checked_add(length)?;
        (limits.start != 0).then_some(Self { pid_namespace, pid, start_time, limits, driver: begin..end })
    }
}

/// What the looks before this one found.
#[derive(Debug, Default)]
pub(super) struct Limited {
    /// GPU processes that had loaded their limits, and when that was found.
    known: HashMap<u32, (Process, Instant)>,
    /// How many looks in a row found a process without them.
    without: HashMap<u32, Without>,
    /// How many looks in a row found any such process of a lease, and whether the last one did.
    of_lease: HashMap<i64, (u32, bool)>,
}

/// A GPU process without its limits.
#[derive(Debug)]
struct Without {
    lease: i64,
    /// `None` where too many are kept open.
    process: Option<Process>,
    looks: u32,
    /// Whether the look under way, or the last one, found it.
    is_seen: bool,
}

impl Limited {
    /// What is wrong with a process that uses a GPU: two looks in a row found that it has not mapped the
    /// lease's limits and the driver's libcuda.
    pub(super) fn look(
        &mut self,
        (lease, pid, thread): (i64, u32, u32),
        expected: &Expected,
        notes: &[Note],
        budget: &mut Budget,
    ) -> Option<(Kind, String)> {
        let (limits, libcuda) = (expected.limits?, expected.libcuda?);
        let is_fresh = |(process, seen): &(Process, Instant)| seen.elapsed() < TRUSTED && process.lives();
        if self.known.get(&pid).is_some_and(is_fresh) {
            return None;
        }
        let process = Process::open(pid).filter(|_| self.without.len() < MOST_KEPT);
        let has_loaded = is_as_noted((pid, thread), notes, limits, libcuda) || {
            let (maps, is_whole) = read_maps(thread).unwrap_or_default();
            let has_both = has_mapped(&maps, limits) && has_inode(&maps, libcuda.inode);
            // A list that is empty says nothing of a process that lives.
            if maps.is_empty() && thread_of(pid).is_none() {
                return None;
            }
            if !has_both && !is_whole {
                budget.miss("all that its processes have mapped");
                return None;
            }
            has_both
        };
        if has_loaded {
            if let Some(process) = process.filter(|_| self.known.len() < MOST_KEPT) {
                self.known.insert(pid, (process, Instant::now()));
            }
            self.without.remove(&pid);
            return None;
        }
        let (looks, is_seen) = self.of_lease.entry(lease).or_default();
        *looks += u32::from(!std::mem::replace(is_seen, true));
        let are_several = *looks >= LOOKS_AT_SEVERAL;
        let seen = self.without.entry(pid).or_insert(Without { lease, process, looks: 0, is_seen: true });
        seen.is_seen = true;
        seen.looks += 1;
        let text =
            "it uses a GPU without having loaded the share's limits: it speaks to the driver by itself";
        (seen.looks >= LOOKS || are_several).then(|| (Kind::Unlimited, text.to_owned()))
    }

    /// Forgets what was seen long ago, and of this lease what the last look did not see. Call it before each
    /// look.
    pub(super) fn forget(&mut self, lease: i64) {
        self.known.retain(|_, (_, seen)| seen.elapsed() < TRUSTED);
        self.of_lease.retain(|id, (_, is_seen)| *id != lease || std::mem::take(is_seen));
        self.without.retain(|_, one| {
            let is_other = one.lease != lease;
            (is_other || std::mem::take(&mut one.is_seen)) && one.process.as_ref().is_none_or(Process::lives)
        });
    }
}

/// Whether the files are mapped where the process noted it. The kernel is asked for these two places alone.
fn is_as_noted(
    (pid, thread): (u32, u32),
    notes: &[Note],
    limits: FileIdentity,
    libcuda: FileIdentity,
) -> bool {
    let note = || {
        let number = i32::try_from(pid).ok()?;
        let inner = u32::try_from(*process_numbers(number)?.last()?).ok()?;
        let start = process_stat(number).ok()?.starttime;
        let namespace = identity(Path::new(&format!("/proc/{thread}/ns/pid")))?.inode;
        let is_its =
            |note: &&Note| (note.pid, note.start_time, note.pid_namespace) == (inner, start, namespace);
        notes.iter().find(is_its)
    };
    let at = |range: &Range<u64>| {
        identity(Path::new(&format!("/proc/{thread}/map_files/{:x}-{:x}", range.start, range.end)))
    };
    // Some file systems show another device number in maps than for the file itself.
    let is_libcuda = |note: &Note| at(&note.driver).is_some_and(|found| found.inode == libcuda.inode);
    note().is_some_and(|note| at(&note.limits) == Some(limits) && is_libcuda(note))
}

/// The kernel's list of what a process has mapped, as far as it is read, and whether that is all.
fn read_maps(pid: u32) -> Option<(Vec<u8>, bool)> {
    let mut text = Vec::new();
    File::open(format!("/proc/{pid}/maps")).ok()?.take(LONGEST_LIST).read_to_end(&mut text).ok()?;
    let is_whole = (text.len() as u64) < LONGEST_LIST;
    (!text.is_empty()).then_some((text, is_whole))
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
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn maps_are_searched_for_device_and_inode() {
        let maps = b"7f00-7f01 r--s 00000000 00:4d 5   /usr/lib/gpushare/limits\n";
        let file = |device, inode| FileIdentity { device: nix::sys::stat::makedev(0, device), inode };
        assert!(has_mapped(maps, file(0x4d, 5)) && has_inode(maps, 5));
        assert!(
            !has_mapped(maps, file(0x4e, 5)) && !has_mapped(maps, file(0x4d, 55)) && !has_inode(maps, 55)
        );
    }

    #[test]
    #[ignore = "needs root: asks for what a process has mapped"]
    fn what_a_process_noted_counts_only_where_it_is_so() {
        // This program's own file, by its first mapping.
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let range = maps.split(' ').next().unwrap();
        let [start, end] =
            range.split('-').map(|one| u64::from_str_radix(one, 16).unwrap()).collect::<Vec<_>>()[..]
        else {
            panic!("{range}");
        };
        let own = fs::metadata("/proc/self/exe").unwrap();
        let found = identity(Path::new(&format!("/proc/self/map_files/{range}"))).unwrap();
        assert_eq!(found.inode, own.ino());
        let pid = std::process::id();
        let start_time = process_stat(i32::try_from(pid).unwrap()).unwrap().starttime;
        let note = Note {
            pid_namespace: identity(Path::new("/proc/self/ns/pid")).unwrap().inode,
            pid: u32::try_from(*process_numbers(i32::try_from(pid).unwrap()).unwrap().last().unwrap())
                .unwrap(),
            start_time,
            limits: start..end,
            driver: start..end,
        };
        let is_so = |note: Note| is_as_noted((pid, pid), &[note], found, found);
        assert!(is_so(note.clone()));
        assert!(!is_so(Note { limits: 0..4096, ..note.clone() }));
        assert!(!is_so(Note { driver: start..end + 4096, ..note.clone() }));
        assert!(!is_so(Note { start_time: start_time + 1, ..note.clone() }), "an earlier process's");
        assert!(!is_as_noted((pid, pid), &[note], FileIdentity { inode: 1, ..found }, found));
    }
}
