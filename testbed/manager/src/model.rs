//! RM's state: clients by file, objects, and memory with a count of its handles.

mod controls;
mod running;
mod switches;

use std::collections::{BTreeMap, HashMap};

use gpushare_supervisor::abi::{
    Class, Era, Kind, Status, alloc, alloc_object, channel_group, control, duplicate, free, heap, memory,
    number, put, switches as records, transfer, u32_at, u64_at,
};

use running::{Channel, Steered};
use switches::Switches;
pub use switches::{Began, Engine};

/// The address in the program's memory is invalid.
#[derive(Clone, Copy, Debug)]
pub struct ReadError;

/// The memory of the task that makes a call.
pub trait Memory {
    /// Reads at `address`.
    ///
    /// # Errors
    /// [`ReadError`].
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), ReadError>;

    /// Writes at `address`.
    ///
    /// # Errors
    /// [`ReadError`].
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), ReadError>;
}

/// The task that makes a call.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// PID of its process.
    pub pid: u32,
    /// Whether it has CAP_SYS_ADMIN.
    pub is_admin: bool,
    /// The file on which it calls.
    pub file: u64,
    /// GPUs whose own files it has open, as bits.
    pub gpus: u32,
}

/// A GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Its memory in bytes.
    pub memory: u64,
}

const INVALID_CLIENT: Status = Status(0x23);
const INVALID_PARENT: Status = Status(0x36);
const INSUFFICIENT_PERMISSIONS: Status = Status(0x1b);
const NOT_SUPPORTED: Status = Status(0x56);
const NOT_FOUND: Status = Status(0x57);

/// NV_ESC_RM_ALLOC_MEMORY, which gives administrators a view of all memory.
const ALLOC_MEMORY: u8 = 0x27;
/// Memory that RM takes for objects and does not count, in bytes, on an H200 with driver 580. A channel group
/// on a copy engine takes none by itself.
const COMPUTE_GROUP_COST: u64 = 4416 << 10;
const CHANNEL_COST: u64 = 64 << 10;
const ADDRESS_SPACE_COST: u64 = 64 << 10;
/// The same for a range of 1 TiB.
const TERABYTE_COST: u64 = 2184 << 20;

/// NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD, and the offsets of its handle and descriptor.
const EXPORT_TO_FD: u32 = 0x3d05;
const EXPORT_OBJECT: usize = 12;
const EXPORT_FD: usize = 24;
const EXPORT_SIZE: usize = 32;

/// Handles of clients begin after this one.
const FIRST_CLIENT: u32 = 0xc1d0_0000;

/// Holder of a handle to a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    /// An object of a program's client.
    Object(u32, u32),
    /// A client of the kernel, for a file.
    File(u64),
}

#[derive(Debug)]
struct Piece {
    gpu: usize,
    /// Bytes that RM counts: 0 for page tables and the buffers of channels.
    bytes: u64,
    taken: u64,
    /// The first one is the owner.
    holders: Vec<Holder>,
}

#[derive(Debug)]
struct Object {
    parent: u32,
    class: Class,
    gpu: Option<usize>,
    piece: Option<u64>,
}

#[derive(Debug)]
struct Client {
    file: u64,
    pid: u32,
    objects: BTreeMap<u32, Object>,
}

/// RM.
#[derive(Debug)]
pub struct Manager {
    era: &'static Era,
    gpus: Vec<Gpu>,
    clients: HashMap<u32, Client>,
    pieces: HashMap<u64, Piece>,
    /// Channels, by client and handle.
    channels: BTreeMap<(u32, u32), Channel>,
    /// Slices set for channel groups, in microseconds, by client and handle.
    slices: BTreeMap<(u32, u32), u64>,
    steered: Option<Steered>,
    switches: Switches,
    next_client: u32,
    next_handle: u32,
    next_piece: u64,
    /// Number of privileged objects: those that an administrator made in another process's client.
    pub privileged: u64,
}

