//! Searches the processes of containers for what they do against their shares from inside: files mounted over
//! the lease's own, GPU programs without the limits, leases on files for which others would wait. It uses what
//! the kernel says of the processes, never what they wrote.
//!
//! A container, or its image, decides how much there is to be searched. So a thread of its own searches, each
//! container within bounds of entries, bytes and time, and nobody waits for it. A container beyond them is
//! named, and so is one whose search has not come back. A process counts only as long as it lives and is in
//! the container's cgroup, so that nobody is taken for an earlier process of his number.

mod descriptors;
mod limits;
mod mounts;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use gpushare_inject::Region;
use gpushare_inventory::FileIdentity;
use gpushare_quota::{Lease, cgroup_of};

use self::limits::Limited;
use self::limits::Note;
use self::mounts::{Expected, Mounts};
use super::kept::Kept;
use super::process::Process;
use crate::violation::{Kind, Violation};

/// The most processes of one container that are searched at a time.
const MOST_PROCESSES: usize = 4096;
/// The longest that one container may take at a time.
const LONGEST: Duration = Duration::from_millis(500);
/// After how long a search counts as one that does not come back.
const STUCK: Duration = Duration::from_secs(1);
/// How often a single search looks whether it has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// What is to be searched.
pub struct Subject {
    /// Whose containers.
    leases: Vec<Lease>,
    /// Their processes that use a GPU, by lease.
    on_gpu: HashMap<i64, HashSet<u32>>,
    /// What their processes noted in their books, by lease.
    notes: HashMap<i64, Vec<Note>>,
    /// Files on which nobody may have a lease.
    watched: HashMap<FileIdentity, PathBuf>,
}

impl Subject {
    /// The containers of `leases`, of which those processes use a GPU.
    pub fn of(kept: &Kept, leases: &[Lease], on_gpu: HashMap<i64, HashSet<u32>>) -> Self {
        let noted = |id: &i64| {
            let listed = kept.usage(*id).and_then(|file| Region::processes_in(file).ok());
            (*id, listed.unwrap_or_default().iter().filter_map(Note::of).collect())
        };
        let notes = on_gpu.keys().map(noted).collect();
        Self { leases: leases.to_vec(), on_gpu, notes, watched: kept.watched() }
    }
}

/// What is left of one container's bounds.
struct Budget {
    until: Instant,
    lists: usize,
    descriptors: usize,
    /// What was not searched.
    missed: BTreeSet<&'static str>,
}

impl Budget {
    fn new() -> Self {
        let until = Instant::now() + LONGEST;
        Self { until, lists: mounts::MOST_LISTS, descriptors: descriptors::MOST, missed: BTreeSet::new() }
    }

    /// Takes note of something that was not searched.
    fn miss(&mut self, what: &'static str) {
        self.missed.insert(what);
    }

    fn is_over(&mut self) -> bool {
        let is_over = Instant::now() >= self.until;
        if is_over {
            self.miss("all of its processes in time");
        }
        is_over
    }
}

/// Searches containers, one after the other.
struct Searcher {
    state: PathBuf,
    libcuda: PathBuf,
    mounts: Mounts,
    limited: Limited,
}

impl Searcher {
    fn new(state: &Path, libcuda: &Path) -> Self {
        let (mounts, limited) = (Mounts::default(), Limited::default());
        Self { state: state.into(), libcuda: libcuda.into(), mounts, limited }
    }

    /// `begin` is told which lease's containers are next.
    fn search(&mut self, subject: &Subject, mut begin: impl FnMut(i64)) -> Vec<Violation> {
        self.limited.forget();
        self.mounts.retain(&subject.leases);
        let mut found = Vec::new();
        for lease in &subject.leases {
            begin(lease.id);
            found.extend(self.search_one(lease, subject));
        }
        found
    }

    fn search_one(&mut self, lease: &Lease, subject: &Subject) -> Vec<Violation> {
        let mut budget = Budget::new();
        let on_gpu = subject.on_gpu.get(&lease.id).cloned().unwrap_or_default();
        let mut pids: Vec<u32> = on_gpu.iter().copied().collect();
        pids.sort_unstable();
        for member in lease.members() {
            let (some, is_all) = member.holder.some_processes(MOST_PROCESSES);
            pids.extend(some.into_iter().filter(|pid| !on_gpu.contains(pid)));
            if !is_all {
                budget.miss("all of its processes");
            }
        }
        if pids.len() > MOST_PROCESSES {
            budget.miss("all of its processes");
            pids.truncate(MOST_PROCESSES);
        }
        let needs_libraries = lease.needs_libraries();
        let expected = needs_libraries.then(|| {
            let region = Region::of(&self.state, lease.id);
            Expected::of(&region, self.mounts.identities(&region, lease.id), lease, &self.libcuda)
        });
        let notes = subject.notes.get(&lease.id).map_or(&[][..], Vec::as_slice);
        let mut views = self.mounts.begin(lease.id);
        let mut found = Vec::new();
        for pid in pids {
            if budget.is_over() {
                break;
            }
            let Some(process) = Process::open(pid).filter(|_| is_in(lease, pid)) else { continue };
            let mut its = Vec::new();
            if let Some(expected) = &expected {
                let uses_gpu = on_gpu.contains(&pid);
                let wrong = views.look(pid, uses_gpu, expected, &mut budget);
                let is_judged = matches!(wrong, Some((Kind::Files, _)));
                its.extend(wrong);
                if !is_judged && uses_gpu {
                    its.extend(self.limited.look(pid, expected, notes, &mut budget));
                }
            }
            let leases = descriptors::leases(pid, &subject.watched, &mut budget);
            its.extend(leases.into_iter().map(|text| (Kind::FileLease, text)));
            // Whatever was read by its number was its own.
            if process.lives() {
                let born = process.start_time();
                let by = |(kind, text)| Violation { born, ..Violation::by(lease, Some(pid), kind, text) };
                found.extend(its.into_iter().map(by));
            }
        }
        self.mounts.end(lease.id, views);
        found.extend(unsearched(lease, &budget));
        found
    }
}

