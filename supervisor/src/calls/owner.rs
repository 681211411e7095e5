//! Finds the owner of a client's memory. RM counts the memory for the process that made the client, whichever
//! process allocates it.
//!
//! A client can come from a process whose figures the supervisor does not query, such as one of another
//! container. Its memory would seem to vanish from the card at once. The first memory of each client must
//! therefore show up in the figures of one of the container's processes. Another thread could make such a
//! figure rise at the right moment with memory of its own. To prevent that, a duplicate of the memory comes
//! and goes in a random order, which makes the memory shared or private.

use super::{Call, Processes, Supervisor};
use crate::abi::{Kind, Status, duplicate, number, put, u32_at};
use crate::books::{Client, Object, Owner};
use crate::manager::{Figure, Manager, free_object};

/// How many answers in a row must agree. An attacker who does not know the order guesses it once in 2^28
/// times.
const AGREEING: u32 = 28;
/// First handle of the duplicates.
const TWINS: u32 = 0xe600_0000;

/// How many queries to make: other threads of an honest program may make and free duplicates meanwhile.
const QUESTIONS: u32 = 512;
/// How many queries to make for the calling process only.
const FEW_QUESTIONS: u32 = 64;

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    /// Whether a process of the container owns the client of memory that RM has just made.
    pub(super) fn has_owner(&mut self, object: &Object, call: &Call, file: &M::File) -> bool {
        let Some(client) = self.books.client(object.client) else { return false };
        if client.owner.is_some() {
            return true; // the books drop it with its process
        }
        let Some(gpu) = object.gpu else { return false };
        let asked = Some((object.client, call, file));
        // RM takes a lock of all GPUs for each query, for longer the more processes it covers. The owner is
        // usually the caller. A forgotten process may have left its client to others.
        let mut all = self.pids();
        let listed = self.through(gpu, &[], asked, |subdevice, manager| subdevice.processes(manager));
        all.extend(listed.into_iter().flatten().filter(|pid| self.processes.was_forgotten(*pid)));
        let twin = twin_of(object.handle);
        let owner = self.find_owner((object, twin), (&[call.process], FEW_QUESTIONS), call, file);
        let owner = owner.or_else(|| self.find_owner((object, twin), (&all, QUESTIONS), call, file));
        owner.into_iter().for_each(|owner| self.processes.remember(owner));
        owner.is_some_and(|owner| self.set_owner(client, Some(owner)))
    }

    /// Runs before a client's first channel: confirms the owner in the books, or clears it. The client's file
    /// may have been closed, and its handle may belong to another client by now.
    pub(super) fn confirm_owner(&mut self, channel: &Object, call: &Call, file: &M::File) {
        let Some(client) = self.books.client(channel.client) else { return };
        let Some(known) = client.owner else { return };
        let tree = self.books.tree(client.handle, client.handle);
        let memory = tree.iter().find(|one| {
            one.class.kind() == Kind::Memory && one.bytes > 0 && one.gpu.is_some() && one.gpu == channel.gpu
        });
        // A worker that takes over after this one knows the twin by the channel that is being made.
        let twin = twin_of(channel.handle);
        let owner = memory
            .and_then(|memory| self.find_owner((memory, twin), (&[known.pid], FEW_QUESTIONS), call, file));
        if owner.is_none() {
            let _ = self.set_owner(client, None); // found again with its next memory
        }
    }

    /// Records a client's owner, and returns whether there was room.
    fn set_owner(&mut self, client: Client, pid: Option<u32>) -> bool {
        let owner = pid.map(|pid| Owner { pid, birth: self.processes.birth(pid) });
        let is_noted = self.books.note_client(&Client { owner, ..client }).is_ok();
        if is_noted {
            self.tell_engines_maker(client.handle);
        }
        is_noted
    }

    /// Finds the process that owns `object`, with a duplicate of the handle `twin`.
    fn find_owner(
        &mut self,
        (object, twin): (&Object, u32),
        among: (&[u32], u32),
        call: &Call,
        file: &M::File,
    ) -> Option<u32> {
        let client = object.client;
        let mut is_shared = false;
        let owner = self.watch_twin((object, twin), among, &mut is_shared, call, file);
        if is_shared {
            free_object(&mut self.manager, file, client, twin).ok()?;
        }
        owner
    }

    fn watch_twin(
        &mut self,
        (object, twin): (&Object, u32),
        (pids, questions): (&[u32], u32),
        is_shared: &mut bool,
        call: &Call,
        file: &M::File,
    ) -> Option<u32> {
        let gpu = object.gpu?;
        let asked = Some((object.client, call, file));
        let mut figures = self.ask(gpu, pids, &[], asked)?;
        let mut agreed: Vec<u32> = vec![0; figures.len()];
        for _ in 0..questions {
            let was_shared = *is_shared;
            if self.handles.random() >> 32 & 1 == 0 {
                if was_shared {
                    free_object(&mut self.manager, file, object.client, twin).ok()?;
                } else {
                    self.make_twin(object, twin, file)?;
                }
                *is_shared = !was_shared;
            }
            let now = self.ask(gpu, pids, &[], asked)?;
            let moved = (was_shared, *is_shared);
            for (agreed, ((_, before), (_, now))) in agreed.iter_mut().zip(figures.iter().zip(&now)) {
                *agreed = if has_moved(before, now, object.bytes, moved) { *agreed + 1 } else { 0 };
            }
            figures = now;
            if agreed.iter().any(|agreed| *agreed >= AGREEING) {
                break;
            }
        }
        let mut owners = pids.iter().zip(agreed).filter(|(_, agreed)| *agreed >= AGREEING);
        owners.next().map(|(pid, _)| *pid).filter(|_| owners.next().is_none())
    }

    fn make_twin(&mut self, object: &Object, twin: u32, file: &M::File) -> Option<()> {
        let mut call = [0; duplicate::SIZE];
        for (at, word) in [
            (duplicate::CLIENT, object.client),
            (duplicate::PARENT, object.parent),
            (duplicate::HANDLE, twin),
            (duplicate::SOURCE_CLIENT, object.client),
            (duplicate::SOURCE, object.handle),
        ] {
            put(&mut call, at, &word.to_ne_bytes());
        }
        self.manager.call(file, number::DUP_OBJECT, &mut call, &mut []).ok()?;
        (Status(u32_at(&call, duplicate::STATUS)) == Status::OK).then_some(())
    }
}

/// Returns the handle of a memory's duplicate. The worker that takes over after this one knows it, and undoes
/// both. A program that has an object with this handle gets no memory.
pub fn twin_of(handle: u32) -> u32 {
    TWINS | handle & 0x00ff_ffff
}

/// Whether an owner's figure changed with its memory, which was and is now shared or private.
fn has_moved(before: &Figure, now: &Figure, bytes: u64, (was_shared, is_shared): (bool, bool)) -> bool {
    let less = |figure: u64| figure.checked_sub(bytes);
    match (was_shared, is_shared) {
        (false, true) => less(before.private) == Some(now.private) && less(now.shared) == Some(before.shared),
        (true, false) => less(now.private) == Some(before.private) && less(before.shared) == Some(now.shared),
        _ => before == now,
    }
}
