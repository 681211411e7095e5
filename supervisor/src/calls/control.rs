//! Control calls. Nearly all are let through.

use nix::errno::Errno;

use super::allocate::give_back;
use super::{Answer, Call, Processes, Program, Supervisor};
use crate::abi::channels::{LISTS, List, MOST};
use crate::abi::{Class, Status, control, number, put, u32_at, u64_at};
use crate::manager::{Manager, Pointed, devices};

/// The largest parameters of a control call that is performed.
const MOST_PARAMETERS: usize = LISTS[0].size;

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    pub(super) fn control(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        let mut structure = [0; control::SIZE];
        if program.read(call.address, &mut structure).is_err() {
            return Answer::Fail(Errno::EFAULT);
        }
        let command = u32_at(&structure, control::COMMAND);
        match LISTS.iter().find(|list| list.command == command) {
            Some(list) => self.stop_channels(list, structure, call, program, file),
            None => self.let_through(call, control::EXPORTS.contains(&command)),
        }
    }

    /// Whether a client is the container's. The books have whatever a program has named, so RM is asked: a client
    /// answers on the file alone on which it was made.
    fn is_own_client(&mut self, client: u32, file: &M::File) -> bool {
        if devices(&mut self.manager, file, client).is_some() {
            return true;
        }
        let known = self.books.get(client, client).filter(|one| one.class == Class::CLIENT);
        let Some(known) = known else { return false };
        let Ok(fd) = u32::try_from(known.bytes) else { return false };
        let file = self.processes.file(known.parent, fd.cast_signed());
        file.is_some_and(|file| devices(&mut self.manager, &file, client).is_some())
    }

    /// Performs a call that stops or starts channels, if all of them are the container's.
    fn stop_channels(
        &mut self,
        list: &List,
        mut structure: [u8; control::SIZE],
        call: &Call,
        program: &impl Program,
        file: &M::File,
    ) -> Answer {
        let status_at = call.address + control::STATUS as u64;
        if u32_at(&structure, control::PARAMETERS_SIZE) as usize != list.size {
            return self.refuse(program, status_at, Status::INVALID_ARGUMENT);
        }
        let mut room = [0; MOST_PARAMETERS];
        let parameters = &mut room[..list.size];
        let parameters_at = u64_at(&structure, control::PARAMETERS);
        if program.read(parameters_at, parameters).is_err() {
            return self.refuse(program, status_at, Status::INVALID_ADDRESS);
        }
        let count = u32_at(parameters, list.count) as usize;
        if count > MOST {
            return self.refuse(program, status_at, Status::INVALID_ARGUMENT);
        }
        let mut clients: Vec<u32> = (0..count).map(|at| u32_at(parameters, list.clients + 4 * at)).collect();
        clients.sort_unstable();
        clients.dedup();
        if !clients.into_iter().all(|client| self.is_own_client(client, file)) {
            return self.refuse(program, status_at, Status::INSUFFICIENT_PERMISSIONS);
        }
        if !program.waits() {
            return Answer::Gone;
        }
        let pointed = &mut [Pointed { offset: control::PARAMETERS, bytes: parameters }];
        if let Err(errno) = self.manager.call(file, number::CONTROL, &mut structure, pointed) {
            return Answer::Fail(errno);
        }
        put(&mut structure, control::PARAMETERS, &parameters_at.to_ne_bytes());
        give_back(program, &[(call.address, &structure), (parameters_at, parameters)])
    }
}
