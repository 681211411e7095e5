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

use gpushare_quota::{Found, note_found};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::clock::Clock;

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
    pub const ALL: [Self; 9] = [
        Self::Limits,
        Self::Files,
        Self::Unlimited,
        Self::FileLease,
        Self::Unreadable,
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
/// How many cgroups of strangers are told apart in that time, since anyone who may make cgroups has any number
/// of them.
const STRANGERS: usize = 10;
/// The most characters of a cgroup's path that are noted.
const LONGEST: usize = 256;

impl Noted {
    /// Notes `violation` below the state folder.
    pub fn note(&mut self, state: &Path, violation: &Violation) {
        self.0.retain(|_, at| at.elapsed() < ONCE_IN);
        let strangers = self.0.keys().filter(|(lease, ..)| lease.is_none()).count();
        if violation.lease.is_none() && strangers >= STRANGERS {
            return;
        }
        let key = (violation.lease, violation.container.clone(), violation.kind.clone());
        let Entry::Vacant(entry) = self.0.entry(key) else { return };
        entry.insert(Instant::now());
        let found = Found {
            at: now().as_secs(),
            lease: violation.lease,
            container: violation.container.chars().take(LONGEST).collect(),
            kind: violation.kind.clone(),
            text: violation.text.clone(),
        };
        if let Err(error) = note_found(state, &found) {
            tracing::warn!(%error, "what was done against a share is left out of the history");
        }
    }
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

/// What the meter saw within the last 5 seconds; empty where none runs.
pub fn read(state: &Path) -> Vec<Violation> {
    let told = told(state);
    let seconds = Duration::from_secs(told["seconds"].as_u64().unwrap_or(0));
    if now().saturating_sub(seconds) > STALE {
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
        }
    }

    #[test]
    fn what_comes_and_goes_is_noted_once_in_a_while() {
        let folder = tempfile::tempdir().unwrap();
        let state = gpushare_quota::StateFolder::open(&folder.path().join("state")).unwrap();
        let (mut noted, mut seen) = (Noted::default(), violation());
        (0..3).for_each(|_| noted.note(state.path(), &seen));
        seen.kind = Kind::Memory.name().to_owned();
        noted.note(state.path(), &seen);
        let kinds: Vec<String> = state.found().into_iter().map(|found| found.kind).collect();
        assert_eq!(kinds, ["memory", "files"]);
        for number in 0..100 {
            let container = format!("/user/{number}{}", "x".repeat(5000));
            noted.note(state.path(), &Violation { lease: None, container, ..violation() });
        }
        let found = state.found();
        assert_eq!(found.len(), 2 + STRANGERS);
        assert!(found.iter().all(|found| found.container.len() <= LONGEST));
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
