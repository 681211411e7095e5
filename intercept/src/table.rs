//! The charges of this process's driver objects: an open-addressing hash table in anonymous memory, in 16
//! shards, with linear probing, backward-shift deletion and a multiplicative hash. All zero bytes are an
//! empty table.

use crate::mutex::Mutex;
use crate::sys;

const SHARDS: usize = 16;
const FIRST_CAPACITY: usize = 128;

/// The kind of object that a key names. Each kind has its own key space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// No entry.
    Empty = 0,
    /// Pointer of linear, pitched or managed memory; `extra` is 1 for managed memory.
    Linear,
    /// Pointer of stream-ordered memory; `extra` is its pool.
    Async,
    /// Pointer of host memory that stands in for linear memory.
    Spilled,
    /// Handle of an array.
    Array,
    /// Handle of a mipmapped array.
    Mipmap,
    /// Handle of external memory.
    External,
    /// Handle of physical memory; `extra` is the number of its object.
    Handle,
    /// Mapped address of physical memory; `extra` is the number of its object, `size` the mapped size.
    Mapping,
    /// Physical memory, by our number; `extra` counts handles and mappings.
    Physical,
    /// Binding of physical memory to a multicast object; `extra` is the number of its object.
    Binding,
    /// An executable graph on one device; `size` is the most memory that its nodes need.
    Graph,
}

/// One charged object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Entry {
    /// Pointer, handle or number.
    pub key: u64,
    /// Charged bytes.
    pub size: u64,
    /// Additional data as described for [`Kind`]; otherwise 0.
    pub extra: u64,
    /// The kind of object that the key names.
    pub kind: Kind,
    /// Line of the limits file.
    pub device: u8,
    /// Our number of the context whose end frees the object; 0: none.
    pub context: u8,
}

const EMPTY: Entry = Entry { key: 0, size: 0, extra: 0, kind: Kind::Empty, device: 0, context: 0 };
const _: () = assert!(size_of::<Entry>() == 32);

/// The table.
#[repr(C)]
pub struct Table {
    shards: [Mutex<Shard>; SHARDS],
}

#[repr(C)]
struct Shard {
    address: usize,
    capacity: usize,
    live: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self { shards: [const { Mutex::new(Shard { address: 0, capacity: 0, live: 0 }) }; SHARDS] }
    }
}

