//! The table of device memory: the address, the GPU and the charge of each allocation.
//!
//! Each GPU has one range of addresses, reserved without memory; the kernel adds pages when they are touched.
//! The node's books (`gpushare_simulator::memory`), not this table, determine how much memory a GPU has left.

use std::collections::{BTreeMap, HashMap};

use gpushare_simulator::memory::{LARGE, SMALL_LIMIT};

use crate::abi::{Code, Handle, Result};

/// The purpose of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory of cuMemAlloc and its like.
    Device,
    /// Memory of cuMemAllocManaged.
    Managed,
    /// Memory from the pool with this handle, which holds the charge.
    Pool(Handle),
    /// Memory of a graph's allocation node; the GPU's graph memory holds the charge.
    Graph,
    /// Memory of an array or of all levels of a mipmapped array.
    Array,
    /// Memory of another process; its owner holds the charge.
    Imported,
    /// A mapping of an allocation handle, which holds the charge.
    Mapped,
}

/// A live allocation.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    /// First address.
    pub start: u64,
    /// Requested bytes.
    pub length: u64,
    /// Bytes of addresses that it occupies, which is the length rounded up.
    pub extent: u64,
    /// Bytes charged to the GPU. 0 if another holder has the charge, as given by the kind, or for managed
    /// memory that did not fit.
    pub charged: u64,
    /// CUDA ordinal of its GPU.
    pub ordinal: i32,
    /// Context that it belongs to; 0 for none.
    pub context: Handle,
    /// Its purpose.
    pub kind: Kind,
    /// Number of the allocation in this process, from 1.
    pub id: u64,
    touched: bool,
}

#[derive(Default)]
struct Arena {
    start: u64,
    next: u64,
    end: u64,
    free: HashMap<u64, Vec<u64>>,
}

/// All device memory of the process, and the addresses that are free on each GPU.
#[derive(Default)]
pub struct Heap {
    arenas: HashMap<i32, Arena>,
    live: BTreeMap<u64, Allocation>,
    count: u64,
    /// Allocations up to this number may hold data, whatever their own `touched` says.
    all_touched: u64,
}

impl Arena {
    fn new(bytes: u64) -> Result<Self> {
        // Four times the memory: freed pieces are reused by size, so pieces of other sizes need additional
        // room.
        let length = bytes.max(1 << 30).checked_mul(4).ok_or(Code::OUT_OF_MEMORY)?;
        let base = reserve(length + LARGE)?;
        let start = base.next_multiple_of(LARGE);
        Ok(Self { start, next: start, end: start + length, free: HashMap::new() })
    }

    fn take(&mut self, extent: u64) -> Result<u64> {
        if let Some(start) = self.free.get_mut(&extent).and_then(Vec::pop) {
            return Ok(start);
        }
        let align = if extent < SMALL_LIMIT { 512 } else { LARGE };
        let found = self.bump(extent, align);
        if found.is_ok() {
            return found;
        }
        self.merge();
        self.first_fit(extent, align).or_else(|_| self.bump(extent, align))
    }

    fn bump(&mut self, extent: u64, align: u64) -> Result<u64> {
        let start = self.next.next_multiple_of(align);
        let end = start.checked_add(extent).filter(|&end| end <= self.end).ok_or(Code::OUT_OF_MEMORY)?;
        self.next = end;
        Ok(start)
    }

    /// Joins neighbouring free pieces, and returns the last one to the unused end of the range.
    fn merge(&mut self) {
        let lists = std::mem::take(&mut self.free);
        let mut pieces: Vec<(u64, u64)> = lists
            .into_iter()
            .flat_map(|(extent, starts)| starts.into_iter().map(move |start| (start, extent)))
            .collect();
        pieces.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (start, extent) in pieces {
            match joined.last_mut() {
                Some(last) if last.0 + last.1 == start => last.1 += extent,
                _ => joined.push((start, extent)),
            }
        }
        if let Some(&(start, extent)) = joined.last()
            && start + extent == self.next
        {
            self.next = start;
            joined.pop();
        }
        for (start, extent) in joined {
            self.free.entry(extent).or_default().push(start);
        }
    }

