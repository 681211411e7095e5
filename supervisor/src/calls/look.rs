//! Compares RM's own figures with the books, to find memory that bypassed the supervisor, processes that
//! ended, and memory that is gone.

use super::{Call, Processes, Supervisor};
use crate::abi::{Class, Kind, memory};
use crate::books::{Gpu, MOST_GPUS, Object, Sums};
use crate::manager::{Figure, Manager, Subdevice, ask_by_own_client, devices, is_unused};

/// Memory that RM counts for a container without the supervisor having allocated it: a program changed a call
/// after it was let through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Race {
    /// The GPU.
    pub gpu: Gpu,
    /// How many bytes.
    pub bytes: u64,
    /// The process for which RM counts most of it, and those whose allocations were let through since the
    /// last check. A client may belong to another process than the caller.
    pub processes: Vec<u32>,
    /// Whether the lease is above its limit now.
    pub is_above: bool,
}

/// How many queries to make before anything counts as gone. An attacker who does not know their order guesses
/// it once in 2^30 times.
const QUESTIONS: usize = 32;

fn total(figures: &[(u32, Figure)]) -> u64 {
    figures.iter().map(|(_, figure)| figure.owned()).fold(0, u64::saturating_add)
}

fn ended(tracked: &[(u32, bool)]) -> Vec<u32> {
    tracked.iter().filter(|(_, lives)| !lives).map(|(pid, _)| *pid).collect()
}

/// How many forgotten processes one check covers.
const MOST_FORGOTTEN: usize = 200;

/// Size up to which a race may consist of many small pieces, in bytes.
const SMALL: u64 = 1 << 20;
/// The least that RM counts for an object, in bytes.
const PAGE: u64 = 4096;

