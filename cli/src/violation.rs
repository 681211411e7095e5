//! What containers do against their shares, as the meter last saw it. The meter writes it into the state
//! folder; `ps`, `doctor` and scripts read it there.
//!
//! Limits live in a container's own processes, so they cannot stop an adversary. But going past a limit is
//! always seen.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpushare_quota::{Found, Lease, note_found};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::clock::Clock;
use crate::container::ids;

/// A file older than this is of a meter that has ended.
const STALE: Duration = Duration::from_secs(5);

/// One thing that a container does against its share, as it stands in the file and in `ps --json`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Violation {
    /// The lease's id; `None` for processes of no lease.
    pub lease: Option<i64>,
    /// The container's id, or the cgroup of a process of no lease.
    pub container: String,
    /// The process's pid on the host, where a single process does it.
    pub pid: Option<u32>,
    /// What it does, by [`Kind::name`].
    pub kind: String,
    /// The same in words.
    pub text: String,
    /// The process's start time, in clock ticks after boot, where that is what proves it.
    #[serde(skip)]
    pub born: Option<u64>,
    /// Whether it is reported but proves nothing against the container.
    #[serde(skip)]
    pub is_hint: bool,
}

impl Violation {
    /// A violation by a container of `lease`.
    pub fn by(lease: &Lease, pid: Option<u32>, kind: Kind, text: String) -> Self {
        let (lease, container) = (Some(lease.id), ids(lease).join(", "));
        Self { lease, container, pid, kind: kind.name().to_owned(), text, born: None, is_hint: false }
    }

    /// Whether it is against a share: a container that is too much to be searched may be an honest one.
    pub fn is_cheating(&self) -> bool {
        self.kind != Kind::Unsearched.name()
    }
}

/// Kinds of violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A limits file said something else than the lease, and was mended.
    Limits,
    /// Another file lies where the lease's limits, books or driver should be.
    Files,
    /// A process uses a GPU and has not loaded the limits.
    Unlimited,
    /// A lease on a file (fcntl(2)), for which others would have to wait.
    FileLease,
    /// Limits or books that cannot be read.
    Unreadable,
    /// More processes, files, mounts or mappings than are searched.
    Unsearched,
    /// Device memory beyond limit and slack.
    Memory,
    /// Device memory by a call that was changed on its way past the supervisor.
    Race,
    /// GPU time beyond the share.
    Compute,
    /// A process of no lease uses a shared GPU.
    Stranger,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Limits,
        Self::Files,
        Self::Unlimited,
        Self::FileLease,
        Self::Unreadable,
        Self::Unsearched,
        Self::Memory,
        Self::Race,
        Self::Compute,
        Self::Stranger,
    ];

    /// The word in JSON and in the log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Limits => "limits",
            Self::Files => "files",
            Self::Unlimited => "unlimited",
            Self::FileLease => "file-lease",
            Self::Unreadable => "unreadable",
            Self::Unsearched => "unsearched",
            Self::Memory => "memory",
            Self::Race => "race",
            Self::Compute => "compute",
            Self::Stranger => "stranger",
        }
    }
}

/// What was noted for `gpushare logs`. What comes and goes is noted once in a while, so that nobody fills the
/// notes, or pushes out what others did.
#[derive(Debug, Default)]
pub struct Noted(HashMap<(Option<i64>, String, String), Instant>);

/// The same is noted again after this time.
const ONCE_IN: Duration = Duration::from_secs(600);
/// How many cgroups of strangers are told apart in that time, since anyone who may make cgroups has any
/// number of them.
const STRANGERS: usize = 10;
/// The most characters of a container's name, or a cgroup's path, and of a text.
const LONGEST: usize = 512;
/// The most rows of one container and kind.
const MOST_ROWS: usize = 4;
/// The most rows of strangers.
const MOST_STRANGERS: usize = 32;