    fn first_fit(&mut self, extent: u64, align: u64) -> Result<u64> {
        let fits = |start: u64, size: u64| start.next_multiple_of(align) + extent <= start + size;
        let found = self.free.iter().find_map(|(&size, starts)| {
            starts.iter().position(|&start| fits(start, size)).map(|position| (size, position))
        });
        let (size, position) = found.ok_or(Code::OUT_OF_MEMORY)?;
        let piece = self.free.get_mut(&size).ok_or(Code::OUT_OF_MEMORY)?.swap_remove(position);
        let start = piece.next_multiple_of(align);
        let rest = start + extent;
        for (from, to) in [(piece, start), (rest, piece + size)] {
            if to > from {
                self.free.entry(to - from).or_default().push(from);
            }
        }
        Ok(start)
    }
}

impl Heap {
    /// Finds addresses for `new` on its GPU, which has `memory` bytes in total, and adds it to the table.
    pub fn place(&mut self, memory: u64, mut new: Allocation) -> Result<Allocation> {
        if let std::collections::hash_map::Entry::Vacant(entry) = self.arenas.entry(new.ordinal) {
            entry.insert(Arena::new(memory)?);
        }
        let arena = self.arenas.get_mut(&new.ordinal).ok_or(Code::INVALID_DEVICE)?;
        new.start = arena.take(new.extent)?;
        self.count += 1;
        new.id = self.count;
        self.live.insert(new.start, new);
        Ok(new)
    }

    /// Adds memory at an address outside the GPU's range, such as another process's.
    pub fn adopt(&mut self, mut new: Allocation) {
        self.count += 1;
        new.id = self.count;
        self.live.insert(new.start, new);
    }

    /// Removes the allocation that starts at `start`, and frees its addresses.
    pub fn remove(&mut self, start: u64) -> Result<Allocation> {
        let gone = self.live.remove(&start).ok_or(Code::INVALID_VALUE)?;
        if gone.touched || gone.id <= self.all_touched {
            discard(gone.start, gone.extent);
        }
        if let Some(arena) = self.arenas.get_mut(&gone.ordinal)
            && (arena.start..arena.end).contains(&start)
        {
            arena.free.entry(gone.extent).or_default().push(start);
        }
        Ok(gone)
    }

    /// The allocation that contains `address`.
    pub fn find(&self, address: u64) -> Option<&Allocation> {
        let found = self.live.range(..=address).next_back().map(|(_, allocation)| allocation);
        found.filter(|allocation| address - allocation.start < allocation.length.max(1))
    }

    /// Like [`find`](Self::find), but mutable.
    pub fn find_mut(&mut self, address: u64) -> Option<&mut Allocation> {
        let found = self.live.range_mut(..=address).next_back().map(|(_, allocation)| allocation);
        found.filter(|allocation| address - allocation.start < allocation.length.max(1))
    }

    /// The allocation that starts at `start`.
    pub fn at(&self, start: u64) -> Option<&Allocation> {
        self.live.get(&start)
    }

    /// Records that the pages of the allocation at or before `address` may contain data. They are dropped
    /// when it is freed.
    pub fn touch(&mut self, address: u64) {
        if let Some((_, allocation)) = self.live.range_mut(..=address).next_back() {
            allocation.touched = true;
        }
    }

    /// Records that every allocation may contain data, because a kernel may have written anywhere.
    pub fn touch_all(&mut self) {
        self.all_touched = self.count;
    }

    /// All live allocations for which `wanted` holds.
    pub fn select(&self, wanted: impl Fn(&Allocation) -> bool) -> Vec<Allocation> {
        self.live.values().copied().filter(|allocation| wanted(allocation)).collect()
    }
}

