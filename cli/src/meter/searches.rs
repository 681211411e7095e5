//! Searches the processes of containers for what they do against their shares from inside: files mounted over
//! the lease's own, GPU programs without the limits, leases on files for which others would wait. It uses
//! what the kernel says of the processes, never what they wrote.
//!
//! A container, or its image, decides how much there is to be searched. So a thread of its own searches, each
//! container within bounds of entries, bytes and time, and nobody waits for it. A container beyond them is
//! reported, and so is one whose search does not return. A process counts only as long as it lives and is in
//! the container's cgroup, so that nobody is taken for an earlier process of his number.

mod descriptors;
mod limits;
mod mounts;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use gpushare_inject::Region;
use gpushare_inventory::FileIdentity;
use gpushare_quota::{Lease, cgroup_of, living_thread};
use nix::time::{ClockId, clock_gettime};

use self::descriptors::FileLease;
use self::limits::{Limited, Note};
use self::mounts::{Expected, Mounts};
use super::kept::Kept;
use super::owner::innermost;
use super::process::Process;
use crate::violation::{Kind, Violation, bounded};

/// The most processes of one container that are searched at a time.
const MOST_PROCESSES: usize = 4096;
/// The longest that one container may take at a time.
const LONGEST: Duration = Duration::from_millis(500);
/// How many rounds in a row one container's search has to wait before the container is reported for it.
const LATE_ROUNDS: u32 = 2;
/// How long a single search waits for its answers.
const PATIENCE: Duration = Duration::from_secs(1);
/// After how long a search counts as one that does not return. The others are then searched without it.
const LOST: Duration = Duration::from_secs(3);
/// How long a container is left out of which a search did not come back for so long.
const LEFT_OUT: Duration = Duration::from_secs(60);
/// How many containers that took all of their time at the last search are searched in a round, after the
/// others.
const MOST_COSTLY: usize = 2;
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
    /// Processor time of this thread at the begin.
    begun: Duration,
    /// Whether time ran out.
    is_late: bool,
    lists: usize,
    descriptors: usize,
    /// What was not searched.
    missed: BTreeSet<&'static str>,
}

impl Budget {
    fn new() -> Self {
        Self {
            until: Instant::now() + LONGEST,
            begun: processor_time(),
            is_late: false,
            lists: mounts::MOST_LISTS,
            descriptors: descriptors::MOST,
            missed: BTreeSet::new(),
        }
    }

    /// Takes note of something that was not searched.
    fn miss(&mut self, what: &'static str) {
        self.missed.insert(what);
    }

    fn is_over(&mut self) -> bool {
        self.is_late |= Instant::now() >= self.until;
        self.is_late
    }

    /// Whether the search itself took the time. If not, it waited, perhaps for a lock that another container
    /// held.
    fn took_its_time(&self) -> bool {
        processor_time().saturating_sub(self.begun) >= LONGEST / 2
    }
}

/// Processor time of this thread.
fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Searches containers, one after the other.
struct Searcher {
    state: PathBuf,
    libcuda: PathBuf,
    mounts: Mounts,
    limited: Limited,
    /// Leases whose containers took all of their time, in the order of their last search.
    costly: Vec<i64>,
    /// The lease whose search alone was late in the last rounds, and in how many.
    late: Option<(i64, u32)>,
}

impl Searcher {
    fn new(state: &Path, libcuda: &Path) -> Self {
        let (mounts, limited) = (Mounts::default(), Limited::default());
        Self { state: state.into(), libcuda: libcuda.into(), mounts, limited, costly: Vec::new(), late: None }
    }

    /// `begin` is told which lease's containers are next, and `end` what was found in them. Those that take
    /// long are searched in turn, so that nobody else waits for them.
    fn search(
        &mut self,
        subject: &Subject,
        mut begin: impl FnMut(i64),
        mut end: impl FnMut(i64, Vec<Violation>),
    ) {
        self.mounts.retain(&subject.leases);
        let lease = |id: i64| subject.leases.iter().find(|lease| lease.id == id);
        self.costly.retain(|id| lease(*id).is_some());
        let costly: Vec<&Lease> = self.costly.iter().take(MOST_COSTLY).filter_map(|id| lease(*id)).collect();
        let others: Vec<&Lease> =
            subject.leases.iter().filter(|lease| !self.costly.contains(&lease.id)).collect();
        let mut late = Vec::new();
        for lease in others.into_iter().chain(costly) {
            begin(lease.id);
            self.limited.forget(lease.id);
            let since = Instant::now();
            let (found, is_late) = self.search_one(lease, subject);
            late.extend(is_late.then_some(lease.id));
            self.costly.retain(|id| *id != lease.id);
            if since.elapsed() >= LONGEST / 2 {
                self.costly.push(lease.id);
            }
            end(lease.id, found);
        }
        self.late = match late[..] {
            [id] => Some((id, self.rounds_late(id).saturating_add(1))),
            _ => None,
        };
    }

