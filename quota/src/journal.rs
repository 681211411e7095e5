//! Lines that are kept for a while, in two files of bounded size: in the folder that outlives a boot, or where
//! there is none, in the state folder.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::fcntl::OFlag;

use crate::state::LASTING;

/// The files `NAME` and `NAME.old`.
pub(crate) struct Journal<'a> {
    pub state: &'a Path,
    pub name: &'static str,
    /// Above this size, in bytes, a new file is begun, and the one before is kept as `NAME.old`.
    pub most: u64,
}

impl Journal<'_> {
    /// Adds a line.
    pub fn add(&self, line: &str) -> io::Result<()> {
        let path = self.newest();
        if fs::symlink_metadata(&path).is_ok_and(|file| file.len() > self.most) {
            let _ = fs::rename(&path, self.older());
        }
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o600).custom_flags(OFlag::O_NOFOLLOW.bits());
        let mut file = options.open(path)?;
        let length = file.metadata()?.len();
        // One call for one line, so that lines of several processes do not mix.
        let written = file.write_all(format!("{line}\n").as_bytes());
        if written.is_err() {
            // On a full disk there may be a part of it, to which the next line would be joined.
            let _ = file.set_len(length);
        }
        written
    }

    /// What `read` makes of the lines, newest first. A line that it does not know is left out.
    pub fn lines<T>(&self, read: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let texts = [self.newest(), self.older()].map(|path| fs::read(path).unwrap_or_default());
        let texts = texts.iter().map(|text| String::from_utf8_lossy(text));
        texts.flat_map(|text| text.lines().rev().filter_map(&read).collect::<Vec<T>>()).collect()
    }

    /// When the last line was added, and the length of the newer file; `None` where there is none.
    pub fn stamp(&self) -> Option<(SystemTime, u64)> {
        let data = fs::symlink_metadata(self.newest()).ok()?;
        Some((data.modified().ok()?, data.len()))
    }

    /// Removes the older file if nothing was added to it since `limit`.
    pub fn forget_before(&self, limit: SystemTime) {
        let is_over = |data: fs::Metadata| data.modified().is_ok_and(|time| time < limit);
        if fs::symlink_metadata(self.older()).is_ok_and(is_over) {
            let _ = fs::remove_file(self.older());
        }
    }

    fn newest(&self) -> PathBuf {
        self.folder().join(self.name)
    }

    fn older(&self) -> PathBuf {
        self.folder().join(format!("{}.old", self.name))
    }

    fn folder(&self) -> PathBuf {
        let lasting = self.state.join(LASTING);
        if lasting.is_dir() { lasting } else { self.state.into() }
    }
}
