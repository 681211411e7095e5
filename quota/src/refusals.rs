//! Notes of the latest refusals, since an engine may not show why a container did not start.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use nix::fcntl::OFlag;

use crate::lease::now;
use crate::state::StateFolder;

/// The file of the latest notes, and the one before it.
const NEWEST: &str = "refusals";
const OLDER: &str = "refusals.old";
/// Above this size, in bytes, a new file is begun.
const MOST: u64 = 64 << 10;
/// The most characters that are kept of an id or a reason.
const LONGEST: usize = 2048;

/// A container that did not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The container's id.
    pub container: String,
    /// Seconds since 1970.
    pub at: u64,
    /// The reason, as the engine was told.
    pub reason: String,
}

impl StateFolder {
    /// Notes that `container` was refused. A failure to write the note is ignored.
    pub fn note_refusal(&self, container: &str, reason: &str) {
        let path = self.path().join(NEWEST);
        if fs::symlink_metadata(&path).is_ok_and(|file| file.len() > MOST) {
            let _ = fs::rename(&path, self.path().join(OLDER));
        }
        let plain = |text: &str| -> String {
            text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect()
        };
        let line = format!("{}\t{}\t{}\n", now(), plain(container), plain(reason));
        let (mut options, flags) = (OpenOptions::new(), OFlag::O_NOFOLLOW.bits());
        let file = options.append(true).create(true).mode(0o600).custom_flags(flags).open(path);
        // One call for one line, so that lines of several processes do not mix.
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }

    /// The latest refusals, newest first.
    pub fn refusals(&self) -> Vec<Refused> {
        let texts = [OLDER, NEWEST].map(|name| fs::read(self.path().join(name)).unwrap_or_default());
        let text = texts.join(&b'\n');
        let mut all: Vec<Refused> = String::from_utf8_lossy(&text).lines().filter_map(refused).collect();
        all.reverse();
        all
    }
}

fn refused(line: &str) -> Option<Refused> {
    let mut parts = line.splitn(3, '\t');
    let at = parts.next()?.parse().ok()?;
    Some(Refused { at, container: parts.next()?.to_owned(), reason: parts.next()?.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_refusals_are_kept_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFolder::open(&folder.path().join("state")).unwrap();
        assert_eq!(state.refusals(), []);
        let long = "x".repeat(5000);
        for number in 0..200 {
            state.note_refusal(&format!("c{number}"), &format!("no room\n{long}"));
        }
        let kept = state.refusals();
        assert_eq!(kept[0].container, "c199");
        assert!(
            kept[0].reason.starts_with("no room x") && kept[0].reason.len() == LONGEST,
            "{}",
            kept[0].reason
        );
        assert!((30..100).contains(&kept.len()), "{}", kept.len());
    }
}
