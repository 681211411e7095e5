//! The books: the container's objects that take device memory, and their sums.
//!
//! They are records of a fixed size in memory that outlives the worker. A record counts once its `state` says
//! so, which is written last. A worker rebuilds everything else (index and sums) from the records when it
//! starts, so it may be killed between any two instructions.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::abi::{Class, Kind};

/// Most objects of a container. Beyond that, allocations fail with
/// [`crate::abi::Status::INSUFFICIENT_RESOURCES`].
pub const MOST_OBJECTS: usize = 65_536;

/// Index of a GPU among those that the lease grants.
pub type Gpu = usize;

/// Most GPUs of a lease.
pub const MOST_GPUS: usize = 16;

const EMPTY: u32 = 0;
const USED: u32 = 1;
/// A used record of a channel that its program has stopped.
const STOPPED: u32 = 2;
/// Stands in for a class: bytes that RM counts under a handle that the books do not know.
const PASSED: u32 = u32::MAX;
/// Stands in for a class: bytes that RM counts for no process, but which are still on the card.
const ORPHANED: u32 = u32::MAX - 1;
/// The GPU of an object that lies on none.
const NO_GPU: u32 = u32::MAX;

/// One entry. All zeros means empty.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Record {
    state: AtomicU32,
    client: u32,
    handle: u32,
    parent: u32,
    class: u32,
    gpu: u32,
    /// Bytes as RM counts them. For a client, the descriptor of its file.
    bytes: u64,
    /// Bytes that RM takes and does not count: rounding, page tables, channel groups. For a client, its
    /// owner.
    cost: u64,
}

const _: () = assert!(size_of::<Record>() == 40);

/// An object that takes device memory, or leads to others that do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// The client's handle, unique among all living clients.
    pub client: u32,
    /// The object's own handle, unique in the client.
    pub handle: u32,
    /// The handle of its parent in the client.
    pub parent: u32,
    /// Its class.
    pub class: Class,
    /// The GPU that it lies on, if known.
    pub gpu: Option<Gpu>,
    /// Bytes as RM counts them.
    pub bytes: u64,
    /// Bytes that RM takes in addition.
    pub cost: u64,
}

/// Not a real client handle: processes that made clients are recorded below it, each under its PID.
const MAKERS: u32 = 0;
/// Whether such a process has ended, stored in place of bytes.
const LIVES: u64 = 0;
const ENDED: u64 = 1;
/// Most such processes to keep after their end.
const MOST_MAKERS: usize = 8192;

/// A client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// Its handle.
    pub handle: u32,
    /// A process that has the client's file.
    pub process: u32,
    /// The descriptor of that file in the process.
    pub fd: i32,
    /// The process that made the client and for which RM counts its memory, once known.
    pub owner: Option<Owner>,
}

/// The process that made a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its PID.
    pub pid: u32,
    /// Distinguishes it from later processes with the same PID, if known. Never 0.
    pub birth: Option<u32>,
}

impl Owner {
    /// Decodes an owner from a record's number.
    fn of(number: u64) -> Option<Self> {
        let some = |number: u64| u32::try_from(number).ok().filter(|one| *one != 0);
        Some(Self { pid: some(number & u64::from(u32::MAX))?, birth: some(number >> 32) })
    }

    fn number(self) -> u64 {
        u64::from(self.birth.unwrap_or(0)) << 32 | u64::from(self.pid)
    }
}

impl Client {
    /// Decodes a client from its record; `None` if the record is not a client.
    fn of(object: &Object) -> Option<Self> {
        let fd = u32::try_from(object.bytes).ok()?.cast_signed();
        let owner = Owner::of(object.cost);
        let is_one = object.class.kind() == Kind::Client;
        is_one.then_some(Self { handle: object.client, process: object.parent, fd, owner })
    }

    /// Returns the process for which RM counts the client's memory, as far as known.
    fn counts_for(&self) -> u32 {
        self.owner.map_or(self.process, |owner| owner.pid)
    }

