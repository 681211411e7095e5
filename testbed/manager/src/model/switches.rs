//! The record of context switches, which RM writes into host memory for administrators.

use std::collections::{BTreeMap, HashMap};

use gpushare_residency::event::{Event, Holder, Kind};
use gpushare_supervisor::abi::switches::{bind, buffer, header, host_memory, record, time};
use gpushare_supervisor::abi::{Status, memory, put, u32_at, u64_at};

use super::{Caller, Manager, NOT_FOUND};

/// A context that got a GPU's compute engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Began {
    /// PID of its process.
    pub pid: u32,
    /// Its number.
    pub context: u32,
    /// Time, in nanoseconds of the GPU's clock.
    pub at: u64,
}

/// A source of the switches on the GPUs' engines.
pub trait Engine: Send {
    /// Lists the contexts that got this GPU's engine since the last call, in order.
    fn began(&mut self, gpu: usize) -> Vec<Began>;

    /// Returns the GPU's clock, in nanoseconds.
    fn now(&self) -> u64;
}

/// The record and its readers.
#[derive(Default)]
pub(super) struct Switches {
    engine: Option<Box<dyn Engine>>,
    /// Host memory, by client and handle.
    memories: BTreeMap<(u32, u32), Vec<u8>>,
    buffers: BTreeMap<(u32, u32), Buffer>,
    holders: HashMap<usize, Holder>,
    sequence: u16,
}

impl std::fmt::Debug for Switches {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Switches")
    }
}

#[derive(Debug)]
struct Buffer {
    gpu: usize,
    header: (u32, u32),
    lines: (u32, u32),
    count: u32,
    is_bound: bool,
    is_enabled: bool,
}

impl Switches {
    /// Removes the state of a freed object.
    pub(super) fn end(&mut self, at: (u32, u32)) {
        let _ = (self.memories.remove(&at), self.buffers.remove(&at));
    }

    fn write(&mut self, gpu: usize, kind: Kind, at: u64) {
        self.sequence = self.sequence.wrapping_add(1);
        let line = Event { kind, at, sequence: self.sequence }.write();
        let Self { buffers, memories, .. } = self;
        for buffer in buffers.values().filter(|one| one.gpu == gpu && one.is_bound && one.is_enabled) {
            let Some(header) = memories.get(&buffer.header) else { continue };
            let (get, put_at) = (u32_at(header, 0), u32_at(header, header::PUT));
            let next = (put_at + 1) % buffer.count;
            if next == get {
                let dropped = u64_at(header, header::DROPPED) + 1;
                if let Some(header) = memories.get_mut(&buffer.header) {
                    put(header, header::DROPPED, &dropped.to_ne_bytes());
                }
                continue;
            }
            if let Some(lines) = memories.get_mut(&buffer.lines) {
                put(lines, put_at as usize * record::SIZE, &line);
            }
            if let Some(header) = memories.get_mut(&buffer.header) {
                put(header, header::PUT, &next.to_ne_bytes());
            }
        }
    }
}

impl Manager {
    /// Records the switches of `engine`.
    #[must_use]
    pub fn recording(mut self, engine: Box<dyn Engine>) -> Self {
        self.switches.engine = Some(engine);
        self
    }

    /// Whether a process has host memory, which it will map.
    pub fn has_host_memory(&self, pid: u32) -> bool {
        let mut owners = self.switches.memories.keys().filter_map(|(client, _)| self.clients.get(client));
        owners.any(|client| client.pid == pid)
    }

    /// Whether any process has host memory.
    pub fn knows_host_memory(&self) -> bool {
        !self.switches.memories.is_empty()
    }

    /// Returns the contents of host memory.
    pub fn host_memory(&self, client: u32, handle: u32) -> Option<&[u8]> {
        self.switches.memories.get(&(client, handle)).map(Vec::as_slice)
    }

    /// Whether the caller may map that memory.
    pub fn may_map(&mut self, caller: Caller, client: u32, handle: u32) -> Status {
        if let Err(status) = self.client(caller, client) {
            return status;
        }
        if self.host_memory(client, handle).is_some() { Status::OK } else { NOT_FOUND }
    }