    /// In how many rounds in a row the search of this lease alone was late.
    fn rounds_late(&self, lease: i64) -> u32 {
        self.late.filter(|(id, _)| *id == lease).map_or(0, |(_, rounds)| rounds)
    }

    /// Returns the violations, and whether time ran out.
    fn search_one(&mut self, lease: &Lease, subject: &Subject) -> (Vec<Violation>, bool) {
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
            let Some(process) = Process::open(pid).filter(|_| is_in(lease, &subject.leases, pid)) else {
                continue;
            };
            // Its first thread may have ended, and tell nothing.
            let Some(thread) = thread_of(pid) else { continue };
            let mut its = Vec::new();
            if let Some(expected) = &expected {
                let uses_gpu = on_gpu.contains(&pid);
                let wrong = views.look(thread, uses_gpu, expected, &mut budget);
                let is_judged = matches!(wrong, Some((Kind::Files, _)));
                its.extend(wrong);
                if !is_judged && uses_gpu {
                    its.extend(self.limited.look((lease.id, pid, thread), expected, notes, &mut budget));
                }
            }
            let file_leases = descriptors::leases(thread, &subject.watched, &mut budget);
            // Whatever was read by its number was its own.
            if process.lives() {
                let born = process.start_time();
                let by = |(kind, text)| Violation { born, ..Violation::by(lease, Some(pid), kind, text) };
                found.extend(its.into_iter().map(by));
                for FileLease { path, setter } in file_leases {
                    let path = path.display();
                    let text = format!("it has a lease (F_SETLEASE) on {path}: others would wait for it");
                    // Another container may have set it and passed the descriptor here.
                    let is_hint = !is_in(lease, &subject.leases, setter);
                    found.push(Violation { is_hint, ..by((Kind::FileLease, text)) });
                }
            }
        }
        self.mounts.end(lease.id, views);
        if budget.is_late && (budget.took_its_time() || self.rounds_late(lease.id) >= LATE_ROUNDS) {
            budget.miss("all of its processes in time");
        }
        found.extend(unsearched(lease, &budget));
        (bounded(found), budget.is_late)
    }
}

/// Whether a process is in a container of the lease, and in none of another one's inside of it.
pub fn is_in(lease: &Lease, leases: &[Lease], pid: u32) -> bool {
    let thread = i32::try_from(pid).ok().and_then(living_thread);
    let Some((thread, cgroup)) = thread.and_then(|thread| Some((thread, cgroup_of(thread)?))) else {
        return false;
    };
    innermost(leases, thread, &cgroup) == Some(lease.id)
}