    fn record(&self) -> Object {
        let (bytes, cost) = (u64::from(self.fd.cast_unsigned()), self.owner.map_or(0, Owner::number));
        let Self { handle, process, .. } = *self;
        Object { client: handle, handle, parent: process, class: Class::CLIENT, gpu: None, bytes, cost }
    }
}

/// Sums over the records of one GPU, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Memory of known objects, as RM counts it.
    pub objects: u64,
    /// Memory that RM counts under handles whose allocation the supervisor never saw.
    pub passed: u64,
    /// Memory that RM counts for no process because a duplicate holds it.
    pub orphaned: u64,
    /// Rounding, page tables and channel groups.
    pub cost: u64,
}

impl Sums {
    /// Returns the sum that records of this class count towards.
    fn of_class(&mut self, class: u32) -> &mut u64 {
        match class {
            PASSED => &mut self.passed,
            ORPHANED => &mut self.orphaned,
            _ => &mut self.objects,
        }
    }

    /// Returns everything that counts against the limit.
    pub fn charged(&self) -> u64 {
        self.counted().saturating_add(self.orphaned).saturating_add(self.cost)
    }

    /// Returns the figure that RM itself should report.
    pub fn counted(&self) -> u64 {
        self.objects.saturating_add(self.passed)
    }
}

/// Error: no record is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The books of one container.
#[derive(Debug)]
pub struct Books<'m> {
    records: &'m mut [Record],
    /// Slot of each object's record, by client and handle.
    index: HashMap<(u32, u32), u32>,
    /// How many children an object has, by client and handle.
    children: HashMap<(u32, u32), u32>,
    /// How many records are processes that made clients.
    makers: usize,
    free: Vec<u32>,
    /// Records from here on have never been used.
    fresh: usize,
    sums: [Sums; MOST_GPUS],
    /// Slots of records that are sums and not objects, by class and GPU.
    sum_slots: HashMap<(u32, u32), u32>,
}

impl<'m> Books<'m> {
    /// Opens the books in `records`. Only the first `written` records have ever been written to. At most
    /// [`MOST_OBJECTS`] of them are used.
    pub fn open(records: &'m mut [Record], written: usize) -> Self {
        let mut books = Self {
            index: HashMap::new(),
            children: HashMap::new(),
            makers: 0,
            free: Vec::new(),
            fresh: 0,
            sums: Default::default(),
            sum_slots: HashMap::new(),
            records,
        };
        let used = |record: &Record| record.state.load(Ordering::Acquire) != EMPTY;
        let written = books.records.len().min(written);
        books.fresh = books.records[..written].iter().rposition(used).map_or(0, |last| last + 1);
        for slot in 0..books.fresh {
            if used(&books.records[slot]) { books.enter(slot) } else { books.free.push(number(slot)) }
        }
        books
    }

    /// Adds the record of this slot to the index and sums.
    fn enter(&mut self, slot: usize) {
        let record = &self.records[slot];
        match record.class {
            PASSED | ORPHANED => {
                let before = self.sum_slots.insert((record.class, record.gpu), number(slot));
                // A worker was killed while it wrote the new record: the larger one counts.
                if let Some(before) = before.filter(|before| *before as usize != slot) {
                    return self.keep_larger(slot, before as usize);
                }
            }
            _ => {
                self.index.insert((record.client, record.handle), number(slot));
                self.makers += usize::from(record.client == MAKERS);
                if Class(record.class).kind() != Kind::Client {
                    *self.children.entry((record.client, record.parent)).or_default() += 1;
                }
            }
        }
        if let Some(sums) = self.sums.get_mut(record.gpu as usize) {
            let sum = sums.of_class(record.class);
            *sum = sum.saturating_add(record.bytes);
            sums.cost = sums.cost.saturating_add(record.cost);
        }
    }

