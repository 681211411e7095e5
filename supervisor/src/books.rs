//! The books: which objects that take device memory a container has, and what they sum up to.
//!
//! They stand in records of a fixed size, in memory that outlives the worker. A record counts from the moment
//! in which its `state` says so, which is written last; everything else (index and sums) is worked out from
//! the records when a worker starts. So a worker may be killed between any two instructions.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::abi::{Class, Kind};

/// Most objects of a container. One that makes more gets [`crate::abi::Status::INSUFFICIENT_RESOURCES`].
pub const MOST_OBJECTS: usize = 65_536;

/// Index of a GPU among those that the lease grants.
pub type Gpu = usize;

/// Most GPUs of a lease.
pub const MOST_GPUS: usize = 16;

const EMPTY: u32 = 0;
const USED: u32 = 1;
/// Used, by a channel that its program has stopped.
const STOPPED: u32 = 2;
/// In place of a class: bytes that RM counts under a handle which the books do not know.
const PASSED: u32 = u32::MAX;
/// In place of a class: bytes that RM counts for nobody, and that are still on the card.
const ORPHANED: u32 = u32::MAX - 1;
/// The GPU of an object that belongs to none.
const NO_GPU: u32 = u32::MAX;

/// One entry. All zeros is an empty one.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Record {
    state: AtomicU32,
    client: u32,
    handle: u32,
    parent: u32,
    class: u32,
    gpu: u32,
    /// Bytes as RM counts them. Of a client, its file's number.
    bytes: u64,
    /// Bytes that RM takes and does not count: rounding, page tables, channel groups. Of a client, its owner.
    cost: u64,
}

const _: () = assert!(size_of::<Record>() == 40);

/// An object that takes device memory, or leads to others that do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// The client's handle. RM gives each one once among all that live.
    pub client: u32,
    /// Its own handle, unique in the client.
    pub handle: u32,
    /// The handle of its parent in the client.
    pub parent: u32,
    /// Its class.
    pub class: Class,
    /// The GPU that it lies on, if it is known.
    pub gpu: Option<Gpu>,
    /// Bytes as RM counts them.
    pub bytes: u64,
    /// Bytes that RM takes besides.
    pub cost: u64,
}

/// The handle of no client: processes that made clients stand below it, each under its number.
const MAKERS: u32 = 0;
/// Of a process there, in place of bytes: whether it has ended.
const LIVES: u64 = 0;
const ENDED: u64 = 1;
/// Most processes that are kept there after their end.
const MOST_MAKERS: usize = 8192;

/// A client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// Its handle.
    pub handle: u32,
    /// A process that has the client's file.
    pub process: u32,
    /// The file's number there.
    pub fd: i32,
    /// The process that made it, and for which RM counts its memory, once that is known.
    pub owner: Option<Owner>,
}

/// The process that made a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its number.
    pub pid: u32,
    /// What tells it from later processes of the same number, if that is known: never 0.
    pub birth: Option<u32>,
}

impl Owner {
    /// Of a record's number.
    fn of(number: u64) -> Option<Self> {
        let some = |number: u64| u32::try_from(number).ok().filter(|one| *one != 0);
        Some(Self { pid: some(number & u64::from(u32::MAX))?, birth: some(number >> 32) })
    }

    fn number(self) -> u64 {
        u64::from(self.birth.unwrap_or(0)) << 32 | u64::from(self.pid)
    }
}

impl Client {
    /// The client of a record, if it is one's.
    fn of(object: &Object) -> Option<Self> {
        let fd = u32::try_from(object.bytes).ok()?.cast_signed();
        let owner = Owner::of(object.cost);
        let is_one = object.class.kind() == Kind::Client;
        is_one.then_some(Self { handle: object.client, process: object.parent, fd, owner })
    }

    /// The process for which RM counts its memory, as far as that is known.
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
    /// Memory that RM counts under handles which were never seen allocated.
    pub passed: u64,
    /// Memory that RM counts for nobody: a duplicate holds it.
    pub orphaned: u64,
    /// Rounding, page tables and channel groups.
    pub cost: u64,
}

