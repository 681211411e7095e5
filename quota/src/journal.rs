//! Lines that are kept for a while, in two files of bounded size: in the folder that outlives a boot or,
//! without one, in the state folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::fcntl::OFlag;

use crate::state::LASTING;

/// The files `NAME` and `NAME.old`.
pub(crate) struct Journal<'a> {
    pub state: &'a Path,
    pub name: &'static str,
    /// Size limit in bytes. When the file exceeds it, it is renamed to `NAME.old` and a new file begins.
    pub most: u64,
    /// Whether the journal outlives a boot.
    pub lasts: bool,
}

impl Journal<'_> {
    /// Adds a line. Falls back to the state folder if the lasting folder is not writable.
    pub fn add(&self, line: &str) -> io::Result<()> {
        match self.lasting() {
            Some(lasting) => self.add_in(&lasting, line).or_else(|_| self.add_in(self.state, line)),
            None => self.add_in(self.state, line),
        }
    }

    fn add_in(&self, folder: &Path, line: &str) -> io::Result<()> {
        let [path, older] = self.files(folder);
        let mut file = open_to_add(&path)?;
        let mut length = file.metadata()?.len();
        if length > self.most {
            // The first process renamed the file. Processes that waited for the lock find another file in its
            // place.
            file.lock()?;
            if identity(&fs::symlink_metadata(&path)?) == identity(&file.metadata()?) {
                let _ = fs::rename(&path, older);
            }
            file = open_to_add(&path)?;
            length = file.metadata()?.len();
        }
        // On a full disk, an earlier write may have left a partial line. Start a new line after it.
        let is_whole = length == 0 || ends_line(&file, length)?;
        let begin = if is_whole { "" } else { "\n" };
        // Write each line in one call, so that lines of several processes do not mix.
        file.write_all(format!("{begin}{line}\n").as_bytes())
    }

    /// Parses the lines with `read`, newest first, and skips lines that it does not know. Lines in the state
    /// folder come first: they were written while the lasting folder was not writable.
    pub fn lines<T>(&self, read: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let folders = [Some(self.state.to_path_buf()), self.lasting()].into_iter().flatten();
        folders
            .flat_map(|folder| self.texts(&folder))
            .flat_map(|text| {
                let text = String::from_utf8_lossy(&text);
                text.lines().rev().filter_map(&read).collect::<Vec<T>>()
            })
            .collect()
    }

    /// Removes the older file if its last line was added before `limit`.
    pub fn forget_before(&self, limit: SystemTime) {
        let [_, older] = self.files(&self.lasting().unwrap_or_else(|| self.state.into()));
        let is_over = |data: fs::Metadata| data.modified().is_ok_and(|time| time < limit);
        if fs::symlink_metadata(&older).is_ok_and(is_over) {
            let _ = fs::remove_file(older);
        }
    }

    /// The bytes of the newer and the older file, up to the size that this journal's files can reach. Skips a
    /// file that is not a regular file.
    fn texts(&self, folder: &Path) -> Vec<Vec<u8>> {
        let mut files: Vec<File> =
            self.files(folder).iter().filter_map(|path| open_to_read(path).ok()).collect();
        // The newer file may have become the older one between the two opens.
        let identity = |file: &File| file.metadata().ok().as_ref().map(identity);
        files.dedup_by(|one, other| identity(one) == identity(other));
        files.iter().map(|file| read_from(file, 0, 2 * self.most + LONGEST)).collect()
    }

    fn files(&self, folder: &Path) -> [PathBuf; 2] {
        [folder.join(self.name), folder.join(format!("{}.old", self.name))]
    }

    fn lasting(&self) -> Option<PathBuf> {
        Some(self.state.join(LASTING)).filter(|folder| self.lasts && folder.is_dir())
    }
}

/// Upper bound on the length of a line, in bytes.
const LONGEST: u64 = 1 << 20;
/// Do not follow links, and do not block on a FIFO.
const FLAGS: OFlag = OFlag::O_NOFOLLOW.union(OFlag::O_NONBLOCK);

fn open_to_add(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    // Read access is only needed for the last byte.
    options.read(true).append(true).create(true).mode(0o600).custom_flags(FLAGS.bits());
    regular(options.open(path)?)
}

fn ends_line(file: &File, length: u64) -> io::Result<bool> {
    let mut last = [0];
    // The file may have grown meanwhile, but then this byte is still the end of a line.
    file.read_exact_at(&mut last, length - 1)?;
    Ok(last == *b"\n")
}

/// Device and inode.
fn identity(data: &fs::Metadata) -> (u64, u64) {
    (data.dev(), data.ino())
}

/// Reads lines that are added to a journal from now on, each line once, across rotations and in both folders.
#[derive(Debug, Default)]
pub(crate) struct Follower {
    /// In the state folder, and in the lasting one.
    places: [Place; 2],
}

/// The position up to which one folder's file was read.
#[derive(Debug, Default)]
struct Place {
    /// The file's identity; `None` if no file was seen yet.
    file: Option<(u64, u64)>,
    /// Number of bytes read.
    read: u64,
}

impl Follower {
    /// Starts at the current end.
    pub fn of(journal: &Journal<'_>) -> Self {
        let mut follower = Self::default();
        follower.lines(journal, |_| Some(()));
        follower
    }

    /// Parses the lines that were added since the last call with `read`, oldest first.
    pub fn lines<T>(&mut self, journal: &Journal<'_>, read: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let folders = [Some(journal.state.to_path_buf()), journal.lasting()];
        let mut all = Vec::new();
        for (place, folder) in self.places.iter_mut().zip(folders) {
            let Some(folder) = folder else { continue };
            let text = place.new_text(&journal.files(&folder), 2 * journal.most + LONGEST);
            all.extend(String::from_utf8_lossy(&text).lines().filter_map(&read));
        }
        all
    }
}

