//! FREE: what leaves the books, and what of it stays on the card because a duplicate holds it.
//!
//! RM counts the handles of each memory itself, and reports memory with one handle as private. So what leaves the
//! private part of its figure at a FREE is gone, and what leaves the shared part is still on the card. A
//! duplicate that another thread makes between the two figures would move bytes from one part to the other, so
//! nothing is credited while such a call may be running.

use nix::errno::Errno;

use super::allocate::give_back;
use super::{Answer, Call, Processes, Program, Supervisor};
use crate::abi::{Kind, Status, free, number, u32_at};
use crate::books::{Gpu, MOST_GPUS, Object};
use crate::journal::Step;
use crate::manager::{Figure, Manager};

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    pub(super) fn free(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        let mut structure = [0; free::SIZE];
        if program.read(call.address, &mut structure).is_err() {
            return Answer::Fail(Errno::EFAULT);
        }
        let object = (u32_at(&structure, free::CLIENT), u32_at(&structure, free::HANDLE));
        self.release(call, object, (number::FREE, &mut structure, free::STATUS), program, file)
    }

    /// Performs a call that frees `object`, a client and a handle. The call is its number, its structure and where
    /// its status stands.
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
        let (client, handle) = object;
        let was_begun = self.journal.step() == Step::Releasing;
        let tree = self.books.tree(client, handle);
        let owner = self.books.get(client, client).map_or(call.process, |client| client.parent);
        let gpus: Vec<Gpu> = (0..MOST_GPUS).filter(|gpu| self.is_concerned(&tree, *gpu)).collect();
        let asked = Some((client, call, file));
        let before: Vec<_> = gpus.iter().map(|gpu| self.figure(*gpu, owner, &[], asked)).collect();
        self.journal.begin(Step::Releasing);
        if let Err(errno) = self.manager.call(file, number, structure, &mut []) {
            return Answer::Fail(errno);
        }
        let mut status = Status(u32_at(structure, status_at));
        if was_begun && status == Status::NOT_FOUND {
            // The worker before this one freed it. What it left cannot be told any more.
            status = Status::OK;
            crate::abi::put(structure, status_at, &status.0.to_ne_bytes());
            self.forget(&tree);
            gpus.iter().for_each(|gpu| self.stay(*gpu, &tree, bytes_on(&tree, *gpu)));
        } else if status == Status::OK {
            let is_unsure = self.may_be_duplicating(owner, call);
            self.forget(&tree);
            for (gpu, before) in gpus.iter().zip(before) {
                let after = self.figure(*gpu, owner, &tree, asked);
                let after = after.or_else(|| self.has_no_more(*gpu, owner).then(Figure::default));
                self.credit(*gpu, &tree, before.zip(after), is_unsure);
            }
        }
        give_back(program, &[(call.address, structure)])
    }

    fn is_concerned(&self, tree: &[Object], gpu: Gpu) -> bool {
        let holds = |object: &Object| object.gpu == Some(gpu) && (object.bytes > 0 || object.cost > 0);
        tree.iter().any(holds) || self.books.sums(gpu).passed > 0
    }

    fn forget(&mut self, tree: &[Object]) {
        tree.iter().for_each(|object| self.books.remove(object.client, object.handle));
    }

    /// Judges what left one GPU's figure of the owner, which is given as it was before and as it is now.
    fn credit(&mut self, gpu: Gpu, tree: &[Object], figures: Option<(Figure, Figure)>, is_unsure: bool) {
        let booked = bytes_on(tree, gpu);
        let Some((before, after)) = figures else { return self.stay(gpu, tree, booked) };
        let passed = self.books.sums(gpu).passed;
        let all = booked.saturating_add(passed);
        let left = before.owned().saturating_sub(after.owned()).min(all);
        let private = before.private.saturating_sub(after.private).min(left);
        let credit = if is_unsure { 0 } else { private };
        // RM counts the rest on, under a handle that came without an allocation.
        let _ = self.books.set_passed(gpu, all - left);
        self.stay(gpu, tree, left - credit);
        if left == credit && all - left > passed {
            self.keep_rounding(gpu, tree);
        }
    }

    /// Notes that `bytes` of what was freed stay on the card.
    fn stay(&mut self, gpu: Gpu, tree: &[Object], bytes: u64) {
        let _ = self.books.orphan(gpu, bytes);
        if bytes > 0 {
            self.keep_rounding(gpu, tree);
        }
        self.settle_budget(gpu);
    }

    /// Keeps what RM took for freed memory besides its bytes, which stays as long as they do.
    fn keep_rounding(&mut self, gpu: Gpu, tree: &[Object]) {
        let memory = tree.iter().filter(|object| object.gpu == Some(gpu) && object.bytes > 0);
        let _ = self.books.orphan(gpu, memory.map(|object| object.cost).sum());
        self.settle_budget(gpu);
    }

    /// Whether no client of this process is known to use the GPU any more.
    fn has_no_more(&self, gpu: Gpu, process: u32) -> bool {
        !self.books.anchors(gpu).iter().any(|anchor| {
            self.books.get(anchor.client, anchor.client).is_some_and(|client| client.parent == process)
        })
    }
}

fn bytes_on(tree: &[Object], gpu: Gpu) -> u64 {
    let of_gpu = tree.iter().filter(|object| object.gpu == Some(gpu) && object.class.kind() == Kind::Memory);
    of_gpu.map(|object| object.bytes).fold(0, u64::saturating_add)
}