impl Sums {
    /// The sum that records of this class count towards.
    fn of_class(&mut self, class: u32) -> &mut u64 {
        match class {
            PASSED => &mut self.passed,
            ORPHANED => &mut self.orphaned,
            _ => &mut self.objects,
        }
    }

    /// All that is held against the limit.
    pub fn charged(&self) -> u64 {
        self.counted().saturating_add(self.orphaned).saturating_add(self.cost)
    }

    /// What RM's own figure should be.
    pub fn counted(&self) -> u64 {
        self.objects.saturating_add(self.passed)
    }
}

/// No record is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The books of one container.
#[derive(Debug)]
pub struct Books<'m> {
    records: &'m mut [Record],
    /// Record of each object, by client and handle.
    index: HashMap<(u32, u32), u32>,
    /// How many objects have this one as their parent, by client and handle.
    children: HashMap<(u32, u32), u32>,
    /// How many of the records are processes that made clients.
    makers: usize,
    free: Vec<u32>,
    /// Records from here on were never used.
    fresh: usize,
    sums: [Sums; MOST_GPUS],
    /// Records that are no objects, by class and GPU.
    sum_slots: HashMap<(u32, u32), u32>,
}

impl<'m> Books<'m> {
    /// The books that `records` hold, of which those behind the first `written` were never written to. At
    /// most [`MOST_OBJECTS`] of them are used.
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

    /// Takes the record of this slot into index and sums.
    fn enter(&mut self, slot: usize) {
        let record = &self.records[slot];
        match record.class {
            PASSED | ORPHANED => {
                let before = self.sum_slots.insert((record.class, record.gpu), number(slot));
                // A worker was killed while it wrote the new one: the larger counts.
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

    /// Takes the record of this slot out of index and sums, and frees it.
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

    /// Adds an object. One with the same client and handle is gone: RM never has two.
    ///
    /// # Errors
    /// [`Full`] if there is no room.
    pub fn add(&mut self, object: &Object) -> Result<(), Full> {
        self.remove(object.client, object.handle);
        self.write(object, object.class.0)
    }

    /// Whether another object can be added. The sums always find room.
    pub fn has_room(&self) -> bool {
        const SUMS: usize = 4 * MOST_GPUS;
        self.index.len() + SUMS < self.records.len().min(MOST_OBJECTS)
    }

    /// The object of this client and handle.
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

    /// The object of this handle and all below it, of a client that frees it. The client's own handle means
    /// all of its objects.
    pub fn tree(&self, client: u32, handle: u32) -> Vec<Object> {
        if handle != client && !self.children.contains_key(&(client, handle)) {
            return self.get(client, handle).into_iter().collect();
        }
        let is_in =
            |object: &Object| object.client == client && (handle == client || self.is_below(object, handle));
        self.index.values().map(|slot| self.object(*slot as usize)).filter(is_in).collect()
    }

    /// Whether `object` is `handle`'s or lies below it. RM's own trees are at most this deep. Programs name
    /// channels and devices that RM need not have made, so that nothing lies below those.
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

    /// Takes an object out. Nothing happens if the books do not have it.
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
        // The new record is written before the old one goes, so that a worker that is killed leaves one of
        // them.
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

    /// Of two records of one sum, keeps the one with more bytes.
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

    /// Notes more bytes that RM does not count any more and that are still on the card.
    ///
    /// # Errors
    /// [`Full`] if there is no room; they are forgotten then.
    pub fn orphan(&mut self, gpu: Gpu, bytes: u64) -> Result<(), Full> {
        self.set_orphaned(gpu, self.sums(gpu).orphaned.saturating_add(bytes))
    }

    /// Sets how many bytes of a GPU RM does not count and duplicates hold.
    ///
    /// # Errors
    /// [`Full`] if there is no room; the sum is 0 then.
    pub fn set_orphaned(&mut self, gpu: Gpu, bytes: u64) -> Result<(), Full> {
        self.set_sum(ORPHANED, gpu, bytes)
    }

    /// The sums on a GPU.
    pub fn sums(&self, gpu: Gpu) -> Sums {
        self.sums.get(gpu).copied().unwrap_or_default()
    }

    /// Subdevices on a GPU, and then devices: what RM can be asked through.
    pub fn anchors(&self, gpu: Gpu) -> Vec<Object> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        let of_gpu = all.filter(|object| object.gpu == Some(gpu));
        let (mut subdevices, others): (Vec<_>, Vec<_>) =
            of_gpu.partition(|object| object.class.kind() == Kind::Subdevice);
        subdevices.extend(others.into_iter().filter(|object| object.class.kind() == Kind::Device));
        subdevices
    }

    /// Notes whether the program has stopped a channel of its own.
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

    /// All channels.
    pub fn channels(&self) -> Vec<Object> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        all.filter(|object| object.class.kind() == Kind::Channel).collect()
    }

    /// All clients.
    pub fn clients(&self) -> impl Iterator<Item = Client> + '_ {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        all.filter(|object| object.client != MAKERS).filter_map(|object| Client::of(&object))
    }