    /// Removes the record of this slot from the index and sums, and frees it.
    fn leave(&mut self, slot: usize) {
        let record = &mut self.records[slot];
        record.state.store(EMPTY, Ordering::Release);
        let class = record.class;
        if let Some(sums) = self.sums.get_mut(record.gpu as usize) {
            let sum = sums.of_class(class);
            *sum = sum.saturating_sub(record.bytes);
            sums.cost = sums.cost.saturating_sub(record.cost);
        }
        match class {
            PASSED | ORPHANED => {
                self.sum_slots.remove(&(class, record.gpu));
            }
            _ => {
                self.index.remove(&(record.client, record.handle));
                self.makers -= usize::from(record.client == MAKERS);
                let parent = (record.client, record.parent);
                let is_client = Class(class).kind() == Kind::Client;
                if let Some(children) = self.children.get_mut(&parent).filter(|_| !is_client) {
                    *children -= 1;
                    if *children == 0 {
                        self.children.remove(&parent);
                    }
                }
            }
        }
        self.free.push(number(slot));
    }

    /// Writes a record into a free slot.
    fn write(&mut self, object: &Object, class: u32) -> Result<(), Full> {
        let slot = match self.free.pop() {
            Some(slot) => slot as usize,
            None if self.fresh < self.records.len().min(MOST_OBJECTS) => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return Err(Full),
        };
        let record = &mut self.records[slot];
        record.client = object.client;
        record.handle = object.handle;
        record.parent = object.parent;
        record.class = class;
        record.gpu = object.gpu.map_or(NO_GPU, |gpu| u32::try_from(gpu).unwrap_or(NO_GPU));
        record.bytes = object.bytes;
        record.cost = object.cost;
        fence(Ordering::Release);
        record.state.store(USED, Ordering::Release);
        self.enter(slot);
        Ok(())
    }

    /// Adds an object. An existing one with the same client and handle is gone, because RM never has two.
    ///
    /// # Errors
    /// [`Full`] if there is no room.
    pub fn add(&mut self, object: &Object) -> Result<(), Full> {
        self.remove(object.client, object.handle);
        self.write(object, object.class.0)
    }

    /// Whether another object fits. The check reserves room for the sums.
    pub fn has_room(&self) -> bool {
        const SUMS: usize = 4 * MOST_GPUS;
        self.index.len() + SUMS < self.records.len().min(MOST_OBJECTS)
    }

    /// Returns the object with this client and handle.
    pub fn get(&self, client: u32, handle: u32) -> Option<Object> {
        self.index.get(&(client, handle)).map(|slot| self.object(*slot as usize))
    }

    fn object(&self, slot: usize) -> Object {
        let record = &self.records[slot];
        Object {
            client: record.client,
            handle: record.handle,
            parent: record.parent,
            class: Class(record.class),
            gpu: usize::try_from(record.gpu).ok().filter(|gpu| *gpu < MOST_GPUS),
            bytes: record.bytes,
            cost: record.cost,
        }
    }

    /// Returns the object with this handle and everything below it, for a client that frees it. The client's
    /// own handle stands for all of its objects.
    pub fn tree(&self, client: u32, handle: u32) -> Vec<Object> {
        if handle != client && !self.children.contains_key(&(client, handle)) {
            return self.get(client, handle).into_iter().collect();
        }
        let is_in =
            |object: &Object| object.client == client && (handle == client || self.is_below(object, handle));
        self.index.values().map(|slot| self.object(*slot as usize)).filter(is_in).collect()
    }

    /// Whether `object` has this handle or lies below it. RM's own trees are at most this deep. Programs may
    /// name channels and devices that RM never made, so nothing counts as lying below those.
    fn is_below(&self, object: &Object, handle: u32) -> bool {
        const DEEPEST: usize = 16;
        let mut at = *object;
        for _ in 0..DEEPEST {
            if at.class.kind() == Kind::Client {
                return false; // its parent is a process
            }
            if at.handle == handle || at.parent == handle {
                return true;
            }
            let is_made = |parent: &Object| parent.gpu.is_some() && parent.class.kind() != Kind::Channel;
            let Some(parent) = self.get(at.client, at.parent).filter(is_made) else { return false };
            at = parent;
        }
        false
    }