    /// Records the switches since the last call. RM does so every 33 ms, and only if there is a reader.
    pub fn record_switches(&mut self) {
        for gpu in 0..self.gpus.len() {
            let switches = &mut self.switches;
            let Some(engine) = &mut switches.engine else { return };
            for Began { pid, context, at } in engine.began(gpu) {
                let new = Holder { pid, context };
                let old = switches.holders.insert(gpu, new);
                if old == Some(new) {
                    continue; // no other context had it meanwhile
                }
                old.into_iter().for_each(|old| switches.write(gpu, Kind::End(old), at));
                switches.write(gpu, Kind::Start(new), at);
            }
        }
    }

    pub(super) fn add_host_memory(&mut self, at: (u32, u32), parameters: &[u8]) -> Result<(), Status> {
        const MOST: u64 = 1 << 22;
        let length = u64_at(parameters, memory::LENGTH);
        let length = usize::try_from(length).ok().filter(|_| (1..=MOST).contains(&length));
        let is_read_only = u32_at(parameters, host_memory::MORE_ATTRIBUTES) & host_memory::READ_ONLY != 0;
        let length = length.filter(|_| is_read_only).ok_or(Status::INVALID_ARGUMENT)?;
        self.switches.memories.insert(at, vec![0; length]);
        Ok(())
    }

    pub(super) fn add_buffer(&mut self, at: (u32, u32), parameters: &[u8]) -> Result<(), Status> {
        let word = |offset| u32_at(parameters, offset);
        let client = self.clients.get(&at.0).ok_or(NOT_FOUND)?;
        let gpu =
            client.objects.get(&word(buffer::SUBDEVICE)).and_then(|object| object.gpu).ok_or(NOT_FOUND)?;
        let (header, lines) = ((at.0, word(buffer::HEADER_MEMORY)), (at.0, word(buffer::RECORD_MEMORY)));
        let room = |memory| self.switches.memories.get(memory).map_or(0, Vec::len);
        let (size, count) = (word(buffer::RECORD_SIZE) as usize, word(buffer::RECORDS));
        let is_right = size == record::SIZE
            && count > 0
            && room(&header) >= header::SIZE
            && room(&lines) >= size * count as usize;
        if !is_right {
            return Err(Status::INVALID_ARGUMENT);
        }
        let buffer = Buffer { gpu, header, lines, count, is_bound: false, is_enabled: false };
        self.switches.buffers.insert(at, buffer);
        Ok(())
    }

    /// Returns the size of the parameters of one of the record's calls.
    pub(super) fn size_of_switches(command: u32) -> Option<usize> {
        match command {
            bind::COMMAND => Some(bind::SIZE),
            buffer::ENABLE => Some(buffer::ENABLE_SIZE),
            buffer::UPDATE_GET => Some(buffer::UPDATE_GET_SIZE),
            time::COMMAND => Some(time::SIZE),
            _ => None,
        }
    }

    /// Serves a call about the record, on an object of the caller's client.
    pub(super) fn call_switches(
        &mut self,
        caller: Caller,
        command: u32,
        [client, object]: [u32; 2],
        parameters: &mut [u8],
    ) -> Status {
        let is_admin = caller.is_admin;
        let switches = &mut self.switches;
        match command {
            time::COMMAND => {
                let now = switches.engine.as_ref().map_or(0, |engine| engine.now());
                put(parameters, 0, &now.to_ne_bytes());
                Status::OK
            }
            bind::COMMAND => {
                // Other users get the record with noise in place of times and processes.
                let reason = match (switches.engine.is_some(), is_admin) {
                    (false, _) => 1u32,
                    (true, false) => 4,
                    (true, true) => 0,
                };
                put(parameters, bind::REASON, &reason.to_ne_bytes());
                let Some(buffer) = switches.buffers.get_mut(&(client, u32_at(parameters, 0))) else {
                    return NOT_FOUND;
                };
                buffer.is_bound = reason == 0;
                if buffer.is_bound { Status::OK } else { Status::NOT_SUPPORTED }
            }
            _ => {
                let Some(buffer) = switches.buffers.get_mut(&(client, object)) else { return NOT_FOUND };
                if command == buffer::ENABLE {
                    buffer.is_enabled = parameters[0] != 0;
                } else if let Some(header) = switches.memories.get_mut(&buffer.header) {
                    let get = u32_at(parameters, 0) % buffer.count;
                    put(header, 0, &get.to_ne_bytes());
                }
                Status::OK
            }
        }
    }
}