/// How many subdevices to try before RM counts as silent.
const TRIES: usize = 8;

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    /// Compares RM's figures with the books on every GPU. Charges and returns the excess.
    pub fn look(&mut self) -> Vec<Race> {
        self.look_at = None;
        let mut races = Vec::new();
        self.find_left_behind();
        // Query the processes before the figures that cover them.
        let tracked = self.processes.tracked();
        let mut gone = ended(&tracked);
        for gpu in self.budget.gpus() {
            if let Some(figures) = self.settle(gpu, &tracked, None) {
                gone.retain(|pid| figures.iter().all(|(one, figure)| one != pid || figure.owned() == 0));
                races.extend(self.race(gpu, &figures));
            }
            if self.blind[gpu] {
                gone.clear();
            }
            // The lease's other containers wait for memory to be released.
            self.forget_gone(gpu, None, 0);
        }
        for pid in gone {
            let made_clients = self.books.end_maker(pid);
            self.processes.forget(pid, made_clients);
        }
        self.let_allocate.clear();
        races
    }

    /// Whether there is anything to check.
    pub fn has_clients(&self) -> bool {
        !self.books.is_empty() || self.is_blind() || (0..MOST_GPUS).any(|gpu| self.budget.own(gpu) > 0)
    }

    /// Tracks forgotten processes again if RM counts something for them: other processes have their files.
    fn find_left_behind(&mut self) {
        let pids = self.processes.forgotten(MOST_FORGOTTEN);
        for gpu in self.budget.gpus().filter(|_| !pids.is_empty()).collect::<Vec<_>>() {
            let figures = self.ask(gpu, &pids, &[], None).unwrap_or_default();
            let have = figures.into_iter().filter(|(_, figure)| figure.owned() > 0);
            have.for_each(|(pid, _)| self.processes.remember(pid));
        }
    }

    /// Finds and charges the bytes by which RM's count on a GPU exceeds the books.
    fn race(&mut self, gpu: Gpu, figures: &[(u32, Figure)]) -> Option<Race> {
        let mut more = total(figures).saturating_sub(self.books.sums(gpu).counted());
        if more > 0 {
            let pids: Vec<u32> = figures.iter().map(|(pid, _)| *pid).collect();
            let again = self.ask(gpu, &pids, &[], None)?;
            more = total(&again).saturating_sub(self.books.sums(gpu).counted());
        }
        let is_above = |this: &Self| this.budget.charged(gpu) > this.budget.limit(gpu);
        self.raced[gpu] &= self.books.sums(gpu).passed > 0 && is_above(self);
        if more == 0 && !self.raced[gpu] {
            return None;
        }
        let _ = self.books.set_passed(gpu, self.books.sums(gpu).passed.saturating_add(more));
        // RM does not report the number of pieces, and each takes a whole piece of the card's.
        if more <= SMALL {
            let _ = self.books.orphan(gpu, (memory::PIECE / PAGE - 1) * more);
        }
        self.settle_budget(gpu);
        let held = self.books.held(gpu);
        let excess = |(process, figure): &&(u32, Figure)| {
            figure.owned().saturating_sub(held.get(process).copied().unwrap_or(0))
        };
        let most = figures.iter().max_by_key(excess).map(|(process, _)| *process);
        let mut processes: Vec<u32> = most.into_iter().chain(self.let_allocate.iter().copied()).collect();
        processes.sort_unstable();
        processes.dedup();
        let is_above = is_above(self);
        let was_raced = std::mem::replace(&mut self.raced[gpu], is_above);
        if is_above && (was_raced || !self.prove(&processes)) {
            // Those have ended, or made no call to this worker. Other processes have the client's file, and
            // so its memory.
            processes = self.processes.tracked().into_iter().filter(|one| one.1).map(|one| one.0).collect();
            self.prove(&processes);
        }
        (more > 0 || !processes.is_empty()).then_some(Race { gpu, bytes: more, processes, is_above })
    }

    /// Marks processes as belonging to the container if they hold files of its clients. Returns whether any
    /// does.
    fn prove(&mut self, processes: &[u32]) -> bool {
        for client in self.books.clients().collect::<Vec<_>>() {
            if processes.contains(&client.process)
                && let Some(file) = self.processes.file(client.process, client.fd)
                && devices(&mut self.manager, &file, client.handle).is_some()
            {
                self.processes.prove(client.process);
            }
        }
        processes.iter().any(|pid| self.processes.is_proved(*pid))
    }

    /// Runs after the last process has ended: sets the charge to the bytes that RM still counts for the
    /// container's processes. `is_shared`: other containers of the lease may hold duplicates, so memory stays
    /// charged until it is proved to be gone. Returns whether nothing is charged any more.
    pub fn end(&mut self, is_shared: bool) -> bool {
        let gpus: Vec<Gpu> = self.budget.gpus().filter(|gpu| self.budget.own(*gpu) > 0).collect();
        for gpu in gpus {
            match self.ask_all(gpu, None) {
                Some(_) if is_shared => self.mend(gpu, None),
                Some(figures) => self.budget.set(gpu, total(&figures).min(self.budget.own(gpu))),
                // RM reports nothing for a GPU that is not in use.
                None if !is_shared => self.budget.set(gpu, 0),
                None => {}
            }
        }
        self.budget.gpus().all(|gpu| self.budget.own(gpu) == 0)
    }

    /// Runs before a refusal: removes from the books the memory that is gone from the card.
    ///
    /// The card's use cannot be less than RM's total count plus the orphaned bytes. If it is, the difference
    /// is orphaned memory that is gone. Memory that RM counts for no process can only make the use larger.
    pub(super) fn mend(&mut self, gpu: Gpu, asked: Option<(u32, &Call, &M::File)>) {
        let tracked = self.processes.tracked();
        let figures = self.settle(gpu, &tracked, asked);
        // Memory taken by a race is on the card as well, and the next check finds it.
        let more =
            figures.map_or(0, |figures| total(&figures).saturating_sub(self.books.sums(gpu).counted()));
        self.forget_gone(gpu, asked, more);
        self.settle_budget(gpu);
    }

    /// Removes orphaned bytes that are gone from the card, if RM counts `more` than the books.
    fn forget_gone(&mut self, gpu: Gpu, asked: Option<(u32, &Call, &M::File)>, more: u64) {
        let Sums { orphaned, passed, .. } = self.books.sums(gpu);
        // Memory that bypassed the supervisor may be counted twice, or without being on the card.
        if orphaned == 0 || passed > 0 {
            return;
        }
        let gone = self.gone(gpu, asked).unwrap_or(0).saturating_sub(more);
        let _ = self.books.set_orphaned(gpu, orphaned - gone.min(orphaned));
        self.settle_budget(gpu);
    }

    /// Returns how many of the orphaned bytes are gone, as proved by the card's use; `None` if RM does not
    /// report.
    ///
    /// Other processes allocate and free meanwhile, and may do so in step with these queries: memory that one
    /// holds at each query for figures and at none for the card's use would look like memory that is gone.
    /// The order of the queries is therefore random, each process counts with its smallest figure, and the
    /// card with its largest use.
    fn gone(&mut self, gpu: Gpu, asked: Option<(u32, &Call, &M::File)>) -> Option<u64> {
        let orphaned = self.books.sums(gpu).orphaned;
        let pids = self.through(gpu, &[], asked, |subdevice, manager| subdevice.processes(manager));
        let Some(mut pids) = pids else { return self.is_unused(gpu).then_some(orphaned) };
        pids.extend(self.pids());
        pids.sort_unstable();
        pids.dedup();
        let mut used = self.used(gpu, asked)?;
        let mut owned: Vec<u64> = vec![u64::MAX; pids.len()];
        for question in 0..QUESTIONS {
            // Query the figures at least once, and the use last.
            let is_of_use =
                question > 0 && (question == QUESTIONS - 1 || self.handles.random() >> 32 & 1 == 0);
            if is_of_use {
                used = used.max(self.used(gpu, asked)?);
            } else {
                let figures = self.ask(gpu, &pids, &[], asked)?;
                let least = owned.iter_mut().zip(figures);
                least.for_each(|(least, (_, figure))| *least = (*least).min(figure.owned()));
            }
            let all = owned.iter().fold(0, |all: u64, one| all.saturating_add(*one));
            let gone = all.saturating_add(orphaned).saturating_sub(used);
            if gone == 0 || question == QUESTIONS - 1 {
                return Some(gone);
            }
        }
        None
    }

    /// Queries RM for the processes `tracked`. If RM counts less than the books, clients ended with their
    /// files. The difference leaves the books: it belonged to processes that have ended, or never to an
    /// object. Duplicates may live on, so it counts as orphaned.
    fn settle(
        &mut self,
        gpu: Gpu,
        tracked: &[(u32, bool)],
        asked: Option<(u32, &Call, &M::File)>,
    ) -> Option<Vec<(u32, Figure)>> {
        let ended = ended(tracked);
        let pids: Vec<u32> = tracked.iter().map(|(pid, _)| *pid).collect();
        let figures = self.ask(gpu, &pids, &[], asked);
        let sums = self.books.sums(gpu);
        // A GPU for which RM reports nothing may not be in use at all.
        self.blind[gpu] = figures.is_none() && sums.counted() > 0;
        let figures = figures?;
        let mut missing = sums.counted().saturating_sub(total(&figures));
        for (process, figure) in &figures {
            if figure.owned() == 0 && ended.contains(process) {
                missing -= self.settle_process(gpu, *process, missing);
            }
        }
        let passed = self.books.sums(gpu).passed;
        let left = missing.min(passed);
        if left > 0 {
            let _ = self.books.orphan(gpu, left);
            let _ = self.books.set_passed(gpu, passed - left);
        }
        self.settle_budget(gpu);
        Some(figures)
    }

    /// Removes the clients of an ended process from the books on a GPU. At most `missing` of their bytes
    /// become orphaned; RM still counts the rest for the process that made the client. Returns the bytes that
    /// became orphaned.
    fn settle_process(&mut self, gpu: Gpu, process: u32, missing: u64) -> u64 {
        let mut orphaned = 0u64;
        for client in self.books.clients_of(process) {
            let tree = self.books.tree(client, client);
            let on_gpu = || tree.iter().filter(|object| object.gpu == Some(gpu));
            let bytes = on_gpu().map(|object| object.bytes).fold(0, u64::saturating_add);
            let cost = on_gpu().map(|object| object.cost).fold(0, u64::saturating_add);
            let gone = bytes.min(missing - orphaned);
            // Charge first: a worker killed here must leave too much in the books and not too little.
            let _ = self.books.orphan(gpu, gone.saturating_add(cost));
            let _ = self.books.set_passed(gpu, self.books.sums(gpu).passed.saturating_add(bytes - gone));
            orphaned += gone;
            on_gpu().for_each(|object| self.books.remove(object.client, object.handle));
            // Its channels still get stopped: another process may have the client, and work with it.
            let rest = self.books.tree(client, client);
            if rest.iter().all(|object| object.gpu.is_none()) {
                rest.iter().for_each(|object| self.books.remove(object.client, object.handle));
            }
        }
        orphaned
    }

    /// Returns RM's figures on a GPU for all of the container's processes.
    pub(super) fn ask_all(
        &mut self,
        gpu: Gpu,
        asked: Option<(u32, &Call, &M::File)>,
    ) -> Option<Vec<(u32, Figure)>> {
        self.ask_all_but(gpu, &[], asked)
    }

    /// Like [`Self::ask_all`], but queries through objects that are not in `freed`.
    pub(super) fn ask_all_but(
        &mut self,
        gpu: Gpu,
        freed: &[Object],
        asked: Option<(u32, &Call, &M::File)>,
    ) -> Option<Vec<(u32, Figure)>> {
        let pids = self.pids();
        self.ask(gpu, &pids, freed, asked)
    }

    pub(super) fn pids(&self) -> Vec<u32> {
        self.processes.tracked().into_iter().map(|(pid, _)| pid).collect()
    }

    pub(super) fn ask(
        &mut self,
        gpu: Gpu,
        pids: &[u32],
        freed: &[Object],
        asked: Option<(u32, &Call, &M::File)>,
    ) -> Option<Vec<(u32, Figure)>> {
        let figures = self.through(gpu, freed, asked, |subdevice, manager| subdevice.figures(manager, pids));
        let figures = figures.or_else(|| self.is_unused(gpu).then(|| vec![Figure::default(); pids.len()]))?;
        Some(pids.iter().copied().zip(figures).collect())
    }

    fn used(&mut self, gpu: Gpu, asked: Option<(u32, &Call, &M::File)>) -> Option<u64> {
        let era = self.era;
        let used = self.through(gpu, &[], asked, |subdevice, manager| subdevice.used(manager, era));
        used.or_else(|| self.is_unused(gpu).then_some(0))
    }

    /// Whether a GPU is unused, so that no process has memory on it.
    fn is_unused(&mut self, gpu: Gpu) -> bool {
        let budget = &self.budget;
        is_unused(&mut self.manager, self.era, |uuid| budget.gpu(uuid) == Some(gpu))
    }

    /// Queries through any subdevice on the GPU whose client can be reached, or through one of our own.
    /// `asked` is a client whose file is at hand.
    pub(super) fn through<T>(
        &mut self,
        gpu: Gpu,
        freed: &[Object],
        asked: Option<(u32, &Call, &M::File)>,
        question: impl Fn(&Subdevice<'_, M::File>, &mut M) -> Option<T>,
    ) -> Option<T> {
        let is_freed = |anchor: &Object| {
            freed.iter().any(|freed| (freed.client, freed.handle) == (anchor.client, anchor.handle))
        };
        let anchors = self.books.anchors(gpu).into_iter().filter(|anchor| !is_freed(anchor));
        for anchor in anchors.take(TRIES).collect::<Vec<_>>() {
            let taken;
            let mut owner = None;
            let file = match asked {
                Some((client, _, file)) if client == anchor.client => file,
                _ => {
                    let Some(client) = self.books.client(anchor.client) else { continue };
                    let Some(file) = self.processes.file(client.process, client.fd) else { continue };
                    owner = Some(client.process);
                    taken = file;
                    &taken
                }
            };
            let mut handle = anchor.handle;
            if anchor.class.kind() == Kind::Device {
                match self.own_subdevice(anchor.client, anchor.handle, file) {
                    Ok(made) => handle = made,
                    Err(_) => {
                        self.books.remove(anchor.client, anchor.handle);
                        continue;
                    }
                }
                let _ = self.books.add(&Object {
                    handle,
                    parent: anchor.handle,
                    class: Class::SUBDEVICE,
                    ..anchor
                });
            }
            let subdevice = Subdevice { file, client: anchor.client, handle };
            // The program may have made it again, on another GPU.
            let uuid = subdevice.uuid(&mut self.manager);
            if uuid.is_some_and(|uuid| self.budget.gpu(&uuid) == Some(gpu))
                && let Some(answer) = question(&subdevice, &mut self.manager)
            {
                owner.into_iter().for_each(|owner| self.processes.prove(owner));
                return Some(answer);
            }
            self.books.remove(anchor.client, handle); // it no longer exists
        }
        // A program can leave no object to query through. Our own client does not depend on the program.
        let (budget, era) = (&self.budget, self.era);
        let is_it = |uuid: &[u8; 16]| budget.gpu(uuid) == Some(gpu);
        ask_by_own_client(&mut self.manager, era, gpu, is_it, question)
    }
}
