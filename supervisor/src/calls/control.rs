//! Control calls. The supervisor lets nearly all of them through.

use nix::errno::Errno;

use super::allocate::give_back;
use super::{Answer, Call, Engines, Processes, Program, Supervisor};
use crate::abi::channels::{LISTS, List, MOST, SCHEDULE, STOP, STOPS};
use crate::abi::{Class, SCHEDULINGS, Status, control, number, put, u32_at, u64_at};
use crate::engine;
use crate::manager::{Manager, Pointed, devices};

/// The largest parameters of a control call that the supervisor performs.
const MOST_PARAMETERS: usize = LISTS[0].size;

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    pub(super) fn control(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        let mut structure = [0; control::SIZE];
        if program.read(call.address, &mut structure).is_err() {
            return Answer::Fail(Errno::EFAULT);
        }
        let command = u32_at(&structure, control::COMMAND);
        if let Some(list) = LISTS.iter().find(|list| list.command == command) {
            return self.stop_channels(list, structure, call, program, file);
        }
        if self.holds_compute() {
            if SCHEDULINGS.contains(&command) {
                // The schedule sets slices and levels. Report success to the program.
                return self.refuse(program, call.address + control::STATUS as u64, Status::OK);
            }
            if SCHEDULE.contains(&command) {
                return self.begin_scheduling(structure, call, program, file);
            }
            // It may turn into a call that starts channels after this check.
            self.disturb();
        }
        self.let_through(call, control::EXPORTS.contains(&command))
    }

    /// Whether a client belongs to the container. The books hold any handle that a program has named, so
    /// query RM: a client answers only on the file on which it was made.
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

    /// Performs a call that lets channels run for the first time. The schedule decides from then on.
    fn begin_scheduling(
        &mut self,
        mut structure: [u8; control::SIZE],
        call: &Call,
        program: &impl Program,
        file: &M::File,
    ) -> Answer {
        const MOST: usize = 16;
        let status_at = call.address + control::STATUS as u64;
        let mut room = [0; MOST];
        let size = u32_at(&structure, control::PARAMETERS_SIZE) as usize;
        let Some(parameters) = room.get_mut(..size) else {
            return self.refuse(program, status_at, Status::INVALID_ARGUMENT);
        };
        let parameters_at = u64_at(&structure, control::PARAMETERS);
        if program.read(parameters_at, parameters).is_err() {
            return self.refuse(program, status_at, Status::INVALID_ADDRESS);
        }
        if !program.waits() {
            return Answer::Gone;
        }
        // A channel that the schedule has stopped runs when the schedule says so. An unknown channel never
        // runs.
        if !self.may_begin(u32_at(&structure, control::CLIENT), u32_at(&structure, control::OBJECT)) {
            return self.refuse(program, status_at, Status::OK);
        }
        let pointed = &mut [Pointed { offset: control::PARAMETERS, bytes: parameters }];
        if let Err(errno) = self.manager.call(file, number::CONTROL, &mut structure, pointed) {
            return Answer::Fail(errno);
        }
        self.stop_again();
        put(&mut structure, control::PARAMETERS, &parameters_at.to_ne_bytes());
        give_back(program, &[(call.address, &structure), (parameters_at, parameters)])
    }

    /// Performs a call that stops or starts channels, if all of them belong to the container.
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
        let named = |at: usize| (u32_at(parameters, at), u32_at(parameters, at + 4 * MOST));
        let named: Vec<(u32, u32)> = (0..count).map(|at| named(list.clients + 4 * at)).collect();
        let mut clients: Vec<u32> = named.iter().map(|(client, _)| *client).collect();
        clients.sort_unstable();
        clients.dedup();
        if !clients.into_iter().all(|client| self.is_own_client(client, file)) {
            return self.refuse(program, status_at, Status::INSUFFICIENT_PERMISSIONS);
        }
        if !program.waits() {
            return Answer::Gone;
        }
        let engines = self.engines();
        let mut engines: Vec<_> = engines.iter().flat_map(Engines::all).map(|(_, engine)| engine).collect();
        if !engines.is_empty() && list.command != STOP.command {
            return self.refuse(program, status_at, Status::NOT_SUPPORTED);
        }
        let runs = parameters[STOPS] == 0;
        let may_run = |(client, channel): &(u32, u32)| {
            let mut its = engines.iter().filter(|engine| engine.has(*client, *channel));
            its.next().is_some_and(|engine| !engine.has_stopped(*client, *channel))
        };
        // The schedule starts these later. It never starts those that it does not know, because their process
        // has ended.
        let is_held = !engines.is_empty();
        let is_later = |one: &(u32, u32)| runs && is_held && !may_run(one);
        let later: Vec<(u32, u32)> = named.iter().copied().filter(is_later).collect();
        let now: Vec<(u32, u32)> = named.iter().copied().filter(|one| !later.contains(one)).collect();
        let mut shortened = engine::list(now.iter().copied(), runs);
        let performed = if later.is_empty() { &mut *parameters } else { &mut shortened[..] };
        if !now.is_empty() || later.is_empty() {
            let pointed = &mut [Pointed { offset: control::PARAMETERS, bytes: performed }];
            if let Err(errno) = self.manager.call(file, number::CONTROL, &mut structure, pointed) {
                return Answer::Fail(errno);
            }
        }
        if now.is_empty() && !later.is_empty() {
            put(&mut structure, control::STATUS, &Status::OK.0.to_ne_bytes());
        }
        if u32_at(&structure, control::STATUS) == Status::OK.0 {
            for engine in &mut engines {
                for (client, channel) in &named {
                    if engine.has(*client, *channel) {
                        engine.want(*client, *channel, runs);
                        self.books.set_stopped(*client, *channel, !runs);
                    }
                }
            }
        }
        put(&mut structure, control::PARAMETERS, &parameters_at.to_ne_bytes());
        give_back(program, &[(call.address, &structure), (parameters_at, parameters)])
    }
}