fn hash(kind: Kind, key: u64) -> u64 {
    (key ^ (kind as u64) << 58).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Table {
    fn shard(&self, hash: u64) -> &Mutex<Shard> {
        let index = (hash >> 60) as usize % SHARDS;
        &self.shards[index]
    }

    /// Adds `entry` and returns the entry with the same kind and key that it replaces, if any. `Err` with
    /// `entry` if the kernel provides no memory: the object then stays charged until the process ends.
    pub fn put(&self, entry: Entry) -> Result<Option<Entry>, Entry> {
        let hash = hash(entry.kind, entry.key);
        let mut shard = self.shard(hash).lock();
        if shard.live * 2 >= shard.capacity && !shard.grow() {
            return Err(entry);
        }
        shard.insert(hash, entry).ok_or(entry)
    }

    /// Removes and returns the entry of `kind` and `key`.
    pub fn take(&self, kind: Kind, key: u64) -> Option<Entry> {
        self.at(kind, key, Shard::remove)
    }

    /// A copy of the entry of `kind` and `key`.
    pub fn get(&self, kind: Kind, key: u64) -> Option<Entry> {
        self.change(kind, key, |entry| *entry)
    }

    /// Changes the entry of `kind` and `key` in place and returns the result of `change`.
    pub fn change<T>(&self, kind: Kind, key: u64, change: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        self.at(kind, key, |shard, at| shard.entries().get_mut(at).map(change))
    }

    /// Finds the entry of `kind` and `key`, and calls `act` with its shard and its place in it.
    fn at<T>(&self, kind: Kind, key: u64, act: impl FnOnce(&mut Shard, usize) -> Option<T>) -> Option<T> {
        let hash = hash(kind, key);
        let mut shard = self.shard(hash).lock();
        let at = shard.find(hash, kind, key)?;
        act(&mut shard, at)
    }

    /// Removes every entry for which `gone` is true, and passes each to `take`.
    pub fn remove_all(&self, gone: impl Fn(&Entry) -> bool, mut take: impl FnMut(&Entry)) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            let mut at = 0;
            while at < shard.capacity {
                let here = shard.entries().get(at).filter(|entry| entry.kind != Kind::Empty && gone(entry));
                let Some(entry) = here.copied() else {
                    at += 1;
                    continue; // after a removal another entry may have moved here
                };
                take(&entry);
                shard.remove(at);
            }
        }
    }

    /// The total size of the entries for which `wanted` is true.
    pub fn sum(&self, wanted: impl Fn(&Entry) -> bool) -> u64 {
        let shards = self.shards.iter().map(|shard| {
            let mut shard = shard.lock();
            let live = shard.entries().iter().filter(|entry| entry.kind != Kind::Empty && wanted(entry));
            live.fold(0u64, |sum, entry| sum.saturating_add(entry.size))
        });
        shards.fold(0, u64::saturating_add)
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().live).sum()
    }

    /// Whether the table has no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Shard {
    fn entries(&mut self) -> &mut [Entry] {
        if self.capacity == 0 {
            return &mut [];
        }
        let first = core::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the shard owns a mapping of `capacity` entries, each written by `grow`, and `self` is
        // borrowed.
        unsafe { core::slice::from_raw_parts_mut(first, self.capacity) }
    }

    fn home(&self, hash: u64) -> usize {
        let mixed = (hash >> 20) as usize; // the top four bits chose the shard
        mixed & self.capacity.wrapping_sub(1)
    }

    fn find(&mut self, hash: u64, kind: Kind, key: u64) -> Option<usize> {
        let mut at = self.home(hash);
        let mask = self.capacity.wrapping_sub(1);
        loop {
            let entry = self.entries().get(at)?;
            if entry.kind == kind && entry.key == key {
                return Some(at);
            }
            if entry.kind == Kind::Empty {
                return None;
            }
            at = (at + 1) & mask;
        }
    }

    /// `None` if the table has no place, which `put` has ruled out.
    fn insert(&mut self, hash: u64, entry: Entry) -> Option<Option<Entry>> {
        let mut at = self.home(hash);
        let mask = self.capacity.wrapping_sub(1);
        loop {
            let here = self.entries().get_mut(at)?;
            if here.kind == Kind::Empty {
                *here = entry;
                self.live += 1;
                return Some(None);
            }
            if here.kind == entry.kind && here.key == entry.key {
                return Some(Some(core::mem::replace(here, entry)));
            }
            at = (at + 1) & mask;
        }
    }

    /// Empties `hole`, and moves up later entries that are behind it only because it was taken.
    fn remove(&mut self, mut hole: usize) -> Option<Entry> {
        let mask = self.capacity.wrapping_sub(1);
        let removed = *self.entries().get(hole)?;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = *self.entries().get(at)?;
            if entry.kind == Kind::Empty {
                break;
            }
            let home = self.home(hash(entry.kind, entry.key));
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                *self.entries().get_mut(hole)? = entry;
                hole = at;
            }
        }
        *self.entries().get_mut(hole)? = EMPTY;
        self.live -= 1;
        Some(removed)
    }

    fn grow(&mut self) -> bool {
        let capacity = if self.capacity == 0 { FIRST_CAPACITY } else { self.capacity * 2 };
        let Ok(address) = sys::map_private(capacity * size_of::<Entry>()) else { return false };
        // Zero bytes are EMPTY, so the kernel has already initialised every entry.
        let mut old = core::mem::replace(self, Self { address, capacity, live: 0 });
        for entry in old.entries() {
            if entry.kind != Kind::Empty {
                self.insert(hash(entry.kind, entry.key), *entry);
            }
        }
        if old.capacity != 0 {
            // SAFETY: `old` is the only reference to that mapping, and it ends here.
            unsafe { sys::unmap(old.address, old.capacity * size_of::<Entry>()) };
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// miri is slow: under it the tests take this many times fewer steps.
    const SHRINK: u64 = if cfg!(miri) { 1000 } else { 1 };

    fn entry(kind: Kind, key: u64, size: u64) -> Entry {
        Entry { key, size, extra: 0, kind, device: 0, context: 0 }
    }

    /// A small generator, so that a failing run can be repeated.
    fn random(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    #[test]
    fn it_agrees_with_a_map_over_a_million_random_steps() {
        let (table, mut map, mut state) = (Table::default(), HashMap::new(), 7);
        for step in 0..1_000_000 / SHRINK {
            let key = random(&mut state) % 5000 * 512;
            let kind = if random(&mut state) & 1 == 0 { Kind::Linear } else { Kind::Array };
            if random(&mut state) % 5 < 3 {
                let old = table.put(entry(kind, key, step)).unwrap();
                assert_eq!(old.map(|old| old.size), map.insert((kind as u8, key), step));
            } else {
                let taken = table.take(kind, key).map(|old| old.size);
                assert_eq!(taken, map.remove(&(kind as u8, key)), "step {step}");
            }
        }
        assert_eq!(table.len(), map.len());
        for ((kind, key), size) in map {
            let kind = if kind == Kind::Linear as u8 { Kind::Linear } else { Kind::Array };
            assert_eq!(table.get(kind, key).map(|entry| entry.size), Some(size));
        }
    }

    #[test]
    fn a_hundred_thousand_pointers_are_found_again() {
        let table = Table::default();
        for index in 0..100_000 / SHRINK {
            table.put(entry(Kind::Linear, 0x7f00_0000_0000 + index * 0x20_0000, index)).unwrap();
        }
        for index in 0..100_000 / SHRINK {
            let found = table.take(Kind::Linear, 0x7f00_0000_0000 + index * 0x20_0000);
            assert_eq!(found.map(|entry| entry.size), Some(index));
        }
        assert!(table.is_empty());
    }

    #[test]
    fn remove_all_takes_each_named_entry_once() {
        let table = Table::default();
        for index in 0..10_000u64 {
            let context = u8::try_from(index % 3).unwrap();
            table.put(Entry { context, ..entry(Kind::Linear, index * 512, 1) }).unwrap();
        }
        let mut sum = 0;
        table.remove_all(|entry| entry.context == 1, |entry| sum += entry.size);
        assert_eq!((sum, table.len()), (3333, 6667));
        assert!(
            (0..10_000u64).all(|index| table.get(Kind::Linear, index * 512).is_some() == (index % 3 != 1))
        );
    }

    #[test]
    fn threads_share_it() {
        let table = Table::default();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let table = &table;
                scope.spawn(move || {
                    for index in 0..20_000 / SHRINK {
                        table.put(entry(Kind::Linear, (thread << 40) + index * 512, 1)).unwrap();
                        assert!(
                            index % 2 == 0
                                || table.take(Kind::Linear, (thread << 40) + index * 512).is_some()
                        );
                    }
                });
            }
        });
        assert_eq!(table.len() as u64, 40_000 / SHRINK);
    }
}