impl Place {
    /// Whole lines that were not read yet, of at most `most` bytes. If a file replaced the known one other
    /// than by rotation, its lines are not new: reading starts at its current end.
    fn new_text(&mut self, [path, older]: &[PathBuf; 2], most: u64) -> Vec<u8> {
        let Ok(file) = open_to_read(path) else { return Vec::new() };
        let Ok(data) = file.metadata() else { return Vec::new() };
        let mut text = Vec::new();
        match self.file {
            Some(known) if known == identity(&data) => {}
            Some(known) => {
                let rotated = open_to_read(older)
                    .ok()
                    .filter(|older| older.metadata().is_ok_and(|data| identity(&data) == known));
                match rotated {
                    Some(older) => {
                        text = read_from(&older, self.read, most);
                        self.read = 0;
                    }
                    None => self.read = data.len(),
                }
            }
            None => self.read = 0,
        }
        self.file = Some(identity(&data));
        // The file may have been truncated by hand.
        self.read = self.read.min(data.len());
        let mut new = read_from(&file, self.read, most);
        new.truncate(new.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
        self.read += new.len() as u64;
        text.extend(new);
        text
    }
}

fn open_to_read(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(FLAGS.bits()).open(path).and_then(regular)
}

fn read_from(file: &File, from: u64, most: u64) -> Vec<u8> {
    let mut text = Vec::new();
    let mut file = file;
    // Ignore read errors: the next call retries.
    let _ = file.seek(SeekFrom::Start(from)).and_then(|_| file.take(most).read_to_end(&mut text));
    text
}

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
    fn a_file_that_is_renamed_while_both_are_read_counts_once() {
        let root = tempfile::tempdir().unwrap();
        let state = StateFolder::open(&root.path().join("state")).unwrap();
        journal(&state).add("one").unwrap();
        // This is the state that a reader sees if the file is renamed between its two opens.
        fs::hard_link(state.path().join("lines"), state.path().join("lines.old")).unwrap();
        assert_eq!(lines(&state), ["one"]);
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
        // A FIFO in its place must not block the writer or the reader.
        fs::remove_file(lasting.join("lines")).unwrap();
        nix::unistd::mkfifo(&lasting.join("lines"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        journal(&state).add("piped").unwrap();
        assert!(lines(&state).contains(&"piped".to_owned()));
        // A folder that others may write to is no longer trusted.
        fs::set_permissions(&lasting, fs::Permissions::from_mode(0o777)).unwrap();
        state.keep_history_in(&lasting);
        assert!(!state.path().join(LASTING).exists());
        let elsewhere = root.path().join("elsewhere");
        fs::DirBuilder::new().mode(0o700).create(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, root.path().join("link")).unwrap();
        state.keep_history_in(&root.path().join("link"));
        assert!(!state.path().join(LASTING).exists(), "a link may lead anywhere later");
    }

    fn state(root: &Path) -> StateFolder {
        StateFolder::open(&root.join("state")).unwrap()
    }

    #[test]
    fn each_new_line_is_followed_once_over_rotations_and_changes_of_the_folder() {
        let root = tempfile::tempdir().unwrap();
        let state = state(root.path());
        let lasting = root.path().join("lasting");
        state.keep_history_in(&lasting);
        let journal = journal(&state);
        journal.add("before").unwrap();
        let mut follower = Follower::of(&journal);
        let mut new = || follower.lines(&journal, |line| Some(line.to_owned()));
        assert_eq!(new(), [""; 0]);
        let long = "x".repeat(600);
        ["a", &long, &long, "b", "c"].into_iter().for_each(|line| journal.add(line).unwrap());
        assert!(lasting.join("lines.old").exists(), "it was rotated meanwhile");
        assert_eq!(new(), ["a", &long, &long, "b", "c"]);
        assert_eq!(new(), [""; 0]);
        // The folder disappears and comes back: nothing in it is new. Meanwhile lines go to the state folder.
        let away = root.path().join("away");
        fs::rename(&lasting, &away).unwrap();
        journal.add("elsewhere").unwrap();
        assert_eq!(new(), ["elsewhere"]);
        fs::rename(&away, &lasting).unwrap();
        assert_eq!(new(), [""; 0]);
        journal.add("d").unwrap();
        assert_eq!(new(), ["d"]);
        // A file copied in from elsewhere has no new lines.
        fs::copy(lasting.join("lines.old"), lasting.join("copy")).unwrap();
        fs::rename(lasting.join("copy"), lasting.join("lines")).unwrap();
        assert_eq!(new(), [""; 0]);
        journal.add("e").unwrap();
        assert_eq!(new(), ["e"]);
    }

    #[test]
    fn a_cut_line_takes_no_other_with_it() {
        let root = tempfile::tempdir().unwrap();
        let state = state(root.path());
        journal(&state).add("whole").unwrap();
        fs::write(state.path().join("lines"), "whole\ncut of").unwrap();
        journal(&state).add("next").unwrap();
        assert_eq!(lines(&state), ["next", "cut of", "whole"]);
    }

    #[test]
    fn writers_that_rotate_at_once_lose_nothing() {
        let root = tempfile::tempdir().unwrap();
        let state = state(root.path());
        let path = state.path().join("lines");
        for _ in 0..50 {
            fs::write(&path, format!("{}\n", "x".repeat(1001))).unwrap();
            std::thread::scope(|scope| {
                (0..4).for_each(|_| drop(scope.spawn(|| journal(&state).add("new").unwrap())));
            });
            assert!(fs::metadata(path.with_extension("old")).unwrap().len() > 1000);
        }
    }
}
