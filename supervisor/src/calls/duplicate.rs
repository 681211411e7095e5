//! Duplicates of objects between clients of the same user.

use nix::errno::Errno;

use super::allocate::give_back;
use super::{Answer, Call, Processes, Program, Supervisor};
use crate::abi::{Class, Kind, Status, duplicate, number, put, u32_at};
use crate::books::Object;
use crate::handles::Handles;
use crate::journal::Step;
use crate::manager::{Manager, class_of};

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    /// Performs a duplication. RM counts a duplicate's memory once, for its owner. Memory that RM does not
    /// count lives as long as any duplicate, so the supervisor charges it for each.
    pub(super) fn duplicate(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        let mut structure = [0; duplicate::SIZE];
        if program.read(call.address, &mut structure).is_err() {
            return Answer::Fail(Errno::EFAULT);
        }
        let word = |at| u32_at(&structure, at);
        let status_at = call.address + duplicate::STATUS as u64;
        let (client, asked) = (word(duplicate::CLIENT), word(duplicate::HANDLE));
        if asked != 0 && self.books.get(client, asked).is_some() {
            return self.refuse(program, status_at, Status::DUPLICATE);
        }
        let source = self.books.get(word(duplicate::SOURCE_CLIENT), word(duplicate::SOURCE));
        let copied = source.filter(|source| source.class.kind() != Kind::Memory && source.cost > 0);
        let parent = word(duplicate::PARENT);
        let mut object = copied.map(|source| Object { client, handle: asked, parent, ..source });
        if let Some(object) = &mut object
            && let Err(status) = self.charge(object, call, file)
        {
            return self.refuse(program, status_at, status);
        }
        if !program.waits() {
            object.iter().for_each(|object| self.uncharge(object));
            return Answer::Gone;
        }
        let mut handle = asked;
        let mut status = Status::DUPLICATE;
        for _ in 0..Handles::TRIES {
            if asked == 0 {
                handle = self.handles.draw();
                put(&mut structure, duplicate::HANDLE, &handle.to_ne_bytes());
            }
            self.journal.begin(Step::Allocating { client, handle });
            if let Err(errno) = self.manager.call(file, number::DUP_OBJECT, &mut structure, &mut []) {
                object.iter().for_each(|object| self.uncharge(object));
                return Answer::Fail(errno);
            }
            status = Status(u32_at(&structure, duplicate::STATUS));
            if status != Status::DUPLICATE || asked != 0 {
                break;
            }
        }
        if status != Status::OK {
            object.iter().for_each(|object| self.uncharge(object));
            if asked == 0 {
                put(&mut structure, duplicate::HANDLE, &[0; 4]);
            }
            return give_back(program, &[(call.address, &structure)]);
        }
        let class = match &object {
            // The books may have only a hint in its place, or the source belongs to another container: its
            // memory that RM does not count would be charged to no container.
            None => class_of(&mut self.manager, file, client, handle),
            Some(_) => None,
        };
        let is_uncounted = matches!(
            class.map(Class::kind),
            Some(Kind::ChannelGroup | Kind::Channel | Kind::AddressSpace | Kind::VirtualRange)
        );
        if is_uncounted {
            let class = Class(0);
            self.undo(&Object { client, handle, parent, class, gpu: None, bytes: 0, cost: 0 }, call, file);
            return self.refuse(program, status_at, Status::INSUFFICIENT_PERMISSIONS);
        }
        if let Some(object) = &mut object {
            object.handle = handle;
            if let Err(refusal) = self.enter(object, call, file) {
                return self.refuse(program, status_at, refusal);
            }
        }
        let answer = give_back(program, &[(call.address, &structure)]);
        if answer != Answer::Done {
            let class = Class(0);
            let unknown = Object { client, handle, parent, class, gpu: None, bytes: 0, cost: 0 };
            self.undo(object.as_ref().unwrap_or(&unknown), call, file);
        }
        answer
    }
}
