//! Lines that are kept for a while, in two files of bounded size: in the folder that outlives a boot, or where
//! there is none, in the state folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::fcntl::OFlag;

use crate::state::LASTING;

/// When a line was added last, and the length of the newer file in bytes.
pub type Stamp = (SystemTime, u64);

/// The files `NAME` and `NAME.old`.
pub(crate) struct Journal<'a> {
    pub state: &'a Path,
    pub name: &'static str,
    /// Above this size, in bytes, a new file is begun, and the one before is kept as `NAME.old`.
    pub most: u64,
    /// Whether it outlives a boot.
    pub lasts: bool,
}

impl Journal<'_> {
    /// Adds a line, in the state folder where the lasting one cannot be written to.
    pub fn add(&self, line: &str) -> io::Result<()> {
        match self.lasting() {
            Some(lasting) => self.add_in(&lasting, line).or_else(|_| self.add_in(self.state, line)),
            None => self.add_in(self.state, line),
        }
    }

    fn add_in(&self, folder: &Path, line: &str) -> io::Result<()> {
        let [path, older] = self.files(folder);
        if fs::symlink_metadata(&path).is_ok_and(|file| file.len() > self.most) {
            let _ = fs::rename(&path, older);
        }
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o600).custom_flags(FLAGS.bits());
        let mut file = regular(options.open(path)?)?;
        let length = file.metadata()?.len();
        // One call for one line, so that lines of several processes do not mix.
        let written = file.write_all(format!("{line}\n").as_bytes());
        if written.is_err() {
            // On a full disk there may be a part of it, to which the next line would be joined.
            let _ = file.set_len(length);
        }
        written
    }

    /// What `read` makes of the lines, newest first. A line that it does not know is left out. What stands in
    /// the state folder was written there while nothing else could be.
    pub fn lines<T>(&self, read: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let folders = [Some(self.state.to_path_buf()), self.lasting()].into_iter().flatten();
        let texts = folders.flat_map(|folder| self.files(&folder)).map(|path| self.text(&path));
        texts
            .flat_map(|text| {
                let text = String::from_utf8_lossy(&text);
                text.lines().rev().filter_map(&read).collect::<Vec<T>>()
            })
            .collect()
    }

    /// What `read` makes of the lines behind the first `length` bytes of the newer file, or of all where it
    /// has fewer, oldest first.
    pub fn lines_behind<T>(&self, length: u64, read: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let text = self.text(&self.newest());
        let from = usize::try_from(length).unwrap_or(usize::MAX);
        let new = text.get(from..).unwrap_or(&text);
        String::from_utf8_lossy(new).lines().filter_map(read).collect()
    }

    /// Changes with each line; `None` where there is none.
    pub fn stamp(&self) -> Option<Stamp> {
        let data = fs::symlink_metadata(self.newest()).ok()?;
        Some((data.modified().ok()?, data.len()))
    }

    /// Removes the older file if nothing was added to it since `limit`.
    pub fn forget_before(&self, limit: SystemTime) {
        let [_, older] = self.files(&self.lasting().unwrap_or_else(|| self.state.into()));
        let is_over = |data: fs::Metadata| data.modified().is_ok_and(|time| time < limit);
        if fs::symlink_metadata(&older).is_ok_and(is_over) {
            let _ = fs::remove_file(older);
        }
    }

    /// The file's bytes, as far as files of this journal grow; none where it is no regular file.
    fn text(&self, path: &Path) -> Vec<u8> {
        let file = OpenOptions::new().read(true).custom_flags(FLAGS.bits()).open(path).and_then(regular);
        let mut text = Vec::new();
        if let Ok(file) = file {
            let _ = file.take(2 * self.most + LONGEST).read_to_end(&mut text);
        }
        text
    }

    fn newest(&self) -> PathBuf {
        let [newest, _] = self.files(&self.lasting().unwrap_or_else(|| self.state.into()));
        newest
    }

    fn files(&self, folder: &Path) -> [PathBuf; 2] {
        [folder.join(self.name), folder.join(format!("{}.old", self.name))]
    }

    fn lasting(&self) -> Option<PathBuf> {
        Some(self.state.join(LASTING)).filter(|folder| self.lasts && folder.is_dir())
    }
}

/// More than a line has, in bytes.
const LONGEST: u64 = 1 << 20;
/// Neither a link is followed nor a pipe waited for.
const FLAGS: OFlag = OFlag::O_NOFOLLOW.union(OFlag::O_NONBLOCK);

fn regular(file: File) -> io::Result<File> {
    let is_one = file.metadata()?.is_file();
    if is_one { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

    use super::*;
    use crate::state::StateFolder;

    fn journal(state: &StateFolder) -> Journal<'_> {
        Journal { state: state.path(), name: "lines", most: 1000, lasts: true }
    }

    fn lines(state: &StateFolder) -> Vec<String> {
        journal(state).lines(|line| Some(line.to_owned()))
    }

    #[test]
    fn what_cannot_be_kept_in_the_lasting_folder_is_kept_in_the_state_folder() {
        let root = tempfile::tempdir().unwrap();
        let state = StateFolder::open(&root.path().join("state")).unwrap();
        let lasting = root.path().join("lasting");
        journal(&state).add("before").unwrap();
        state.keep_history_in(&lasting);
        journal(&state).add("kept").unwrap();
        assert!(fs::read_to_string(lasting.join("lines")).unwrap().contains("kept"));
        assert_eq!(lines(&state).len(), 2, "what was noted before is not lost");
        // A pipe in its place is neither waited for nor read.
        fs::remove_file(lasting.join("lines")).unwrap();
        nix::unistd::mkfifo(&lasting.join("lines"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        journal(&state).add("piped").unwrap();
        assert!(lines(&state).contains(&"piped".to_owned()));
        // A folder into which others may write is none of ours any more.
        fs::set_permissions(&lasting, fs::Permissions::from_mode(0o777)).unwrap();
        state.keep_history_in(&lasting);
        assert!(!state.path().join(LASTING).exists());
        let elsewhere = root.path().join("elsewhere");
        fs::DirBuilder::new().mode(0o700).create(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, root.path().join("link")).unwrap();
        state.keep_history_in(&root.path().join("link"));
        assert!(!state.path().join(LASTING).exists(), "a link may lead anywhere later");
    }

    #[test]
    fn new_lines_are_counted_also_in_a_file_that_was_begun_anew() {
        let root = tempfile::tempdir().unwrap();
        let state = StateFolder::open(&root.path().join("state")).unwrap();
        let length = |journal: &Journal| journal.stamp().map_or(0, |(_, length)| length);
        let journal = journal(&state);
        let behind = |length: u64| journal.lines_behind(length, |_| Some(())).len();
        (0..3).for_each(|_| journal.add("a line").unwrap());
        let before = length(&journal);
        assert_eq!(behind(0), 3);
        (0..2).for_each(|_| journal.add("the same").unwrap());
        assert_eq!(behind(before), 2);
        journal.add(&"x".repeat(1000)).unwrap();
        journal.add("anew").unwrap();
        assert_eq!(behind(2000), 1);
    }
}
