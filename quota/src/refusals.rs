//! The log of recent refusals, since an engine may not show why a container did not start.

use std::path::Path;

use crate::journal::Journal;
use crate::lease::now;
use crate::state::StateFolder;

/// Length limit of a recorded id or reason, in characters.
const LONGEST: usize = 2048;

/// Kinds of reasons; refusals are counted by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Other leases use the requested resources.
    Room,
    /// The node's rules forbid it: a privilege that would bypass the limits, a cordoned GPU, a disabled mode.
    Rules,
    /// The request is invalid, or no GPU of this node could meet it.
    Request,
    /// The container's image cannot run on the GPU or driver that it would get.
    Image,
    /// The settings contain a mistake.
    Settings,
    /// The node failed: driver, files, the store.
    Node,
}

impl Reason {
    /// All kinds.
    pub const ALL: [Self; 6] =
        [Self::Room, Self::Rules, Self::Request, Self::Image, Self::Settings, Self::Node];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Room => "room",
            Self::Rules => "rules",
            Self::Request => "request",
            Self::Image => "image",
            Self::Settings => "settings",
            Self::Node => "node",
        }
    }
}

/// A container that did not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The container's id.
    pub container: String,
    /// The container's name for users; `None` if it is unknown.
    pub name: Option<String>,
    /// Seconds since 1970.
    pub at: u64,
    /// The reason, as reported to the engine.
    pub reason: String,
    /// Its kind; `None` in records of versions that did not write it.
    pub kind: Option<Reason>,
}

impl StateFolder {
    /// Records that `container`, with the display name `name`, was refused. Ignores a failure to write the
    /// record.
    pub fn note_refusal(&self, container: &str, name: Option<&str>, kind: Reason, reason: &str) {
        let plain = |text: &str| -> String {
            text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect()
        };
        let (at, container, reason) = (now(), plain(container), plain(reason));
        let name = plain(name.unwrap_or_default());
        let _ = journal(self.path()).add(&format!("{at}\t{container}\t{reason}\t{}\t{name}", kind.name()));
    }

    /// Returns the recent refusals, newest first.
    pub fn refusals(&self) -> Vec<Refused> {
        journal(self.path()).lines(read)
    }
}

pub(crate) fn journal(state: &Path) -> Journal<'_> {
    Journal { state, name: "refusals", most: 2 << 20, lasts: true }
}

pub(crate) fn read(line: &str) -> Option<Refused> {
    let mut parts = line.splitn(5, '\t');
    let at = parts.next()?.parse().ok()?;
    let (container, reason) = (parts.next()?.to_owned(), parts.next()?.to_owned());
    let kind = parts.next().and_then(|word| Reason::ALL.into_iter().find(|kind| kind.name() == word));
    let name = parts.next().filter(|name| !name.is_empty()).map(str::to_owned);
    Some(Refused { container, name, at, reason, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_of_a_version_that_told_no_kind_is_read() {
        let told = read("17\tweb\tno room");
        let (container, reason) = ("web".to_owned(), "no room".to_owned());
        let want = Refused { container, name: None, at: 17, reason, kind: None };
        assert_eq!(told, Some(want.clone()));
        assert_eq!(read("17\tweb\tno room\troom"), Some(Refused { kind: Some(Reason::Room), ..want }));
    }

    #[test]
    fn the_last_refusals_are_kept_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFolder::open(&folder.path().join("state")).unwrap();
        assert_eq!(state.refusals(), []);
        let long = "x".repeat(5000);
        for number in 0..3000 {
            state.note_refusal(
                &format!("c{number}"),
                Some("web\t"),
                Reason::Room,
                &format!("no room\n{long}"),
            );
        }
        let kept = state.refusals();
        assert_eq!(kept[0].container, "c2999");
        assert!(
            kept[0].reason.starts_with("no room x") && kept[0].reason.len() == LONGEST,
            "{}",
            kept[0].reason
        );
        assert_eq!((kept[0].kind, kept[0].name.as_deref()), (Some(Reason::Room), Some("web ")));
        assert!((1000..3000).contains(&kept.len()), "{}", kept.len());
    }
}