impl Noted {
    /// Notes `violation` below the state folder, if it is against a share. Returns whether it is one that was
    /// not there of late.
    pub fn note(&mut self, state: &Path, violation: &Violation) -> bool {
        self.0.retain(|_, at| at.elapsed() < ONCE_IN);
        let is_stranger = |kind: &str| kind == Kind::Stranger.name();
        let strangers = self.0.keys().filter(|(.., kind)| is_stranger(kind)).count();
        if is_stranger(&violation.kind) && strangers >= STRANGERS {
            return false;
        }
        let key = (violation.lease, violation.container.clone(), violation.kind.clone());
        let Entry::Vacant(entry) = self.0.entry(key) else { return false };
        entry.insert(Instant::now());
        if !violation.is_cheating() {
            return true;
        }
        let found = Found {
            at: now().as_secs(),
            lease: violation.lease,
            container: violation.container.clone(),
            kind: violation.kind.clone(),
            text: violation.text.clone(),
        };
        if let Err(error) = note_found(state, &found) {
            tracing::warn!(%error, "what was done against a share is left out of the history");
        }
        true
    }
}

/// At most so many rows of each container and kind, the last of which counts the others, with texts of
/// bounded length: nobody pushes a neighbour's out.
pub fn bounded(mut found: Vec<Violation>) -> Vec<Violation> {
    // Proofs first, and the same processes each time.
    found.sort_by(|a, b| (a.lease, &a.kind, a.is_hint, a.pid).cmp(&(b.lease, &b.kind, b.is_hint, b.pid)));
    let mut kept: Vec<Violation> = Vec::new();
    for rows in found.chunk_by(|a, b| (a.lease, &a.kind) == (b.lease, &b.kind)) {
        let most = if rows[0].lease.is_none() { MOST_STRANGERS } else { MOST_ROWS };
        kept.extend(rows.iter().take(most).map(|row| {
            let short = |text: &str| text.chars().take(LONGEST).collect();
            Violation { container: short(&row.container), text: short(&row.text), ..row.clone() }
        }));
        let more = rows.len().saturating_sub(most);
        if let Some(last) = kept.last_mut().filter(|_| more > 0) {
            let whose = if last.lease.is_none() { "such" } else { "of its" };
            last.text = format!("{}; and {more} more {whose} processes", last.text);
        }
    }
    kept
}

fn path(state: &Path) -> PathBuf {
    state.join("violations.json")
}

/// Replaces the file by `violations`, the time, and the ids of the leases whose containers the meter has
/// stopped.
///
/// # Errors
/// When the file cannot be written.
pub fn write(state: &Path, violations: &[Violation], frozen: impl Iterator<Item = i64>) -> io::Result<()> {
    let frozen: Vec<i64> = frozen.collect();
    let text = json!({"seconds": now().as_secs(), "violations": violations, "frozen": frozen}).to_string();
    let unfinished = state.join("violations.new");
    fs::write(&unfinished, text)?;
    fs::rename(unfinished, path(state))
}

/// Whether a meter has written the file within the last 5 seconds.
pub fn is_fresh(state: &Path) -> bool {
    is_of_now(&told(state))
}

fn is_of_now(told: &Value) -> bool {
    let seconds = Duration::from_secs(told["seconds"].as_u64().unwrap_or(0));
    now().saturating_sub(seconds) <= STALE
}

/// What the meter saw within the last 5 seconds; empty where none runs.
pub fn read(state: &Path) -> Vec<Violation> {
    let told = told(state);
    if !is_of_now(&told) {
        return Vec::new();
    }
    let all = told["violations"].as_array().into_iter().flatten();
    all.filter_map(|violation| Violation::deserialize(violation).ok()).collect()
}

/// The ids of the leases whose containers a meter has stopped, however long ago.
pub fn frozen(state: &Path) -> Vec<i64> {
    told(state)["frozen"].as_array().into_iter().flatten().filter_map(Value::as_i64).collect()
}

/// What the file says; null where there is none.
fn told(state: &Path) -> Value {
    serde_json::from_slice(&fs::read(path(state)).unwrap_or_default()).unwrap_or_default()
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.container)?;
        if let Some(pid) = self.pid {
            write!(f, ", process {pid}")?;
        }
        write!(f, ": {}", self.text)
    }
}

