//! Allocations, by class.

use nix::errno::Errno;

use super::{Answer, Call, Processes, Program, Supervisor};
use crate::abi::{Class, Kind, Status, alloc, channel_group, memory, number, put, u32_at, u64_at};
use crate::books::Object;
use crate::handles::Handles;
use crate::journal::Step;
use crate::manager::{Manager, Pointed, free_object};

/// The largest parameters of a class that the supervisor allocates.
const MOST_PARAMETERS: usize = 368;

/// Device memory of a channel group on a graphics and compute engine, in bytes: its context buffers. An H200
/// with driver 580 takes these 4,416 KiB.
const COMPUTE_GROUP: u64 = 69 * memory::PIECE;
/// Device memory of a channel group on a copy engine, in bytes. A context of libcuda takes 3.1 MiB more than
/// the charges for its objects, and has three such groups.
pub(super) const COPY_GROUP: u64 = 16 * memory::PIECE;
/// Device memory of a channel, in bytes: its instance block.
const CHANNEL: u64 = memory::PIECE;
/// Device memory of an address space, in bytes: its three upper page directories.
const ADDRESS_SPACE: u64 = 3 * memory::PIECE;

/// Returns the bytes that the driver's page allocator takes above `bytes`.
pub(super) fn padding(bytes: u64) -> u64 {
    bytes.next_multiple_of(memory::PIECE) - bytes
}

/// Returns the bytes that a channel group on an engine takes when it is made.
fn channel_group_cost(engine: u32) -> u64 {
    if channel_group::COPIES.contains(&engine) { COPY_GROUP } else { COMPUTE_GROUP }
}

/// Bytes of the tables above those, for a small range that shares them with no other.
const FEWEST_TABLES: u64 = 16 << 10;

