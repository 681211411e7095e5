//! Control calls: queries about GPUs and processes, exports, and calls that stop channels.

use std::collections::BTreeSet;

use gpushare_supervisor::abi::{
    Class, Kind, Status, attached_ids, channels, child, control, device_ids, framebuffer_info, gid_info,
    handle_info, interleave, pid_info, pids, put, slice, u32_at, u64_at, uuid_of_id,
};

use super::{
    Caller, Client, EXPORT_FD, EXPORT_OBJECT, EXPORT_SIZE, EXPORT_TO_FD, Manager, Memory, NOT_FOUND,
    NOT_SUPPORTED, Object, ReadError, set,
};

impl Manager {
    pub(super) fn control(
        &mut self,
        caller: Caller,
        structure: &mut [u8],
        program: &dyn Memory,
    ) -> Result<(), ReadError> {
        let word = |at| u32_at(structure, at);
        let (client, object) = (word(control::CLIENT), word(control::OBJECT));
        let (command, size) = (word(control::COMMAND), word(control::PARAMETERS_SIZE) as usize);
        let address = u64_at(structure, control::PARAMETERS);
        let wanted = match command {
            pid_info::COMMAND => pid_info::SIZE,
            pids::COMMAND => pids::SIZE,
            framebuffer_info::COMMAND => self.era.framebuffer_info,
            gid_info::COMMAND => gid_info::SIZE,
            EXPORT_TO_FD => EXPORT_SIZE,
            device_ids::COMMAND => device_ids::SIZE,
            handle_info::COMMAND => handle_info::SIZE,
            child::COMMAND => child::SIZE,
            attached_ids::COMMAND => attached_ids::SIZE,
            uuid_of_id::COMMAND => uuid_of_id::SIZE,
            _ if command == channels::STOP.command => channels::STOP.size,
            slice::COMMAND => slice::SIZE,
            interleave::COMMAND => interleave::SIZE,
            _ if channels::SCHEDULE.contains(&command) => size,
            _ => match Self::size_of_switches(command) {
                Some(size) => size,
                None => {
                    set(structure, control::STATUS, NOT_SUPPORTED);
                    return Ok(());
                }
            },
        };
        let mut parameters = vec![0; wanted];
        let found = match self.client(caller, client) {
            Ok(owner) => owner.objects.get(&object),
            Err(status) => {
                set(structure, control::STATUS, status);
                return Ok(());
            }
        };
        let kind = found.map(|object| object.class.kind());
        let gpu = found.filter(|object| object.class == Class::SUBDEVICE).and_then(|object| object.gpu);
        let status = if size != wanted {
            Status::INVALID_ARGUMENT
        } else if program.read(address, &mut parameters).is_err() {
            Status::INVALID_ADDRESS
        } else if Self::size_of_switches(command).is_some() {
            let status = self.call_switches(caller, command, [client, object], &mut parameters);
            program.write(address, &parameters)?; // also returns the reason for a refusal
            status
        } else if command == EXPORT_TO_FD {
            // The file system has already replaced the descriptor with the number of its file.
            let file = u64::from(u32_at(&parameters, EXPORT_FD));
            self.hold(file, client, u32_at(&parameters, EXPORT_OBJECT))
        } else if command == device_ids::COMMAND {
            let all = (0..self.gpus.len()).fold(0u32, |mask, gpu| mask | 1 << gpu);
            put(&mut parameters, device_ids::MASK, &all.to_ne_bytes());
            if object == client { Status::OK } else { NOT_FOUND }
        } else if [handle_info::COMMAND, child::COMMAND, attached_ids::COMMAND, uuid_of_id::COMMAND]
            .contains(&command)
        {
            if object == client { self.tell(command, client, &mut parameters) } else { NOT_FOUND }
        } else if command == channels::STOP.command {
            if gpu.is_some() { self.stop(&parameters) } else { NOT_FOUND }
        } else if command == slice::COMMAND {
            let is_group = kind == Some(Kind::ChannelGroup);
            if is_group {
                self.set_slice((client, object), u64_at(&parameters, slice::MICROSECONDS));
            }
            if is_group { Status::OK } else { NOT_FOUND }
        } else if command == interleave::COMMAND || channels::SCHEDULE.contains(&command) {
            let has_them = matches!(kind, Some(Kind::ChannelGroup | Kind::Channel));
            if has_them && command != interleave::COMMAND {
                self.start_below(client, object);
            }
            if has_them { Status::OK } else { NOT_FOUND }
        } else if let Some(gpu) = gpu {
            self.answer(command, gpu, &mut parameters);
            Status::OK
        } else {
            NOT_FOUND
        };
        if status == Status::OK {
            program.write(address, &parameters)?;
        }
        set(structure, control::STATUS, status);
        Ok(())
    }