fn now() -> Duration {
    Duration::from_nanos(Clock::now().wall)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn violation() -> Violation {
        Violation {
            lease: Some(7),
            container: "web".to_owned(),
            pid: Some(4711),
            kind: Kind::Files.name().to_owned(),
            text: "x".to_owned(),
            born: None,
            is_hint: false,
        }
    }

    #[test]
    fn what_comes_and_goes_is_noted_once_in_a_while() {
        let folder = tempfile::tempdir().unwrap();
        let state = gpushare_quota::StateFolder::open(&folder.path().join("state")).unwrap();
        let (mut noted, mut seen) = (Noted::default(), violation());
        assert_eq!([(); 3].map(|()| noted.note(state.path(), &seen)), [true, false, false]);
        seen.kind = Kind::Memory.name().to_owned();
        assert!(noted.note(state.path(), &seen));
        seen.pid = Some(1);
        assert!(!noted.note(state.path(), &seen), "another process of the same container");
        let kinds: Vec<String> = state.found().into_iter().map(|found| found.kind).collect();
        assert_eq!(kinds, ["memory", "files"]);
        for number in 0..100 {
            let container = format!("/user/{number}{}", "x".repeat(5000));
            let kind = Kind::Stranger.name().to_owned();
            let stranger = Violation { lease: None, container, kind, ..violation() };
            let _ = noted.note(state.path(), &bounded(vec![stranger])[0]);
        }
        let found = state.found();
        assert_eq!(found.len(), 2 + STRANGERS);
        assert!(found.iter().all(|found| found.container.len() <= LONGEST));
        let node = Violation { lease: None, kind: Kind::FileLease.name().to_owned(), ..violation() };
        assert!(noted.note(state.path(), &node), "strangers push nothing else out");
    }

    #[test]
    fn nobody_has_more_than_a_few_rows_and_each_kind_has_its_own() {
        let of = |lease, pid, kind: Kind| Violation {
            lease,
            pid: Some(pid),
            kind: kind.name().to_owned(),
            text: "x".repeat(5000),
            ..violation()
        };
        let many = (0..12_000).map(|pid| of(Some(1), pid, Kind::Unlimited));
        let strangers = (0..500).map(|pid| of(None, pid, Kind::Stranger));
        let others = [of(Some(2), 9, Kind::Unlimited), of(Some(1), 9, Kind::Memory)];
        let kept = bounded(many.chain(strangers).chain(others.clone()).collect());
        let rows = |lease, kind: Kind| {
            kept.iter()
                .filter(move |one| (one.lease, one.kind.as_str()) == (lease, kind.name()))
                .collect::<Vec<_>>()
        };
        assert_eq!(rows(Some(1), Kind::Unlimited).len(), MOST_ROWS);
        let last = rows(Some(1), Kind::Unlimited)[MOST_ROWS - 1];
        assert!(last.text.ends_with("; and 11996 more of its processes"), "{}", last.text);
        assert!(last.text.len() < LONGEST + 60);
        assert_eq!(rows(None, Kind::Stranger).len(), MOST_STRANGERS);
        assert_eq!([rows(Some(2), Kind::Unlimited).len(), rows(Some(1), Kind::Memory).len()], [1, 1]);
    }

    #[test]
    fn what_was_written_is_read_until_it_is_old() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()), []);
        let seen = [violation()];
        write(folder.path(), &seen, [7].into_iter()).unwrap();
        assert_eq!(frozen(folder.path()), [7]);
        assert_eq!(read(folder.path()), seen);
        let text = fs::read_to_string(path(folder.path())).unwrap();
        let old = format!("\"seconds\":{}", now().as_secs() - 60);
        let seconds = format!("\"seconds\":{}", serde_json::from_str::<Value>(&text).unwrap()["seconds"]);
        fs::write(path(folder.path()), text.replace(&seconds, &old)).unwrap();
        assert_eq!(read(folder.path()), []);
        fs::write(path(folder.path()), "{\"seconds\": [").unwrap();
        assert_eq!(read(folder.path()), []);
    }
}