impl Manager {
    /// Creates RM for a driver of this era, with these GPUs.
    pub fn new(era: &'static Era, gpus: Vec<Gpu>) -> Self {
        let (clients, pieces, channels, slices) = Default::default();
        let (next_client, next_handle) = (FIRST_CLIENT, 0xcaf0_0000);
        Self {
            era,
            gpus,
            clients,
            pieces,
            channels,
            slices,
            steered: None,
            switches: Switches::default(),
            next_client,
            next_handle,
            next_piece: 0,
            privileged: 0,
        }
    }

    /// Makes client handles repeat from the first one, as RM does after many clients.
    pub fn reuse_handles(&mut self) {
        self.next_client = FIRST_CLIENT;
    }

    /// Serves a call with this `structure`. An error is one that `ioctl` reports.
    ///
    /// # Errors
    /// [`ReadError`] for an address in the structure itself; any other failure is a status in the structure.
    pub fn call(
        &mut self,
        caller: Caller,
        number: u8,
        structure: &mut [u8],
        program: &dyn Memory,
    ) -> Result<bool, ReadError> {
        match (number, structure.len()) {
            (number::ALLOC, size) if self.era.has_alloc_size(size) => {
                self.allocate(caller, structure, program)?;
            }
            (number::FREE, free::SIZE) => {
                let status =
                    self.free(caller, u32_at(structure, free::CLIENT), u32_at(structure, free::HANDLE));
                set(structure, free::STATUS, status);
            }
            (number::CONTROL, control::SIZE) => self.control(caller, structure, program)?,
            (number::DUP_OBJECT, duplicate::SIZE) => {
                let status = self.duplicate(caller, structure);
                set(structure, duplicate::STATUS, status);
            }
            (number::VID_HEAP_CONTROL, heap::SIZE) => self.heap(caller, structure),
            (number::ALLOC_OBJECT, alloc_object::SIZE) => {
                let word = |at| u32_at(structure, at);
                let (class, place) = (Class(word(alloc_object::CLASS)), [word(0), word(4), word(8)]);
                let made = self.make(caller, class, place, &mut []);
                if let Ok(handle) = made {
                    let at = if class.kind() == Kind::Client { alloc_object::CLIENT } else { 8 };
                    put(structure, at, &handle.to_ne_bytes());
                }
                set(structure, alloc_object::STATUS, made.err().unwrap_or(Status::OK));
            }
            (ALLOC_MEMORY, 56) => {
                let status = if caller.is_admin { Status::OK } else { INSUFFICIENT_PERMISSIONS };
                if caller.is_admin {
                    self.privileged += 1;
                }
                set(structure, 40, status);
            }
            (number::TRANSFER, transfer::SIZE) => {
                let Ok(inner) = u8::try_from(u32_at(structure, transfer::COMMAND)) else { return Ok(false) };
                let size = u32_at(structure, transfer::LENGTH) as usize;
                if inner == number::TRANSFER || size > 4096 {
                    return Ok(false);
                }
                let address = u64_at(structure, transfer::ADDRESS);
                let mut bytes = vec![0; size];
                program.read(address, &mut bytes)?;
                let is_known = self.call(caller, inner, &mut bytes, program)?;
                program.write(address, &bytes)?;
                return Ok(is_known);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn client(&mut self, caller: Caller, handle: u32) -> Result<&mut Client, Status> {
        self.clients.get_mut(&handle).filter(|client| client.file == caller.file).ok_or(INVALID_CLIENT)
    }

    fn allocate(
        &mut self,
        caller: Caller,
        structure: &mut [u8],
        program: &dyn Memory,
    ) -> Result<(), ReadError> {
        let at = self.era.alloc_status(structure.len());
        let class = Class(u32_at(structure, alloc::CLASS));
        let address = u64_at(structure, alloc::PARAMETERS);
        let size = match class.kind() {
            Kind::Device => 56,
            Kind::Subdevice => Class::SUBDEVICE_PARAMETERS,
            _ if class == records::host_memory::CLASS => self.era.memory,
            _ if class == records::buffer::CLASS => records::buffer::SIZE,
            _ => class.performed(self.era).unwrap_or(0),
        };
        let mut parameters = vec![0; if address == 0 { 0 } else { size }];
        if program.read(address, &mut parameters).is_err() && !parameters.is_empty() {
            set(structure, at, Status::INVALID_ADDRESS);
            return Ok(());
        }
        let word = |at| u32_at(structure, at);
        let place = [word(alloc::CLIENT), word(alloc::PARENT), word(alloc::HANDLE)];
        let (status, handle) = match self.make(caller, class, place, &mut parameters) {
            Ok(handle) => (Status::OK, handle),
            Err(status) => (status, place[2]),
        };
        set(structure, at, status);
        if class.kind() == Kind::Client && status == Status::OK {
            put(structure, alloc::CLIENT, &handle.to_ne_bytes());
        }
        put(structure, alloc::HANDLE, &handle.to_ne_bytes());
        if status == Status::OK && !parameters.is_empty() && program.write(address, &parameters).is_err() {
            let _ = self.free(caller, place[0], handle);
            set(structure, at, Status::INVALID_ADDRESS);
        }
        Ok(())
    }

    fn make(
        &mut self,
        caller: Caller,
        class: Class,
        [client, parent, asked]: [u32; 3],
        parameters: &mut [u8],
    ) -> Result<u32, Status> {
        if class.kind() == Kind::Client {
            self.next_client += 1;
            let handle = self.next_client;
            let Caller { file, pid, .. } = caller;
            self.clients.insert(handle, Client { file, pid, objects: BTreeMap::new() });
            return Ok(handle);
        }
        let owner = self.client(caller, client)?;
        if asked != 0 && (owner.objects.contains_key(&asked) || asked == client) {
            return Err(Status::DUPLICATE);
        }
        let above = owner.objects.get(&parent);
        let gpu = above.and_then(|above| above.gpu);
        let is_grouped = above.is_some_and(|above| above.class.kind() == Kind::ChannelGroup);
        if parent != client && above.is_none() {
            return Err(INVALID_PARENT);
        }
        let is_others = owner.pid != caller.pid;
        let mut cost = 0;
        let mut object = Object { parent, class, gpu, piece: None };
        match class.kind() {
            Kind::Device if parent == client && parameters.len() >= 4 => {
                let gpu = u32_at(parameters, 0) as usize;
                object.gpu = Some(gpu).filter(|gpu| *gpu < self.gpus.len());
                let gpu = object.gpu.ok_or(Status::INVALID_ARGUMENT)?;
                // The driver looks for the GPU's file among those of the calling task.
                if caller.gpus >> gpu & 1 == 0 {
                    return Err(INSUFFICIENT_PERMISSIONS);
                }
            }
            Kind::Device => return Err(INVALID_PARENT),
            Kind::Memory => {
                let gpu = gpu.ok_or(INVALID_PARENT)?;
                if parameters.is_empty() {
                    return Err(Status::INVALID_ARGUMENT);
                }
                let bytes = self.take(gpu, u64_at(parameters, memory::LENGTH))?;
                put(parameters, memory::LENGTH, &bytes.to_ne_bytes());
                object.piece = Some(self.next_piece);
            }
            Kind::VirtualRange => {
                let flags = u32_at(parameters, memory::FLAGS);
                if flags & (memory::LAZY | memory::EXTERNALLY_MANAGED) == 0 {
                    cost = u64_at(parameters, memory::LENGTH) / (1 << 20) * (TERABYTE_COST >> 20);
                }
            }
            Kind::ChannelGroup => {
                let engine = parameters.get(channel_group::ENGINE..).map_or(0, |from| u32_at(from, 0));
                cost = if channel_group::COPIES.contains(&engine) { 0 } else { COMPUTE_GROUP_COST };
            }
            Kind::Channel if is_grouped => cost = CHANNEL_COST,
            // RM makes a group for the channel.
            Kind::Channel => cost = CHANNEL_COST + COMPUTE_GROUP_COST,
            Kind::AddressSpace => cost = ADDRESS_SPACE_COST,
            Kind::Subdevice if self.has_subdevice(client, parent) => {
                return Err(Status::INSUFFICIENT_RESOURCES);
            }
            Kind::Subdevice | Kind::Duplicator => {}
            Kind::Other if class.0 == 0xc2 && !caller.is_admin => return Err(INSUFFICIENT_PERMISSIONS),
            Kind::Other | Kind::Client => {}
        }
        if let Some(gpu) = object.gpu.filter(|_| cost > 0) {
            if self.used(gpu).saturating_add(cost) > self.gpus[gpu].memory {
                return Err(Status::NO_MEMORY);
            }
            self.next_piece += 1;
            self.pieces.insert(self.next_piece, Piece { gpu, bytes: 0, taken: cost, holders: Vec::new() });
            object.piece = Some(self.next_piece);
        }
        if caller.is_admin && is_others && !matches!(class.kind(), Kind::Subdevice) {
            self.privileged += 1;
        }
        let handle = if asked == 0 { self.chosen_handle(client) } else { asked };
        if let Some(piece) = object.piece.and_then(|piece| self.pieces.get_mut(&piece)) {
            piece.holders.push(Holder::Object(client, handle));
        }
        if object.class.kind() == Kind::Channel {
            let _ = self.channels.insert((client, handle), Channel::new());
        }
        if class == records::host_memory::CLASS && !parameters.is_empty() {
            self.add_host_memory((client, handle), parameters)?;
        } else if class == records::buffer::CLASS && !parameters.is_empty() {
            self.add_buffer((client, handle), parameters)?;
        }
        if let Some(client) = self.clients.get_mut(&client) {
            client.objects.insert(handle, object);
        }
        Ok(handle)
    }

    /// Lists the clients that have an object with this handle.
    pub fn clients_with(&self, handle: u32) -> Vec<u32> {
        let has = |(_, client): &(&u32, &Client)| client.objects.contains_key(&handle);
        self.clients.iter().filter(has).map(|(client, _)| *client).collect()
    }

    /// A device has one subdevice.
    fn has_subdevice(&self, client: u32, device: u32) -> bool {
        let objects = self.clients.get(&client).into_iter().flat_map(|client| client.objects.values());
        objects.filter(|object| object.parent == device).any(|object| object.class == Class::SUBDEVICE)
    }

    fn chosen_handle(&mut self, client: u32) -> u32 {
        loop {
            self.next_handle += 1;
            let is_free = |client: &Client| !client.objects.contains_key(&self.next_handle);
            if self.clients.get(&client).is_none_or(is_free) {
                return self.next_handle;
            }
        }
    }

    /// Takes a piece of memory that has no holder yet, and returns its size.
    fn take(&mut self, gpu: usize, bytes: u64) -> Result<u64, Status> {
        let bytes = bytes.checked_next_multiple_of(4096).filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or(Status::INVALID_ARGUMENT)?;
        let taken = bytes.checked_next_multiple_of(memory::PIECE).ok_or(Status::NO_MEMORY)?;
        if self.used(gpu).saturating_add(taken) > self.gpus[gpu].memory {
            return Err(Status::NO_MEMORY);
        }
        self.next_piece += 1;
        self.pieces.insert(self.next_piece, Piece { gpu, bytes, taken, holders: Vec::new() });
        Ok(bytes)
    }

    /// Returns the bytes of a GPU that are in use.
    pub fn used(&self, gpu: usize) -> u64 {
        let pieces = self.pieces.values().filter(|piece| piece.gpu == gpu);
        pieces.map(|piece| piece.taken).fold(0, u64::saturating_add)
    }

    /// Returns the bytes of a GPU that RM counts for a process: with one handle, and with duplicates.
    pub fn figure(&self, gpu: usize, pid: u32) -> (u64, u64) {
        let (mut private, mut shared) = (0, 0);
        for piece in self.pieces.values().filter(|piece| piece.gpu == gpu) {
            let Some(Holder::Object(client, _)) = piece.holders.first() else { continue };
            if self.clients.get(client).is_none_or(|client| client.pid != pid) {
                continue;
            }
            *(if piece.holders.len() == 1 { &mut private } else { &mut shared }) += piece.bytes;
        }
        (private, shared)
    }

    fn let_go(&mut self, id: u64, holder: Holder) {
        if let Some(piece) = self.pieces.get_mut(&id) {
            piece.holders.retain(|one| *one != holder);
            if piece.holders.is_empty() {
                self.pieces.remove(&id);
            }
        }
    }

    fn free(&mut self, caller: Caller, client: u32, handle: u32) -> Status {
        let Ok(owner) = self.client(caller, client) else { return INVALID_CLIENT };
        if handle == client {
            self.end_client(client);
            return Status::OK;
        }
        // RM treats an unknown handle as freed already.
        let mut gone = vec![handle];
        let mut next = 0;
        while let Some(parent) = gone.get(next).copied() {
            gone.extend(
                owner.objects.iter().filter(|(_, object)| object.parent == parent).map(|(at, _)| *at),
            );
            next += 1;
        }
        for handle in gone {
            self.end_object(client, handle);
        }
        Status::OK
    }

    fn end_object(&mut self, client: u32, handle: u32) {
        self.switches.end((client, handle));
        let gone = (self.channels.remove(&(client, handle)), self.slices.remove(&(client, handle)));
        if !matches!(gone, (None, None)) {
            self.steer(client);
        }
        let object = self.clients.get_mut(&client).and_then(|client| client.objects.remove(&handle));
        if let Some(piece) = object.and_then(|object| object.piece) {
            self.let_go(piece, Holder::Object(client, handle));
        }
    }

    fn end_client(&mut self, client: u32) {
        let handles =
            self.clients.get(&client).map(|client| client.objects.keys().copied().collect::<Vec<_>>());
        handles.into_iter().flatten().for_each(|handle| self.end_object(client, handle));
        self.clients.remove(&client);
    }

    /// Closes a file after its last descriptor.
    pub fn close(&mut self, file: u64) {
        let of_file = self.clients.iter().filter(|(_, client)| client.file == file);
        let clients: Vec<u32> = of_file.map(|(handle, _)| *handle).collect();
        clients.into_iter().for_each(|client| self.end_client(client));
        let held: Vec<u64> = self.pieces.keys().copied().collect();
        held.into_iter().for_each(|piece| self.let_go(piece, Holder::File(file)));
    }

    /// Makes a client of the kernel hold the memory of an object until `file` is closed.
    pub fn hold(&mut self, file: u64, client: u32, handle: u32) -> Status {
        let piece = self.clients.get(&client).and_then(|client| client.objects.get(&handle));
        let Some(piece) = piece.and_then(|object| object.piece) else { return NOT_FOUND };
        if let Some(piece) = self.pieces.get_mut(&piece) {
            piece.holders.push(Holder::File(file));
        }
        Status::OK
    }

    fn duplicate(&mut self, caller: Caller, structure: &mut [u8]) -> Status {
        const SOURCE_CLIENT: usize = 12;
        const SOURCE: usize = 16;
        let word = |at| u32_at(structure, at);
        let (client, parent, asked) =
            (word(duplicate::CLIENT), word(duplicate::PARENT), word(duplicate::HANDLE));
        let (source_client, source) = (word(SOURCE_CLIENT), word(SOURCE));
        let pid = match self.client(caller, client) {
            Ok(owner) if asked != 0 && owner.objects.contains_key(&asked) => return Status::DUPLICATE,
            Ok(owner) if parent != client && !owner.objects.contains_key(&parent) => return INVALID_PARENT,
            Ok(owner) => owner.pid,
            Err(status) => return status,
        };
        // By default only clients of the same process may share.
        let source_owner = self.clients.get(&source_client).filter(|owner| owner.pid == pid);
        let Some(source) = source_owner.and_then(|owner| owner.objects.get(&source)) else {
            return NOT_FOUND;
        };
        let object = Object { parent, class: source.class, gpu: source.gpu, piece: source.piece };
        let piece = object.piece;
        let handle = if asked == 0 { self.chosen_handle(client) } else { asked };
        if let Some(piece) = piece.and_then(|piece| self.pieces.get_mut(&piece)) {
            piece.holders.push(Holder::Object(client, handle));
        }
        if let Some(owner) = self.clients.get_mut(&client) {
            owner.objects.insert(handle, object);
        }
        put(structure, duplicate::HANDLE, &handle.to_ne_bytes());
        Status::OK
    }

    fn heap(&mut self, caller: Caller, structure: &mut [u8]) {
        let word = |at| u32_at(structure, at);
        let (client, parent, flags) = (word(heap::CLIENT), word(heap::PARENT), word(heap::FLAGS));
        let (size_at, attributes_at) = match word(heap::FUNCTION) {
            heap::ALLOC_SIZE => (88, 56),
            heap::ALLOC_TILED_PITCH_HEIGHT => (88, 64),
            heap::ALLOC_SIZE_RANGE => (80, 56),
            heap::FREE => {
                let status = self.free(caller, client, word(heap::HANDLE));
                return set(structure, heap::STATUS, status);
            }
            heap::HW_FREE => {
                let status = self.free(caller, client, word(heap::HW_HANDLE));
                return set(structure, heap::STATUS, status);
            }
            _ => return set(structure, heap::STATUS, NOT_SUPPORTED),
        };
        let size = match word(heap::FUNCTION) {
            heap::ALLOC_TILED_PITCH_HEIGHT => u64::from(word(heap::HEIGHT)) * u64::from(word(heap::PITCH)),
            _ => u64_at(structure, size_at),
        };
        let class = match word(attributes_at) & memory::LOCATION {
            _ if flags & memory::VIRTUAL != 0 => Class::VIRTUAL_RANGE,
            0 => Class::MEMORY,
            _ => Class(0x3e),
        };
        let asked = if flags & memory::HANDLE_PROVIDED == 0 { 0 } else { word(heap::HANDLE) };
        let mut parameters = vec![0; self.era.memory];
        put(&mut parameters, memory::FLAGS, &flags.to_ne_bytes());
        put(&mut parameters, memory::LENGTH, &size.to_ne_bytes());
        let status = match self.make(caller, class, [client, parent, asked], &mut parameters) {
            Ok(handle) => {
                put(structure, heap::HANDLE, &handle.to_ne_bytes());
                put(structure, size_at, &u64_at(&parameters, memory::LENGTH).to_ne_bytes());
                Status::OK
            }
            Err(status) => status,
        };
        set(structure, heap::STATUS, status);
    }

    /// Returns the figures of all GPUs and processes, one per line.
    pub fn report(&self) -> String {
        let stopped = self.channels.values().filter(|channel| channel.since.is_none()).count();
        let mut lines = format!("privileged {}\nstopped {stopped}\n", self.privileged);
        for ((client, _), channel) in &self.channels {
            let pid = self.clients.get(client).map_or(0, |client| client.pid);
            let (ran, lived) = (channel.ran().as_micros(), channel.born.elapsed().as_micros());
            lines.push_str(&format!("channel of {pid} ran {ran} of {lived}\n"));
        }
        let mut pids: Vec<u32> = self.clients.values().map(|client| client.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        for gpu in 0..self.gpus.len() {
            lines.push_str(&format!("gpu {gpu} used {}\n", self.used(gpu)));
            for pid in &pids {
                let (private, shared) = self.figure(gpu, *pid);
                lines.push_str(&format!("gpu {gpu} pid {pid} private {private} shared {shared}\n"));
            }
        }
        lines
    }
}

fn set(structure: &mut [u8], at: usize, status: Status) {
    put(structure, at, &status.0.to_ne_bytes());
}