    /// Handles of the clients that are a process's: that it made, or made calls with where that is not known.
    pub fn clients_of(&self, process: u32) -> Vec<u32> {
        let its = self.clients().filter(|client| client.counts_for() == process);
        its.map(|client| client.handle).collect()
    }

    /// The client of this handle.
    pub fn client(&self, handle: u32) -> Option<Client> {
        self.get(handle, handle).as_ref().and_then(Client::of)
    }

    /// Notes a client.
    ///
    /// # Errors
    /// [`Full`] if there is no room.
    pub fn note_client(&mut self, client: &Client) -> Result<(), Full> {
        if self.client(client.handle).as_ref() == Some(client) { Ok(()) } else { self.add(&client.record()) }
    }

    /// Notes that a process may have made a client, whose handle is not known yet. RM counts for it what that
    /// client will have, also after its end.
    ///
    /// # Errors
    /// [`Full`] if there is no room.
    pub fn note_maker(&mut self, process: u32) -> Result<(), Full> {
        if self.get(MAKERS, process).is_some_and(|maker| maker.bytes == LIVES) {
            return Ok(());
        }
        self.add(&Object { bytes: LIVES, ..Object::maker(process) })
    }

    /// Notes that a process has ended, and returns whether it may have made clients.
    pub fn end_maker(&mut self, process: u32) -> bool {
        let is_one = self.get(MAKERS, process).is_some();
        if is_one && self.makers <= MOST_MAKERS {
            let _ = self.add(&Object { bytes: ENDED, ..Object::maker(process) });
        } else {
            self.remove(MAKERS, process);
        }
        is_one
    }

    /// Processes that may have made clients, and that were forgotten.
    pub fn ended_makers(&self) -> Vec<u32> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        all.filter(|one| (one.client, one.bytes) == (MAKERS, ENDED)).map(|one| one.handle).collect()
    }

    /// All processes that made a client, or have one, but for those.
    pub fn processes(&self) -> Vec<u32> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        let all = all.filter(|one| (one.client, one.bytes) != (MAKERS, ENDED));
        let clients = all.filter_map(|object| Client::of(&object));
        let mut pids: Vec<u32> = clients.flat_map(|client| [client.counts_for(), client.process]).collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Bytes on a GPU of all objects, by the process of their client.
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

    /// A subdevice below a device, if one is known.
    pub fn subdevice_of(&self, client: u32, device: u32) -> Option<Object> {
        let all = self.index.values().map(|slot| self.object(*slot as usize));
        all.filter(|object| object.client == client && object.parent == device)
            .find(|object| object.class.kind() == Kind::Subdevice)
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.index.len() - self.makers
    }

    /// Whether there is none.
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
