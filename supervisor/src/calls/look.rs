//! RM's own figures beside the books: what went past the supervisor, what ended, and what is gone.

use super::{Call, Processes, Supervisor};
use crate::abi::{Class, Kind};
use crate::books::{Gpu, MOST_GPUS, Object};
use crate::manager::{Figure, Manager, Subdevice, add_subdevice};

/// Memory that RM counts for a container and that was never performed: a call was changed while it was let
/// through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Race {
    /// The GPU.
    pub gpu: Gpu,
    /// How many bytes.
    pub bytes: u64,
    /// The process that has most of it.
    pub process: u32,
    /// Whether the lease is above its limit now.
    pub is_above: bool,
}

/// How often the card's use is compared before anything counts as gone.
const LOOKS: usize = 3;

fn total(figures: &[(u32, Figure)]) -> u64 {
    figures.iter().map(|(_, figure)| figure.owned()).fold(0, u64::saturating_add)
}

/// How many subdevices are tried before RM counts as silent.
const TRIES: usize = 8;

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    /// Compares RM's figures with the books of every GPU. What RM counts more is charged and returned.
    pub fn look(&mut self) -> Vec<Race> {
        self.look_at = None;
        (0..MOST_GPUS).filter_map(|gpu| self.look_at_gpu(gpu)).collect()
    }

    /// Whether there is anything to look at.
    pub fn has_clients(&self) -> bool {
        !self.books.is_empty()
    }

    fn look_at_gpu(&mut self, gpu: Gpu) -> Option<Race> {
        let figures = self.settle(gpu, None)?;
        let mut more = total(&figures).saturating_sub(self.books.sums(gpu).counted());
        let back = more.min(self.books.sums(gpu).orphaned);
        if back > 0 {
            // Another handle owns now what was orphaned.
            let sums = self.books.sums(gpu);
            let _ = self.books.set_orphaned(gpu, sums.orphaned - back);
            let _ = self.books.set_passed(gpu, sums.passed.saturating_add(back));
            more -= back;
        }
        if more > 0 {
            let again = self.ask_all(gpu, &[], None)?;
            more = total(&again).saturating_sub(self.books.sums(gpu).counted());
        }
        let _ = self.books.set_passed(gpu, self.books.sums(gpu).passed.saturating_add(more));
        self.settle_budget(gpu);
        let excess = |(process, figure): &&(u32, Figure)| {
            figure.owned().saturating_sub(self.books.held_by(gpu, *process))
        };
        let (process, _) = *figures.iter().filter(|_| more > 0).max_by_key(excess)?;
        let is_above = self.budget.charged(gpu) > self.budget.limit(gpu);
        Some(Race { gpu, bytes: more, process, is_above })
    }

    /// Before a refusal: takes off the books what is gone from the card.
    ///
    /// What the card has in use cannot be less than what RM counts for everybody and what is orphaned. Where it is,
    /// that much of the orphaned is gone. Processes that are not asked for only make the use seem larger.
    pub(super) fn mend(&mut self, gpu: Gpu, asked: Option<(u32, &Call, &M::File)>) {
        let _ = self.settle(gpu, asked);
        let orphaned = self.books.sums(gpu).orphaned;
        if orphaned > 0 {
            let others = (self.elsewhere)();
            // Others allocate and free meanwhile: the smallest of several differences counts.
            let gone = (0..LOOKS).map(|_| self.gone(gpu, orphaned, &others, asked)).min().unwrap_or(0);
            let _ = self.books.set_orphaned(gpu, orphaned - gone.min(orphaned));
        }
        self.settle_budget(gpu);
    }

    /// How much of the orphaned bytes the card's use proves to be gone.
    fn gone(
        &mut self,
        gpu: Gpu,
        orphaned: u64,
        others: &[u32],
        asked: Option<(u32, &Call, &M::File)>,
    ) -> u64 {
        let before = self.used(gpu, asked);
        let figures = self.ask_all(gpu, others, asked);
        let after = self.used(gpu, asked);
        let (Some(before), Some(figures), Some(after)) = (before, figures, after) else { return 0 };
        total(&figures).saturating_add(orphaned).saturating_sub(before.max(after))
    }

    /// Asks for all processes. What belongs to one for which RM counts nothing any more leaves the books: its
    /// clients ended with their files. Duplicates may live on, so that the memory counts as orphaned.
    fn settle(&mut self, gpu: Gpu, asked: Option<(u32, &Call, &M::File)>) -> Option<Vec<(u32, Figure)>> {
        // Asked before the figures that are to tell of them.
        let pids = self.processes.pids().into_iter();
        let ended: Vec<u32> = pids.filter(|pid| !self.processes.lives(*pid)).collect();
        let figures = self.ask_all(gpu, &[], asked)?;
        for (process, figure) in &figures {
            if figure.owned() > 0 {
                continue;
            }
            if self.books.held_by(gpu, *process) > 0 || ended.contains(process) {
                self.settle_process(gpu, *process);
            }
            if ended.contains(process) && self.books.clients_of(*process).is_empty() {
                self.processes.forget(*process);
            }
        }
        self.settle_budget(gpu);
        Some(figures)
    }

    fn settle_process(&mut self, gpu: Gpu, process: u32) {
        for client in self.books.clients_of(process) {
            let tree = self.books.tree(client, client);
            let mut bytes = 0u64;
            for object in tree.iter().filter(|object| object.gpu == Some(gpu)) {
                bytes = bytes.saturating_add(object.bytes).saturating_add(object.cost);
                self.books.remove(object.client, object.handle);
            }
            let _ = self.books.orphan(gpu, bytes);
            let rest = self.books.tree(client, client);
            if rest.iter().all(|object| object.gpu.is_none()) {
                rest.iter().for_each(|object| self.books.remove(object.client, object.handle));
            }
        }
    }

    /// RM's figures on a GPU of all processes, and of others.
    fn ask_all(
        &mut self,
        gpu: Gpu,
        others: &[u32],
        asked: Option<(u32, &Call, &M::File)>,
    ) -> Option<Vec<(u32, Figure)>> {
        let own = self.processes.pids();
        let others = others.iter().filter(|pid| !own.contains(pid));
        let pids: Vec<u32> = own.iter().chain(others).copied().collect();
        let figures =
            self.through(gpu, &[], asked, |subdevice, manager| subdevice.figures(manager, &pids))?;
        Some(pids.into_iter().zip(figures).collect())
    }

    /// RM's figure of one process, asked through objects that are not in `freed`.
    pub(super) fn figure(
        &mut self,
        gpu: Gpu,
        process: u32,
        freed: &[Object],
        asked: Option<(u32, &Call, &M::File)>,
    ) -> Option<Figure> {
        let pids = [process];
        let figures =
            self.through(gpu, freed, asked, |subdevice, manager| subdevice.figures(manager, &pids))?;
        figures.first().copied()
    }

    fn used(&mut self, gpu: Gpu, asked: Option<(u32, &Call, &M::File)>) -> Option<u64> {
        let era = self.era;
        self.through(gpu, &[], asked, |subdevice, manager| subdevice.used(manager, era))
    }

    /// Asks through any subdevice on the GPU whose client can be reached. `asked` is a client whose file is at
    /// hand.
    fn through<T>(
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
            let file = match asked {
                Some((client, _, file)) if client == anchor.client => file,
                _ => {
                    let Some(client) = self.books.get(anchor.client, anchor.client) else { continue };
                    let Ok(fd) = u32::try_from(client.bytes) else { continue };
                    let Some(file) = self.processes.file(client.parent, fd.cast_signed()) else { continue };
                    taken = file;
                    &taken
                }
            };
            let mut handle = anchor.handle;
            if anchor.class.kind() == Kind::Device {
                handle = self.own_handle();
                let place = [anchor.client, anchor.handle, handle];
                if add_subdevice(&mut self.manager, file, place, self.era).is_err() {
                    self.books.remove(anchor.client, anchor.handle);
                    continue;
                }
                let _ = self.books.add(&Object {
                    handle,
                    parent: anchor.handle,
                    class: Class::SUBDEVICE,
                    ..anchor
                });
            }
            let subdevice = Subdevice { file, client: anchor.client, handle };
            if let Some(answer) = question(&subdevice, &mut self.manager) {
                return Some(answer);
            }
            self.books.remove(anchor.client, handle); // it is not there any more
        }
        None
    }
}
