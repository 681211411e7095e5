//! FREE: removes memory from the books, except the part that stays on the card because a duplicate holds it.
//!
//! RM counts the handles of each memory itself, and reports memory with one handle as private. Bytes that
//! leave the private part of a process's figure at a FREE are therefore gone, and bytes that leave the shared
//! part are still on the card. A duplicate that another thread makes between the two figures would move bytes
//! from one part to the other, so nothing is credited while such a call may be running.

use nix::errno::Errno;

use super::allocate::give_back;
use super::{Answer, Call, Processes, Program, Supervisor};
use crate::abi::{Kind, Status, free, number, put, u32_at};
use crate::books::{Gpu, Object};
use crate::journal::Step;
use crate::manager::{Figure, Manager};

type Figures = Vec<(u32, Figure)>;

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    pub(super) fn free(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        let mut structure = [0; free::SIZE];
        if program.read(call.address, &mut structure).is_err() {
            return Answer::Fail(Errno::EFAULT);
        }
        let object = (u32_at(&structure, free::CLIENT), u32_at(&structure, free::HANDLE));
        self.release(call, object, (number::FREE, &mut structure, free::STATUS), program, file)
    }

    /// Performs a call that frees `object`, a client and a handle. The call consists of its number, its
    /// structure and the offset of its status.
    pub(super) fn release(
        &mut self,
        call: &Call,
        object: (u32, u32),
        (number, structure, status_at): (u8, &mut [u8], usize),
        program: &impl Program,
        file: &M::File,
    ) -> Answer {
        if !program.waits() {
            return Answer::Gone;
        }
        // The previous worker may have freed it, so the bytes that left can no longer be measured.
        let was_begun = self.journal.step() == Step::Releasing;
        let done = self.judged(call, object, !was_begun, file, |this| {
            this.journal.begin(Step::Releasing);
            this.manager.call(file, number, structure, &mut [])?;
            Ok(Status(u32_at(structure, status_at)))
        });
        match done {
            Ok(_) => give_back(program, &[(call.address, structure)]),
            Err(errno) => Answer::Fail(errno),
        }
    }

    /// Frees an object that RM has just made.
    pub(super) fn undo(&mut self, object: &Object, call: &Call, file: &M::File) {
        let (client, handle) = (object.client, object.handle);
        let mut structure = [0; free::SIZE];
        put(&mut structure, free::CLIENT, &client.to_ne_bytes());
        put(&mut structure, free::HANDLE, &handle.to_ne_bytes());
        let _ = self.judged(call, (client, handle), true, file, |this| {
            this.manager.call(file, number::FREE, &mut structure, &mut [])?;
            Ok(Status(u32_at(&structure, free::STATUS)))
        });
    }

    /// Lets `perform` free an object, and judges by RM's figures which bytes left the card. Without
    /// `can_tell` all of them count as orphaned.
    fn judged(
        &mut self,
        call: &Call,
        (client, handle): (u32, u32),
        can_tell: bool,
        file: &M::File,
        perform: impl FnOnce(&mut Self) -> Result<Status, Errno>,
    ) -> Result<Status, Errno> {
        let tree = self.books.tree(client, handle);
        let asked = Some((client, call, file));
        let gpus: Vec<Gpu> = self.budget.gpus().filter(|gpu| self.is_concerned(&tree, *gpu)).collect();
        let before: Vec<_> = gpus.iter().map(|gpu| self.ask_all(*gpu, asked).filter(|_| can_tell)).collect();
        let status = self.freeing((client, handle), &tree, perform)?;
        if status != Status::OK {
            return Ok(status);
        }
        for (gpu, before) in gpus.iter().zip(before) {
            // The objects stay in the books until their bytes are judged, so that a worker killed here leaves
            // too much in them and not too little.
            let after = before.is_some().then(|| self.ask_all_but(*gpu, &tree, asked)).flatten();
            self.credit(*gpu, &tree, before.zip(after), call);
        }
        tree.iter().for_each(|object| self.books.remove(object.client, object.handle));
        gpus.iter().for_each(|gpu| self.settle_budget(*gpu));
        Ok(status)
    }

    fn is_concerned(&self, tree: &[Object], gpu: Gpu) -> bool {
        let holds = |object: &Object| object.gpu == Some(gpu) && (object.bytes > 0 || object.cost > 0);
        tree.iter().any(holds) || self.books.sums(gpu).passed > 0
    }

    /// Judges which bytes left RM's figures on one GPU, given the figures before and after.
    fn credit(&mut self, gpu: Gpu, tree: &[Object], figures: Option<(Figures, Figures)>, call: &Call) {
        let booked = bytes_on(tree, gpu);
        let passed = self.books.sums(gpu).passed;
        let all = booked.saturating_add(passed);
        let (mut fell, mut rose, mut gone) = (0u64, 0u64, 0u64);
        for (process, before) in figures.iter().flat_map(|(before, _)| before) {
            let after = figures.iter().flat_map(|(_, after)| after).find(|(one, _)| one == process);
            // A process that ended meanwhile has no second figure. The next check judges its memory.
            let after = after.map_or(*before, |(_, figure)| *figure);
            let drop = before.owned().saturating_sub(after.owned());
            fell = fell.saturating_add(drop);
            rose = rose.saturating_add(after.owned().saturating_sub(before.owned()));
            if !self.may_be_duplicating(*process, call) {
                gone = gone.saturating_add(before.private.saturating_sub(after.private).min(drop));
            }
        }
        // If another process owns it now, RM counts it there.
        let left = if figures.is_some() { fell.saturating_sub(rose).min(all) } else { booked };
        let stays = left - gone.min(left);
        // RM still counts the rest, under a handle that appeared without an allocation.
        let _ = self.books.set_passed(gpu, all - left);
        let is_held = stays > 0 || all - left > passed;
        let memory = tree.iter().filter(|object| object.gpu == Some(gpu) && object.bytes > 0);
        let rounding: u64 = memory.filter(|_| is_held).map(|object| object.cost).sum();
        // UVM may have a duplicate of an address space, and RM counts nothing for it.
        let spaces = tree.iter().filter(|object| object.gpu == Some(gpu));
        let spaces = spaces.filter(|object| object.class.kind() == Kind::AddressSpace);
        let spaces: u64 = spaces.map(|object| object.cost).sum();
        let _ = self.books.orphan(gpu, stays.saturating_add(rounding).saturating_add(spaces));
    }
}

fn bytes_on(tree: &[Object], gpu: Gpu) -> u64 {
    let of_gpu = tree.iter().filter(|object| object.gpu == Some(gpu) && object.class.kind() == Kind::Memory);
    of_gpu.map(|object| object.bytes).fold(0, u64::saturating_add)
}