impl Allocation {
    /// Creates an allocation that has no address yet.
    pub fn new(ordinal: i32, context: Handle, kind: Kind, length: u64, extent: u64, charged: u64) -> Self {
        Self { start: 0, length, extent, charged, ordinal, context, kind, id: 0, touched: false }
    }

    /// Returns the allocation at an address that is already known.
    pub fn starting(self, start: u64) -> Self {
        Self { start, ..self }
    }
}

/// Reserves `length` bytes of addresses, which read as zeros and take memory only when written.
pub fn reserve(length: u64) -> Result<u64> {
    reserve_at(0, length, 0)
}

/// Reserves like [`reserve`], below 4 GiB.
#[cfg(target_arch = "x86_64")]
pub fn reserve_low(length: u64) -> Result<u32> {
    u32::try_from(reserve_at(0, length, libc::MAP_32BIT)?).map_err(|_| Code::OUT_OF_MEMORY)
}

/// Reserves like [`reserve`], below 4 GiB. The kernel finds such an address only on x86-64. On other machines
/// this takes the first free one.
#[cfg(not(target_arch = "x86_64"))]
pub fn reserve_low(length: u64) -> Result<u32> {
    /// Above the addresses of programs without position-independent code.
    const FIRST: u64 = 256 << 20;
    /// A multiple of every page size.
    const STEP: usize = 64 << 10;
    let end = u64::from(u32::MAX).checked_sub(length).ok_or(Code::OUT_OF_MEMORY)?;
    let places = (FIRST..end).step_by(STEP);
    let mut taken = places.filter_map(|place| reserve_at(place, length, libc::MAP_FIXED_NOREPLACE).ok());
    u32::try_from(taken.next().ok_or(Code::OUT_OF_MEMORY)?).map_err(|_| Code::OUT_OF_MEMORY)
}

/// Reserves at `place`, or at an address chosen by the kernel if that is 0.
fn reserve_at(place: u64, length: u64, flags: i32) -> Result<u64> {
    let size = usize::try_from(length).map_err(|_| Code::OUT_OF_MEMORY)?;
    let place = usize::try_from(place).map_err(|_| Code::OUT_OF_MEMORY)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags;
    let place = std::ptr::with_exposed_provenance_mut(place);
    // SAFETY: a new anonymous mapping that replaces none touches no memory of ours.
    let address = unsafe { libc::mmap(place, size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        Err(Code::OUT_OF_MEMORY)
    } else {
        Ok(address.expose_provenance() as u64)
    }
}

/// Releases addresses from [`reserve`].
pub fn unreserve(start: u64, length: u64) {
    let (Ok(address), Ok(size)) = (usize::try_from(start), usize::try_from(length)) else { return };
    // SAFETY: the caller owns this mapping, and it no longer contains allocations.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(address), size) };
}

/// Drops the whole pages in a range, which read as zeros afterwards. Partial pages at both ends stay.
fn discard(start: u64, length: u64) {
    const PAGE: u64 = 4096;
    let (from, to) = (start.next_multiple_of(PAGE), (start + length) / PAGE * PAGE);
    let (Ok(address), Ok(size)) = (usize::try_from(from), usize::try_from(to.saturating_sub(from))) else {
        return;
    };
    if size > 0 {
        let address = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: whole pages of a freed range of our own arena.
        unsafe { libc::madvise(address, size, libc::MADV_DONTNEED) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_addresses_serve_again_and_merge_when_the_range_is_full() {
        let mut arena = Arena { start: 0, next: 0, end: 16 * LARGE, free: HashMap::new() };
        let pieces: Vec<u64> = (0..16).map(|_| arena.take(LARGE).expect("room")).collect();
        assert!(arena.take(LARGE).is_err());
        arena.free.entry(LARGE).or_default().extend(&pieces[4..8]);
        assert_eq!(arena.take(4 * LARGE), Ok(4 * LARGE));
        assert!(arena.take(512).is_err());
    }
}