    /// Answers queries about a client and about GPUs.
    fn tell(&self, command: u32, client: u32, parameters: &mut [u8]) -> Status {
        match command {
            child::COMMAND => {
                let (parent, class) = (u32_at(parameters, child::PARENT), u32_at(parameters, child::CLASS));
                let Some(client) = self.clients.get(&client) else { return NOT_FOUND };
                let is_it = |object: &Object| object.parent == parent && object.class == Class::SUBDEVICE;
                let found = client.objects.iter().find(|(_, object)| is_it(object));
                let Some((handle, _)) = found.filter(|_| class == child::SUBDEVICE) else { return NOT_FOUND };
                put(parameters, child::RESULT, &handle.to_ne_bytes());
            }
            attached_ids::COMMAND => {
                let used = self.clients.values().flat_map(|client| client.objects.values());
                let used = used.filter_map(|object| object.gpu);
                let used: BTreeSet<usize> = used.chain(self.pieces.values().map(|piece| piece.gpu)).collect();
                let ids = used.into_iter().map(|gpu| u32::try_from(gpu).unwrap_or(0));
                for (to, id) in parameters.chunks_exact_mut(4).zip(ids.chain(std::iter::repeat(u32::MAX))) {
                    put(to, 0, &id.to_ne_bytes());
                }
            }
            uuid_of_id::COMMAND => {
                let Some(gpu) = self.gpus.get(u32_at(parameters, uuid_of_id::ID) as usize) else {
                    return NOT_FOUND;
                };
                put(parameters, uuid_of_id::LENGTH, &16u32.to_ne_bytes());
                put(parameters, uuid_of_id::DATA, &gpu.uuid);
            }
            _ => return self.tell_of_object(client, parameters),
        }
        Status::OK
    }

    /// Returns the parent or the class of one of a client's objects.
    fn tell_of_object(&self, client: u32, parameters: &mut [u8]) -> Status {
        let (handle, asked) =
            (u32_at(parameters, handle_info::OBJECT), u32_at(parameters, handle_info::ASKED));
        let object = self.clients.get(&client).and_then(|client| client.objects.get(&handle));
        let result = match (object, asked) {
            (None, _) if handle != client => return NOT_FOUND,
            (_, handle_info::PARENT) => object.map_or(0, |object| object.parent),
            (_, handle_info::CLASS) => object.map_or(Class::CLIENT, |object| object.class).0,
            _ => return Status::INVALID_ARGUMENT,
        };
        put(parameters, handle_info::RESULT, &u64::from(result).to_ne_bytes());
        Status::OK
    }

    /// Stops or starts channels of any client, as an H200's firmware does.
    fn stop(&mut self, parameters: &[u8]) -> Status {
        let list = channels::STOP;
        let word = |at| u32_at(parameters, at);
        let count = (word(list.count) as usize).min(channels::MOST);
        let named =
            (0..count).map(|at| list.clients + 4 * at).map(|at| (word(at), word(at + 4 * channels::MOST)));
        let named: Vec<(u32, u32)> = named.collect();
        let is_channel = |(client, handle): &(u32, u32)| {
            let object = self.clients.get(client).and_then(|client| client.objects.get(handle));
            object.is_some_and(|object| object.class.kind() == Kind::Channel)
        };
        if !named.iter().all(is_channel) {
            return Status(0x21);
        }
        named.into_iter().for_each(|channel| self.set_running(channel, parameters[channels::STOPS] == 0));
        Status::OK
    }

    fn answer(&self, command: u32, gpu: usize, parameters: &mut [u8]) {
        match command {
            pids::COMMAND => {
                let uses = |client: &&Client| {
                    let mut objects = client.objects.values();
                    objects.any(|object| object.class == Class::SUBDEVICE && object.gpu == Some(gpu))
                };
                let users: BTreeSet<u32> =
                    self.clients.values().filter(uses).map(|client| client.pid).collect();
                let count = users.len().min(pids::MOST);
                put(parameters, pids::COUNT, &u32::try_from(count).unwrap_or(0).to_ne_bytes());
                for (at, pid) in users.into_iter().take(count).enumerate() {
                    put(parameters, pids::TABLE + 4 * at, &pid.to_ne_bytes());
                }
            }
            gid_info::COMMAND => {
                put(parameters, gid_info::LENGTH, &16u32.to_ne_bytes());
                put(parameters, gid_info::DATA, &self.gpus[gpu].uuid);
            }
            framebuffer_info::COMMAND => {
                let count = u32_at(parameters, framebuffer_info::COUNT) as usize;
                for entry in parameters[framebuffer_info::LIST..].chunks_exact_mut(8).take(count) {
                    let bytes = match u32_at(entry, 0) {
                        framebuffer_info::HEAP_SIZE => self.gpus[gpu].memory,
                        framebuffer_info::HEAP_FREE => self.gpus[gpu].memory - self.used(gpu),
                        _ => 0,
                    };
                    put(entry, 4, &u32::try_from(bytes >> 10).unwrap_or(u32::MAX).to_ne_bytes());
                }
            }
            _ => {
                let count = u32_at(parameters, pid_info::COUNT) as usize;
                for entry in parameters[pid_info::LIST..].chunks_exact_mut(pid_info::ENTRY).take(count) {
                    let (private, shared) = self.figure(gpu, u32_at(entry, pid_info::PID));
                    put(entry, pid_info::PRIVATE, &private.to_ne_bytes());
                    put(entry, pid_info::SHARED, &shared.to_ne_bytes());
                }
            }
        }
    }
}
