//! Duplicates of objects between a user's own clients.

use nix::errno::Errno;

use super::allocate::give_back;
use super::{Answer, Call, Processes, Program, Supervisor};
use crate::abi::{Status, duplicate, number, put, u32_at};
use crate::journal::Step;
use crate::manager::{Manager, free_object};

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    /// RM counts a duplicate's memory once, for its owner, so nothing is charged.
    pub(super) fn duplicate(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        let mut structure = [0; duplicate::SIZE];
        if program.read(call.address, &mut structure).is_err() {
            return Answer::Fail(Errno::EFAULT);
        }
        if !program.waits() {
            return Answer::Gone;
        }
        let (client, asked) = (u32_at(&structure, duplicate::CLIENT), u32_at(&structure, duplicate::HANDLE));
        let mut handle = asked;
        let status = loop {
            if asked == 0 {
                handle = self.own_handle();
                put(&mut structure, duplicate::HANDLE, &handle.to_ne_bytes());
            }
            self.journal.begin(Step::Allocating { client, handle });
            if let Err(errno) = self.manager.call(file, number::DUP_OBJECT, &mut structure, &mut []) {
                return Answer::Fail(errno);
            }
            let status = Status(u32_at(&structure, duplicate::STATUS));
            if status != Status::DUPLICATE || asked != 0 {
                break status;
            }
        };
        if status != Status::OK && asked == 0 {
            put(&mut structure, duplicate::HANDLE, &[0; 4]);
        }
        let answer = give_back(program, &[(call.address, &structure)]);
        if status == Status::OK && answer != Answer::Done {
            let _ = free_object(&mut self.manager, file, client, handle);
        }
        answer
    }
}