    /// Removes an object, if the books have it.
    pub fn remove(&mut self, client: u32, handle: u32) {
        if let Some(slot) = self.index.get(&(client, handle)).copied() {
            self.leave(slot as usize);
        }
    }

    /// Sets how many bytes RM counts on a GPU under handles that the books do not know.
    ///
    /// # Errors
    /// [`Full`] if there is no room; the sum is 0 then.
    pub fn set_passed(&mut self, gpu: Gpu, bytes: u64) -> Result<(), Full> {
        self.set_sum(PASSED, gpu, bytes)
    }

    fn set_sum(&mut self, class: u32, gpu: Gpu, bytes: u64) -> Result<(), Full> {
        // Write the new record before removing the old one, so that a worker that is killed leaves at least
        // one of them.
        let key = (class, number(gpu));
        let before = self.sum_slots.remove(&key);
        let written = match bytes {
            0 => Ok(()),
            _ => self.write(&Object { bytes, ..Object::without_handle(gpu) }, class),
        };
        if let Some(slot) = before {
            let after = self.sum_slots.get(&key).copied();
            self.leave(slot as usize);
            if let Some(after) = after {
                self.sum_slots.insert(key, after);
            }
        }
        written
    }

    /// Keeps the larger of two records of one sum.
    fn keep_larger(&mut self, new: usize, old: usize) {
        let is_more = self.records[new].bytes > self.records[old].bytes;
        let (kept, dropped) = if is_more { (new, old) } else { (old, new) };
        let Record { class, gpu, bytes, .. } = self.records[kept];
        let more = bytes - self.records[old].bytes;
        if let Some(sums) = self.sums.get_mut(gpu as usize) {
            let sum = sums.of_class(class);
            *sum = sum.saturating_add(more);
        }
        self.sum_slots.insert((class, gpu), number(kept));
        self.records[dropped].state.store(EMPTY, Ordering::Release);
        self.free.push(number(dropped));
    }

    /// Adds bytes that RM no longer counts but that are still on the card.
    ///
    /// # Errors
    /// [`Full`] if there is no room; the bytes are lost then.
    pub fn orphan(&mut self, gpu: Gpu, bytes: u64) -> Result<(), Full> {
        self.set_orphaned(gpu, self.sums(gpu).orphaned.saturating_add(bytes))
    }

    /// Sets how many bytes of a GPU duplicates hold without RM counting them.
    ///
    /// # Errors
    /// [`Full`] if there is no room; the sum is 0 then.
    pub fn set_orphaned(&mut self, gpu: Gpu, bytes: u64) -> Result<(), Full> {
        self.set_sum(ORPHANED, gpu, bytes)
    }

    /// Returns the sums of a GPU.
    pub fn sums(&self, gpu: Gpu) -> Sums {
        self.sums.get(gpu).copied().unwrap_or_default()
    }

