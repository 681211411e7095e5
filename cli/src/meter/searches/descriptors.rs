//! Leases (fcntl(2)) that processes have on files which others have to open.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use gpushare_inventory::{FileIdentity, has_lease};
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};

use super::Budget;

/// The most open files of one container that are looked at.
pub(super) const MOST: usize = 65_536;
/// The most bytes that are read of what the kernel says about one.
const LONGEST: u64 = 64 << 10;

/// What leases a process has on watched files, in words. An open file of it shows them: who set a lease may
/// have ended, and left the file to others.
pub(super) fn leases(pid: u32, watched: &HashMap<FileIdentity, PathBuf>, budget: &mut Budget) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        if budget.descriptors == 0 || budget.is_over() {
            budget.miss("all of its open files");
            break;
        }
        budget.descriptors -= 1;
        let Some((file, path)) = identity(&entry.path()).and_then(|file| Some((file, watched.get(&file)?)))
        else {
            continue;
        };
        let told = Path::new(&format!("/proc/{pid}/fdinfo")).join(entry.file_name());
        let Some(text) = read(&told) else { continue };
        if has_lease(&text, file.inode) {
            found
                .push(format!("it has a lease (F_SETLEASE) on {}: others would wait for it", path.display()));
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