fn thread_of(pid: u32) -> Option<u32> {
    u32::try_from(living_thread(i32::try_from(pid).ok()?)?).ok()
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

/// What the thread says: what it found in one lease's containers; `None` when it has been to all.
type Answer = Option<(i64, Vec<Violation>)>;

/// A thread that searches.
struct Worker {
    work: Sender<Subject>,
    answers: Receiver<Answer>,
    /// Which lease's containers are being searched, and since when.
    at: Arc<Mutex<Option<(i64, Instant)>>>,
    thread: JoinHandle<()>,
    is_busy: bool,
}

impl Worker {
    /// Starts it, if the machine has room for a thread. It ends with this.
    fn start(state: &Path, libcuda: &Path) -> Option<Self> {
        let ((work, works), (answer, answers)) = (channel::<Subject>(), channel());
        let at = Arc::new(Mutex::new(None));
        let (noted, mut searcher) = (Arc::clone(&at), Searcher::new(state, libcuda));
        let started = Builder::new().name("searches".to_owned()).spawn(move || {
            let note = |what| *noted.lock().unwrap_or_else(PoisonError::into_inner) = what;
            for subject in works {
                searcher.search(
                    &subject,
                    |lease| note(Some((lease, Instant::now()))),
                    |lease, found| drop(answer.send(Some((lease, found)))),
                );
                note(None);
                if answer.send(None).is_err() {
                    return;
                }
            }
        });
        match started {
            Ok(thread) => Some(Self { work, answers, at, thread, is_busy: false }),
            Err(error) => {
                tracing::warn!(%error, "containers are not searched: no thread can be started");
                None
            }
        }
    }

    /// Which lease's containers it has been searching for longer than that.
    fn stuck_for(&self, time: Duration) -> Option<i64> {
        let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
        at.filter(|(_, since)| since.elapsed() > time).map(|(lease, _)| lease)
    }
}

/// The searches of a node's containers, and what the last ones found.
pub struct Searches {
    state: PathBuf,
    libcuda: PathBuf,
    /// `None` where none could be started yet.
    worker: Option<Worker>,
    /// Leases of which a search has not come back, since when, and the thread that is there.
    lost: Vec<(i64, Instant, JoinHandle<()>)>,
    last: HashMap<i64, Vec<Violation>>,
}

impl Searches {
    /// Nothing is searched yet.
    pub fn start(state: &Path, libcuda: &Path) -> Self {
        Self {
            state: state.into(),
            libcuda: libcuda.into(),
            worker: None,
            lost: Vec::new(),
            last: HashMap::new(),
        }
    }

    /// What was found last in containers of these leases. A new round begins, of what `make` says, where one
    /// `is_due` and none is under way.
    pub fn found(
        &mut self,
        leases: &[Lease],
        is_due: bool,
        make: impl FnOnce() -> Subject,
    ) -> Vec<Violation> {
        self.listen();
        self.last.retain(|id, _| leases.iter().any(|lease| lease.id == *id));
        let stuck = |worker: &mut Worker| worker.stuck_for(LOST);
        if let Some(lease) = self.worker.as_mut().and_then(stuck)
            && let Some(worker) = self.worker.take()
        {
            // The others are searched without it.
            self.lost.push((lease, Instant::now(), worker.thread));
        }
        self.lost.retain(|(_, since, thread)| !thread.is_finished() || since.elapsed() < LEFT_OUT);
        if is_due && self.worker.is_none() {
            self.worker = Worker::start(&self.state, &self.libcuda);
        }
        if let Some(worker) = self.worker.as_mut().filter(|worker| is_due && !worker.is_busy) {
            let mut subject = make();
            subject.leases.retain(|lease| self.lost.iter().all(|(lost, ..)| *lost != lease.id));
            worker.is_busy = worker.work.send(subject).is_ok();
        }
        self.last.values().flatten().cloned().chain(self.not_returned(leases)).collect()
    }

    /// Reports searches that do not return. If there are several, the cause may be outside of their
    /// containers, such as a lock of the kernel that another one holds.
    fn not_returned(&self, leases: &[Lease]) -> Option<Violation> {
        let lost = self.lost.iter().filter_map(|(id, ..)| leases.iter().find(|lease| lease.id == *id));
        match lost.collect::<Vec<_>>()[..] {
            [] => None,
            [lease] => {
                let text = format!("a search of its processes does not return{}", cgroups(lease));
                Some(Violation::by(lease, None, Kind::Unsearched, text))
            }
            ref several => Some(Violation {
                lease: None,
                container: "node".to_owned(),
                pid: None,
                kind: Kind::Unsearched.name().to_owned(),
                text: format!("searches of {} containers do not return", several.len()),
                born: None,
                is_hint: false,
            }),
        }
    }

    fn is_busy(&self) -> bool {
        self.worker.as_ref().is_some_and(|worker| worker.is_busy)
    }

    fn listen(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        while let Ok(answer) = worker.answers.try_recv() {
            match answer {
                Some((lease, found)) => drop(self.last.insert(lease, found)),
                None => worker.is_busy = false,
            }
        }
    }
}

/// A single search, for a node where no meter runs. After a second it does without what is not found by then.
pub fn once(state: &Path, libcuda: &Path, subject: Subject) -> Vec<Violation> {
    let mut searches = Searches::start(state, libcuda);
    let leases = subject.leases.clone();
    let begin = Instant::now();
    let mut found = searches.found(&leases, true, || subject);
    while searches.is_busy() && begin.elapsed() <= PATIENCE + PAUSE {
        sleep(PAUSE);
        found = searches.found(&leases, false, || unreachable!("none is due"));
    }
    let missed = leases.iter().filter(|lease| !searches.last.contains_key(&lease.id));
    let unsearched = missed.map(|lease| {
        let text = format!("not searched in time, beside others{}", cgroups(lease));
        Violation::by(lease, None, Kind::Unsearched, text)
    });
    found.extend(unsearched);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::owner::lease_of_this_process;

    #[test]
    fn one_lost_search_is_reported_by_its_container_and_several_by_the_node() {
        let leases = [1, 2, 3].map(|id| Lease { id, ..lease_of_this_process() });
        let mut searches = Searches::start(Path::new("/nowhere"), Path::new("/nowhere"));
        let mut lose = |id| {
            let thread = std::thread::spawn(|| ());
            searches.lost.push((id, Instant::now(), thread));
            searches.not_returned(&leases).map(|report| (report.lease, report.container))
        };
        assert_eq!(lose(9), None, "its lease has ended");
        assert_eq!(lose(2), Some((Some(2), "web".to_owned())));
        assert_eq!(lose(3), Some((None, "node".to_owned())));
    }

    #[test]
    fn a_search_that_only_waits_takes_no_time_of_its_own() {
        let mut budget = Budget::new();
        budget.until = Instant::now();
        sleep(Duration::from_millis(300));
        assert!(budget.is_over() && !budget.took_its_time() && budget.missed.is_empty());
        while processor_time() - budget.begun < LONGEST / 2 {}
        assert!(budget.took_its_time());
    }
}