    /// Lists a GPU's subdevices, then its devices: the objects through which RM can be queried.
    pub fn anchors(&self, gpu: Gpu) -> Vec<Object> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        let of_gpu = all.filter(|object| object.gpu == Some(gpu));
        let (mut subdevices, others): (Vec<_>, Vec<_>) =
            of_gpu.partition(|object| object.class.kind() == Kind::Subdevice);
        subdevices.extend(others.into_iter().filter(|object| object.class.kind() == Kind::Device));
        subdevices
    }

    /// Records whether the program has stopped a channel of its own.
    pub fn set_stopped(&self, client: u32, channel: u32, is_stopped: bool) {
        if let Some(slot) = self.index.get(&(client, channel)) {
            let state = if is_stopped { STOPPED } else { USED };
            self.records[*slot as usize].state.store(state, Ordering::Release);
        }
    }

    /// Whether the program has stopped this channel.
    pub fn is_stopped(&self, client: u32, channel: u32) -> bool {
        let slot = self.index.get(&(client, channel));
        slot.is_some_and(|slot| self.records[*slot as usize].state.load(Ordering::Acquire) == STOPPED)
    }

    /// Lists all channels.
    pub fn channels(&self) -> Vec<Object> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        all.filter(|object| object.class.kind() == Kind::Channel).collect()
    }

    /// Lists all clients.
    pub fn clients(&self) -> impl Iterator<Item = Client> + '_ {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        all.filter(|object| object.client != MAKERS).filter_map(|object| Client::of(&object))
    }

    /// Lists the clients that a process made, or called through if their maker is unknown.
    pub fn clients_of(&self, process: u32) -> Vec<u32> {
        let its = self.clients().filter(|client| client.counts_for() == process);
        its.map(|client| client.handle).collect()
    }

    /// Returns the client with this handle.
    pub fn client(&self, handle: u32) -> Option<Client> {
        self.get(handle, handle).as_ref().and_then(Client::of)
    }

    /// Records a client.
    ///
    /// # Errors
    /// [`Full`] if there is no room.
    pub fn note_client(&mut self, client: &Client) -> Result<(), Full> {
        if self.client(client.handle).as_ref() == Some(client) { Ok(()) } else { self.add(&client.record()) }
    }

    /// Records that a process may have made a client whose handle is not known yet. RM counts that client's
    /// memory for the process, even after the process has ended.
    ///
    /// # Errors
    /// [`Full`] if there is no room.
    pub fn note_maker(&mut self, process: u32) -> Result<(), Full> {
        if self.get(MAKERS, process).is_some_and(|maker| maker.bytes == LIVES) {
            return Ok(());
        }
        self.add(&Object { bytes: LIVES, ..Object::maker(process) })
    }

    /// Records that a process has ended, and returns whether it may have made clients.
    pub fn end_maker(&mut self, process: u32) -> bool {
        let is_one = self.get(MAKERS, process).is_some();
        if is_one && self.makers <= MOST_MAKERS {
            let _ = self.add(&Object { bytes: ENDED, ..Object::maker(process) });
        } else {
            self.remove(MAKERS, process);
        }
        is_one
    }

    /// Lists ended processes that may have made clients.
    pub fn ended_makers(&self) -> Vec<u32> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        all.filter(|one| (one.client, one.bytes) == (MAKERS, ENDED)).map(|one| one.handle).collect()
    }

    /// Lists all processes that made a client or have one, except the ended makers.
    pub fn processes(&self) -> Vec<u32> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        let all = all.filter(|one| (one.client, one.bytes) != (MAKERS, ENDED));
        let clients = all.filter_map(|object| Client::of(&object));
        let mut pids: Vec<u32> = clients.flat_map(|client| [client.counts_for(), client.process]).collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Returns the bytes of all objects on a GPU, by the process of their client.
    pub fn held(&self, gpu: Gpu) -> HashMap<u32, u64> {
        let mut held: HashMap<u32, u64> = HashMap::new();
        for slot in self.index.values() {
            let object = self.object(*slot as usize);
            if object.gpu == Some(gpu)
                && let Some(client) = self.client(object.client)
            {
                let sum = held.entry(client.counts_for()).or_default();
                *sum = sum.saturating_add(object.bytes);
            }
        }
        held
    }

    /// Returns a subdevice below a device, if one is known.
    pub fn subdevice_of(&self, client: u32, device: u32) -> Option<Object> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        all.filter(|object| object.client == client && object.parent == device)
            .find(|object| object.class.kind() == Kind::Subdevice)
    }

    /// Returns the number of objects.
    pub fn len(&self) -> usize {
        self.index.len() - self.makers
    }

    /// Whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Object {
    fn maker(process: u32) -> Self {
        Self { handle: process, ..Client { handle: MAKERS, process, fd: 0, owner: None }.record() }
    }

    fn without_handle(gpu: Gpu) -> Self {
        Self { client: 0, handle: 0, parent: 0, class: Class(0), gpu: Some(gpu), bytes: 0, cost: 0 }
    }
}

fn number(slot: usize) -> u32 {
    u32::try_from(slot).unwrap_or(u32::MAX)
}
