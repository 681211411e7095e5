//! Leases (fcntl(2)) that processes have on files which others have to open.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use gpushare_inventory::{FileIdentity, lease_setter};
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};

use super::Budget;

/// The most open files of one container that are looked at.
pub(super) const MOST: usize = 65_536;
/// The most bytes that are read of what the kernel says about one.
const LONGEST: u64 = 64 << 10;

/// A lease on a watched file.
pub(super) struct FileLease {
    /// Path of the file as its watchers know it.
    pub path: PathBuf,
    /// Pid of the process that set it. It may have ended, or have passed its descriptor to another process.
    pub setter: u32,
}

/// Returns the leases that a process has on watched files, each file once. Its open files show them.
pub(super) fn leases(
    pid: u32,
    watched: &HashMap<FileIdentity, PathBuf>,
    budget: &mut Budget,
) -> Vec<FileLease> {
    let mut found: Vec<FileLease> = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        if budget.is_over() {
            break;
        }
        if budget.descriptors == 0 {
            budget.miss("all of its open files");
            break;
        }
        budget.descriptors -= 1;
        let Some((file, path)) = identity(&entry.path()).and_then(|file| Some((file, watched.get(&file)?)))
        else {
            continue;
        };
        if found.iter().any(|lease| lease.path == *path) {
            continue;
        }
        let fdinfo = Path::new(&format!("/proc/{pid}/fdinfo")).join(entry.file_name());
        let Some(text) = read(&fdinfo) else { continue };
        if let Some(setter) = lease_setter(&text, file.inode) {
            found.push(FileLease { path: path.clone(), setter });
        } else if u64::try_from(text.len()).unwrap_or(LONGEST) >= LONGEST {
            budget.miss("all locks of one of its open files");
        }
    }
    found
}

/// The file that a link in /proc leads to. A file system that is a program is not asked.
pub(super) fn identity(link: &Path) -> Option<FileIdentity> {
    let found = statx(CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    let device = makedev(found.stx_dev_major, found.stx_dev_minor);
    Some(FileIdentity { device, inode: found.stx_ino })
}

fn read(path: &Path) -> Option<String> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(LONGEST).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}
