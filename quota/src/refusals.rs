//! Notes of the latest refusals, since an engine may not show why a container did not start.

use std::time::SystemTime;

use crate::journal::Journal;
use crate::lease::now;
use crate::state::StateFolder;

/// The most characters that are kept of an id or a reason.
const LONGEST: usize = 2048;

/// The time of the last change of the notes, and their length.
pub type RefusalsStamp = (SystemTime, u64);

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
        let plain = |text: &str| -> String {
            text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect()
        };
        let _ = self.refused_journal().add(&format!("{}\t{}\t{}", now(), plain(container), plain(reason)));
    }

    /// The latest refusals, newest first.
    pub fn refusals(&self) -> Vec<Refused> {
        self.refused_journal().lines(refused)
    }

    /// Tells whether there were new refusals: it changes with each.
    pub fn refusals_stamp(&self) -> Option<RefusalsStamp> {
        self.refused_journal().stamp()
    }

    /// How many refusals stand behind the first `length` bytes of the newer file, or in all of it where that
    /// was begun anew.
    pub fn refusals_behind(&self, length: u64) -> u64 {
        self.refused_journal().lines_behind(length)
    }

    pub(crate) fn refused_journal(&self) -> Journal<'_> {
        Journal { state: self.path(), name: "refusals", most: 2 << 20 }
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
        for number in 0..3000 {
            state.note_refusal(&format!("c{number}"), &format!("no room\n{long}"));
        }
        let kept = state.refusals();
        assert_eq!(kept[0].container, "c2999");
        assert!(
            kept[0].reason.starts_with("no room x") && kept[0].reason.len() == LONGEST,
            "{}",
            kept[0].reason
        );
        assert!((1000..3000).contains(&kept.len()), "{}", kept.len());
    }
}