/// Returns the bytes of page tables that a range of virtual memory takes when it is made.
pub(super) fn page_tables(flags: u32, bytes: u64) -> u64 {
    // An entry of 8 bytes per page of 4 KiB, another per 64 KiB, and one of 16 bytes per 2 MiB. For 1 TiB
    // that makes the 2,184 MiB that an H200 takes.
    let bytes = bytes.checked_next_multiple_of(2 << 20).unwrap_or(bytes);
    let tables = bytes / 512 + bytes / 8192 + bytes / 131_072 + FEWEST_TABLES;
    if flags & (memory::LAZY | memory::EXTERNALLY_MANAGED) == 0 { tables } else { 0 }
}

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    pub(super) fn allocate(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        let mut whole = [0; super::MOST_BYTES];
        let structure = &mut whole[..call.size];
        if program.read(call.address, structure).is_err() {
            return Answer::Fail(Errno::EFAULT);
        }
        let status_at = call.address + self.era.alloc_status(call.size) as u64;
        let class = Class(u32_at(structure, alloc::CLASS));
        let is_channel = class.kind() == Kind::Channel;
        let performed = class.performed(self.era).filter(|_| !is_channel || self.holds_compute());
        let Some(size) = performed else {
            if self.is_blind() {
                return self.refuse(program, status_at, Status::NO_MEMORY);
            }
            self.note_hint(structure, class, call, file);
            if is_channel && let Err(status) = self.charge_channel(structure, call, file) {
                return self.refuse(program, status_at, status);
            }
            return self.let_through(call, class.kind() == Kind::Duplicator);
        };
        let is_long = call.size == self.era.long;
        let flags = self.era.long_flags.filter(|_| is_long).map_or(0, |at| u32_at(structure, at));
        if flags & alloc::SERIALISED != 0 {
            return self.refuse(program, status_at, Status::INVALID_ARGUMENT);
        }
        let mut room = [0; MOST_PARAMETERS];
        let parameters_at = u64_at(structure, alloc::PARAMETERS);
        let parameters = &mut room[..if parameters_at == 0 { 0 } else { size }];
        let rights_at = if is_long { u64_at(structure, alloc::RIGHTS) } else { 0 };
        let mut rights = [0; alloc::RIGHTS_SIZE];
        let rights = &mut rights[..if rights_at == 0 { 0 } else { alloc::RIGHTS_SIZE }];
        let unread = |at, bytes: &mut [u8]| !bytes.is_empty() && program.read(at, bytes).is_err();
        if unread(parameters_at, parameters) || unread(rights_at, rights) {
            return self.refuse(program, status_at, Status::INVALID_ADDRESS);
        }

        let word = |at| u32_at(structure, at);
        let (client, parent, asked) = (word(alloc::CLIENT), word(alloc::PARENT), word(alloc::HANDLE));
        let mut object = Object { client, handle: asked, parent, class, gpu: None, bytes: 0, cost: 0 };
        match class.kind() {
            Kind::Memory => {
                object.bytes = u64_at(parameters, memory::LENGTH);
                object.cost = if object.bytes > i64::MAX as u64 { 0 } else { padding(object.bytes) };
            }
            Kind::VirtualRange => {
                let flags = u32_at(parameters, memory::FLAGS);
                object.cost = page_tables(flags, u64_at(parameters, memory::LENGTH));
            }
            Kind::ChannelGroup if parameters.is_empty() => object.cost = COMPUTE_GROUP,
            Kind::ChannelGroup => object.cost = channel_group_cost(u32_at(parameters, channel_group::ENGINE)),
            Kind::AddressSpace => object.cost = ADDRESS_SPACE,
            Kind::Channel => object.cost = self.channel_cost(client, parent),
            _ => {}
        }
        // RM would report the same, unless it no longer knows the object: then the object's bytes must not
        // get lost.
        if asked != 0 && self.books.get(client, asked).is_some() {
            return self.refuse(program, status_at, Status::DUPLICATE);
        }
        if let Err(status) = self.charge(&mut object, call, file) {
            return self.refuse(program, status_at, status);
        }
        if !program.waits() {
            self.uncharge(&object);
            return Answer::Gone;
        }
        put(structure, alloc::PARAMETERS, &[0; 8]);
        if is_long {
            put(structure, alloc::RIGHTS, &[0; 8]);
        }
        let mut status = Status::OK;
        for _ in 0..Handles::TRIES {
            if asked == 0 {
                object.handle = self.handles.draw();
                put(structure, alloc::HANDLE, &object.handle.to_ne_bytes());
            }
            self.journal.begin(Step::Allocating { client, handle: object.handle });
            let mut pointed = Vec::with_capacity(2);
            for (offset, bytes) in [(alloc::PARAMETERS, &mut *parameters), (alloc::RIGHTS, &mut *rights)] {
                if !bytes.is_empty() {
                    pointed.push(Pointed { offset, bytes });
                }
            }
            if let Err(errno) = self.manager.call(file, number::ALLOC, structure, &mut pointed) {
                self.uncharge(&object);
                return Answer::Fail(errno);
            }
            status = Status(u32_at(structure, self.era.alloc_status(call.size)));
            if status != Status::DUPLICATE || asked != 0 {
                break;
            }
        }
        if status == Status::OK {
            if class.kind() == Kind::Memory {
                object.bytes = u64_at(parameters, memory::LENGTH);
                object.cost = padding(object.bytes);
            }
            if let Err(refusal) = self.enter(&object, call, file) {
                return self.refuse(program, status_at, refusal);
            }
            if is_channel && let Err(refusal) = self.schedule(&object, call, file) {
                self.undo(&object, call, file);
                return self.refuse(program, status_at, refusal);
            }
        } else {
            self.uncharge(&object);
            if asked == 0 {
                put(structure, alloc::HANDLE, &[0; 4]);
            }
        }
        put(structure, alloc::PARAMETERS, &parameters_at.to_ne_bytes());
        if is_long {
            put(structure, alloc::RIGHTS, &rights_at.to_ne_bytes());
        }
        if status != Status::OK {
            return give_back(program, &[(call.address, structure)]);
        }
        let answer = give_back(program, &[(call.address, structure), (parameters_at, parameters)]);
        self.keep_if_received(&object, answer, call, file)
    }

    /// Records devices and subdevices that a program makes, to query RM through them later. The call has not
    /// happened yet and may turn into another one, so existing entries stay as they are.
    fn note_hint(&mut self, structure: &[u8], class: Class, call: &Call, file: &M::File) {
        // A program may name anything; keep room for objects that RM has made, and for sums.
        if !self.books.has_room() {
            return;
        }
        let word = |at| u32_at(structure, at);
        let (client, handle, parent) = (word(alloc::CLIENT), word(alloc::HANDLE), word(alloc::PARENT));
        // Whatever the call seems to be, it may make a client.
        let _ = self.books.note_maker(call.process);
        let is_hint = matches!(class.kind(), Kind::Device | Kind::Subdevice);
        if is_hint && client != 0 {
            self.note_client(client, call);
        }
        // RM has one subdevice per device, so ours must go.
        if class.kind() == Kind::Subdevice
            && let Some(own) = self.own_subdevice_of(client, parent)
            && free_object(&mut self.manager, file, client, own).is_ok()
        {
            self.books.remove(client, own);
            self.note_subdevice(client, parent, Some(own), None);
        }
        if is_hint && client != 0 && handle != 0 && self.books.get(client, handle).is_none() {
            let _ = self.books.add(&Object { client, handle, parent, class, gpu: None, bytes: 0, cost: 0 });
            if class.kind() == Kind::Subdevice {
                self.note_subdevice(client, parent, None, Some(handle));
            }
        }
    }

    /// Returns the supervisor's own subdevice below a device.
    fn own_subdevice_of(&self, client: u32, device: u32) -> Option<u32> {
        let known = self.books.subdevice_of(client, device).map(|known| known.handle);
        known.or_else(|| self.timekeepers_subdevice(client, device)).filter(|handle| Handles::is_own(*handle))
    }

    /// Charges a channel whose call is let through. The supervisor does not know whether RM makes it, nor its
    /// handle if RM chooses that. The charge therefore ends with the channel's parent.
    fn charge_channel(&mut self, structure: &[u8], call: &Call, file: &M::File) -> Result<(), Status> {
        let word = |at| u32_at(structure, at);
        let (client, parent, asked) = (word(alloc::CLIENT), word(alloc::PARENT), word(alloc::HANDLE));
        if self.books.get(client, asked).is_some() {
            return Err(Status::DUPLICATE);
        }
        let handle = if asked == 0 { self.handles.draw() } else { asked };
        let class = Class(word(alloc::CLASS));
        let mut object = Object {
            client,
            handle,
            parent,
            class,
            gpu: None,
            bytes: 0,
            cost: self.channel_cost(client, parent),
        };
        self.charge(&mut object, call, file)?;
        self.note_client(client, call);
        self.books.add(&object).map_err(|_| Status::INSUFFICIENT_RESOURCES)
    }

    /// Returns the bytes that RM takes for a channel. RM makes a group for a channel without one.
    fn channel_cost(&self, client: u32, parent: u32) -> u64 {
        let group = self.books.get(client, parent).filter(|above| above.class.kind() == Kind::ChannelGroup);
        if group.is_some() { CHANNEL } else { CHANNEL + COMPUTE_GROUP }
    }

    /// Finds the GPU of a new object and charges the bytes that it will take. If RM refuses its parent, that
    /// refusal is the result.
    pub(super) fn charge(&mut self, object: &mut Object, call: &Call, file: &M::File) -> Result<(), Status> {
        if !self.books.has_room() {
            return Err(Status::INSUFFICIENT_RESOURCES);
        }
        let gpu = self.place_of(object, call, file)?;
        // A duplicate lies on the GPU of its source.
        if *object.gpu.get_or_insert(gpu) != gpu {
            return Err(Status::INVALID_ARGUMENT);
        }
        let wanted = object.bytes.checked_add(object.cost).filter(|wanted| *wanted <= i64::MAX as u64);
        let wanted = wanted.ok_or(Status::NO_MEMORY)?;
        if !self.blind[gpu] && self.budget.raise(gpu, wanted) {
            return Ok(());
        }
        self.mend(gpu, Some((object.client, call, file)));
        let fits = !self.blind[gpu] && self.budget.raise(gpu, wanted);
        if fits { Ok(()) } else { Err(Status::NO_MEMORY) }
    }

    /// Undoes [`Self::charge`].
    pub(super) fn uncharge(&mut self, object: &Object) {
        if let Some(gpu) = object.gpu {
            self.settle_budget(gpu);
        }
    }

    /// Adds an object that RM has made to the books. Frees it at once if RM's own rounding puts it above the
    /// limit, or if RM counts its memory for no process of the container.
    ///
    /// # Errors
    /// The status to return to the program in place of the object.
    pub(super) fn enter(&mut self, object: &Object, call: &Call, file: &M::File) -> Result<(), Status> {
        let Some(gpu) = object.gpu else { return Ok(()) };
        self.note_client(object.client, call);
        let added = self.books.add(object);
        self.settle_budget(gpu);
        let takes = object.bytes > 0 || object.cost > 0;
        let status = match added {
            Ok(()) if takes && self.budget.charged(gpu) > self.budget.limit(gpu) => Status::NO_MEMORY,
            Ok(()) if object.bytes > 0 && !self.has_owner(object, call, file) => Status::NO_MEMORY,
            Ok(()) => return Ok(()),
            Err(_) => Status::INSUFFICIENT_RESOURCES,
        };
        self.undo(object, call, file);
        Err(status)
    }

    /// Frees an object if the program did not receive it, because it ended or has no memory for the answer.
    pub(super) fn keep_if_received(
        &mut self,
        object: &Object,
        answer: Answer,
        call: &Call,
        file: &M::File,
    ) -> Answer {
        if answer != Answer::Done {
            self.undo(object, call, file);
        }
        answer
    }
}

/// Writes results into the program's memory.
pub(super) fn give_back(program: &impl Program, parts: &[(u64, &[u8])]) -> Answer {
    if !program.waits() {
        return Answer::Gone;
    }
    match program.write(parts) {
        Ok(()) => Answer::Done,
        Err(_) => Answer::Fail(Errno::EFAULT),
    }
}