/// Whether a process is in a container of the lease.
pub fn is_in(lease: &Lease, pid: u32) -> bool {
    let Some((number, cgroup)) = i32::try_from(pid).ok().and_then(|pid| Some((pid, cgroup_of(pid)?))) else {
        return false;
    };
    lease.members().any(|member| member.holder.contains(number, &cgroup))
}

fn unsearched(lease: &Lease, budget: &Budget) -> Option<Violation> {
    let missed = budget.missed.iter().copied().collect::<Vec<_>>();
    let text = format!("too much to be searched: not {}{}", missed.join(", nor "), cgroups(lease));
    (!missed.is_empty()).then(|| Violation::by(lease, None, Kind::Unsearched, text))
}

/// The cgroups of its containers, in parentheses.
fn cgroups(lease: &Lease) -> String {
    let all: Vec<String> = lease
        .members()
        .filter_map(|member| Some(member.holder.cgroup.as_ref()?.display().to_string()))
        .collect();
    if all.is_empty() { String::new() } else { format!(" ({})", all.join(", ")) }
}

/// The thread that searches, and what it found last.
pub struct Searches {
    work: SyncSender<Subject>,
    answers: Receiver<Vec<Violation>>,
    /// Which lease's containers are being searched, and since when.
    at: Arc<Mutex<Option<(i64, Instant)>>>,
    is_busy: bool,
    last: Vec<Violation>,
}

impl Searches {
    /// Starts the thread. It ends with this.
    pub fn start(state: &Path, libcuda: &Path) -> Self {
        let (work, works) = sync_channel::<Subject>(1);
        let (answer, answers) = sync_channel(1);
        let at = Arc::new(Mutex::new(None));
        let (noted, mut searcher) = (Arc::clone(&at), Searcher::new(state, libcuda));
        drop(thread::spawn(move || {
            let note = |what| *noted.lock().unwrap_or_else(PoisonError::into_inner) = what;
            for subject in works {
                let found = searcher.search(&subject, |lease| note(Some((lease, Instant::now()))));
                note(None);
                if answer.send(found).is_err() {
                    return;
                }
            }
        }));
        Self { work, answers, at, is_busy: false, last: Vec::new() }
    }

    /// What the last search found in containers of these leases. The next one begins, of what `make` says,
    /// where none is under way; it `is_due` else.
    pub fn found(
        &mut self,
        leases: &[Lease],
        is_due: bool,
        make: impl FnOnce() -> Subject,
    ) -> Vec<Violation> {
        if let Ok(found) = self.answers.try_recv() {
            (self.last, self.is_busy) = (found, false);
        }
        if is_due && !self.is_busy {
            self.is_busy = self.work.try_send(make()).is_ok();
        }
        let lease = |id: i64| leases.iter().find(|lease| lease.id == id);
        let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
        let stuck = at.filter(|(_, since)| since.elapsed() > STUCK).and_then(|(id, _)| lease(id));
        let stuck = stuck.map(|lease| {
            let text = format!("a search of its processes does not come back{}", cgroups(lease));
            Violation::by(lease, None, Kind::Unsearched, text)
        });
        let last = self.last.iter().filter(|one| one.lease.and_then(lease).is_some());
        last.cloned().chain(stuck).collect()
    }
}

/// A single search, for a node where no meter runs. After a second it does without what is not found by then.
pub fn once(state: &Path, libcuda: &Path, subject: Subject) -> Vec<Violation> {
    let mut searches = Searches::start(state, libcuda);
    let leases = subject.leases.clone();
    let begin = Instant::now();
    let mut found = searches.found(&leases, true, || subject);
    while searches.is_busy && begin.elapsed() <= STUCK + PAUSE {
        sleep(PAUSE);
        found = searches.found(&leases, false, || unreachable!("none is due"));
    }
    found
}
