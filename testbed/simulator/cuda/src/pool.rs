//! Stream-ordered memory: pools that reserve memory in chunks and allocate pieces of it.
//!
//! The GPU is charged for a pool's reserved memory. A pool releases the excess over its release threshold
//! when the program waits for a stream, an event or a context, or trims the pool.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use gpushare_simulator::memory::{LARGE, rounded};

use crate::abi::{Code, DevicePointer, Handle, In, Out, Result};
use crate::context::current;
use crate::driver::{Driver, driver, locked};
use crate::heap::Kind;
use crate::registry::Registry;
use crate::stream::Stream;
use crate::work::Work;

/// Minimum bytes that a pool reserves at a time, if the GPU has them.
const CHUNK: u64 = 32 << 20;
/// CU_MEM_ALLOCATION_TYPE_MANAGED.
const MANAGED: u32 = 2;

#[derive(Clone, Copy, Default)]
struct Books {
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    threshold: u64,
    /// Whether it was destroyed. Its live allocations stay valid.
    destroyed: bool,
    /// Reuse attributes, by attribute number.
    reuse: [u32; 4],
}

/// A memory pool.
pub struct Pool {
    handle: Handle,
    ordinal: i32,
    host: bool,
    most: u64,
    books: Mutex<Books>,
}

/// All pools of the process.
#[derive(Default)]
pub struct Pools {
    registry: Registry<Pool>,
    /// Default and current pool of each GPU, by CUDA ordinal.
    chosen: Mutex<HashMap<i32, (Handle, Handle)>>,
}

/// CUmemPoolProps, which other structures contain too.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PoolProperties {
    kind: u32,
    handle_types: u32,
    /// 1 for a GPU; other values stand for the host.
    pub location_kind: u32,
    /// CUDA ordinal of that GPU.
    pub location: i32,
    security: u64,
    most: usize,
    usage: u16,
    reserved: [u8; 54],
}

impl PoolProperties {
    /// Properties of ordinary memory of a GPU.
    pub fn of_gpu(ordinal: i32) -> Self {
        Self {
            kind: 1,
            handle_types: 0,
            location_kind: 1,
            location: ordinal,
            security: 0,
            most: 0,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

impl Pool {
    fn new(handle: Handle, ordinal: i32, host: bool, most: u64) -> Self {
        let books = Books { reuse: [0, 1, 1, 1], ..Books::default() };
        Self { handle, ordinal, host, most, books: Mutex::new(books) }
    }

    fn grow(&self, driver: &Driver, books: &mut Books, missing: u64) -> Result {
        let chunk = missing.checked_next_multiple_of(CHUNK).ok_or(Code::OUT_OF_MEMORY)?;
        let exact = missing.checked_next_multiple_of(LARGE).ok_or(Code::OUT_OF_MEMORY)?;
        let fits = |more: &u64| self.most == 0 || books.reserved.saturating_add(*more) <= self.most;
        let got =
            [chunk, exact].into_iter().filter(fits).find(|&more| driver.take(self.ordinal, more) == Ok(true));
        books.reserved += got.ok_or(Code::OUT_OF_MEMORY)?;
        books.reserved_high = books.reserved_high.max(books.reserved);
        Ok(())
    }

    fn shrink(&self, driver: &Driver, keep: u64) -> Result {
        let mut books = locked(&self.books);
        let needed = books.used.next_multiple_of(LARGE);
        let target = needed.max(keep.checked_next_multiple_of(LARGE).unwrap_or(u64::MAX));
        let spare = books.reserved.saturating_sub(target);
        if spare > 0 && !self.host {
            books.reserved -= spare;
            driver.give(self.ordinal, spare)?;
        }
        Ok(())
    }

    fn allocate(&self, driver: &Driver, length: u64) -> Result<u64> {
        let extent = rounded(length).ok_or(Code::OUT_OF_MEMORY)?;
        let mut books = locked(&self.books);
        let used = books.used.checked_add(extent).ok_or(Code::OUT_OF_MEMORY)?;
        if used > books.reserved && !self.host {
            let missing = used - books.reserved;
            self.grow(driver, &mut books, missing)?;
        }
        let made = driver.allocate(self.ordinal, 0, Kind::Pool(self.handle), length)?;
        books.used = used;
        books.used_high = books.used_high.max(used);
        Ok(made.start)
    }
}

impl Pools {
    /// The pool of a handle; INVALID_HANDLE if there is none or it was destroyed.
    fn get(&self, handle: Handle) -> Result<Arc<Pool>> {
        let pool = self.registry.get(handle)?;
        if locked(&pool.books).destroyed { Err(Code::INVALID_HANDLE) } else { Ok(pool) }
    }

    fn of_device(&self, ordinal: i32) -> (Handle, Handle) {
        let make = || {
            let handle = self.registry.add_with(|handle| Pool::new(handle, ordinal, false, 0));
            (handle, handle)
        };
        *locked(&self.chosen).entry(ordinal).or_insert_with(make)
    }
}

impl Driver {
    /// Makes the pools of a GPU release the memory above their thresholds.
    pub fn settle_pools(&self, ordinal: i32) {
        for pool in self.pools.registry.all().iter().filter(|pool| pool.ordinal == ordinal) {
            let threshold = locked(&pool.books).threshold;
            let _ = pool.shrink(self, threshold);
            self.end_pool(pool);
        }
    }

    /// Removes a destroyed pool that has no live allocations.
    fn end_pool(&self, pool: &Pool) {
        let books = *locked(&pool.books);
        if books.destroyed && books.used == 0 {
            let _ = pool.shrink(self, 0);
            let _ = self.pools.registry.remove(pool.handle);
        }
    }

    /// Frees an allocation, as cuMemFreeAsync and graphs do: memory of a pool, of a graph or of cuMemAlloc.
    pub fn free_ordered(&self, start: u64) -> Result {
        let found = *locked(&self.heap).at(start).ok_or(Code::INVALID_VALUE)?;
        match found.kind {
            Kind::Pool(handle) => {
                self.release(start)?;
                let pool = self.pools.registry.get(handle)?;
                let mut books = locked(&pool.books);
                books.used = books.used.saturating_sub(found.extent);
                Ok(())
            }
            Kind::Graph => self.graph_memory.give(self, start),
            Kind::Device | Kind::Managed => self.release(start).map(|_| ()),
            Kind::Array | Kind::Imported | Kind::Mapped => Err(Code::INVALID_VALUE),
        }
    }

    /// Frees all allocations from a GPU's pools, because the GPU no longer has a context.
    pub fn forget_pools(&self, ordinal: i32) {
        for pool in self.pools.registry.all().iter().filter(|pool| pool.ordinal == ordinal) {
            let held = locked(&self.heap).select(|allocation| allocation.kind == Kind::Pool(pool.handle));
            for allocation in held {
                let _ = self.release(allocation.start);
            }
            locked(&pool.books).used = 0;
            let _ = pool.shrink(self, 0);
            self.end_pool(pool);
        }
    }

    fn allocate_ordered(&self, stream: &Stream, pool: &Pool, length: usize) -> Result<u64> {
        if length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if stream.captured.load(Ordering::Acquire) {
            let start = self.graph_memory.place(self, pool.ordinal, length as u64)?;
            stream.enqueue(self, Work::Allocate(start))?;
            return Ok(start);
        }
        pool.allocate(self, length as u64)
    }
}

fn allocate_in(out: Out<DevicePointer>, length: usize, pool: Option<Handle>, stream: Handle) -> Result {
    out.given()?;
    let driver = driver()?;
    let stream = driver.stream(stream)?;
    let pool = pool.unwrap_or_else(|| driver.pools.of_device(stream.context.ordinal).1);
    out.set(driver.allocate_ordered(&stream, &*driver.pools.get(pool)?, length)?)
}

fn attribute(pool: Handle) -> Result<Arc<Pool>> {
    driver()?.pools.get(pool)
}

exports! {
    fn cuMemAllocAsync thread cuMemAllocAsync_ptsz (out: Out<DevicePointer>, length: usize, stream: Handle) {
        allocate_in(out, length, None, stream)
    }

    fn cuMemAllocFromPoolAsync thread cuMemAllocFromPoolAsync_ptsz
    (out: Out<DevicePointer>, length: usize, pool: Handle, stream: Handle) {
        allocate_in(out, length, Some(pool), stream)
    }

    fn cuMemFreeAsync thread cuMemFreeAsync_ptsz (start: DevicePointer, stream: Handle) {
        let driver = driver()?;
        locked(&driver.heap).at(start).ok_or(Code::INVALID_VALUE)?;
        driver.stream(stream)?.enqueue(driver, Work::Free(start))
    }

    fn cuMemPoolCreate(out: Out<Handle>, properties: In<PoolProperties>) {
        out.given()?;
        let driver = driver()?;
        let wanted = properties.get()?;
        let (host, ordinal) = match (wanted.location_kind, wanted.kind) {
            (1, _) => (false, wanted.location),
            (_, MANAGED) => (false, current()?.ordinal),
            _ => (true, 0),
        };
        driver.gpu(ordinal)?;
        let make = |handle| Pool::new(handle, ordinal, host, wanted.most as u64);
        out.set(driver.pools.registry.add_with(make))
    }

    /// Live allocations stay valid. The pool keeps its reserved memory until they are freed and the program
    /// waits for work.
    fn cuMemPoolDestroy(handle: Handle) {
        let driver = driver()?;
        let pool = driver.pools.get(handle)?;
        let mut chosen = locked(&driver.pools.chosen);
        if chosen.values().any(|pair| pair.0 == handle) {
            return Err(Code::INVALID_VALUE);
        }
        chosen.values_mut().filter(|pair| pair.1 == handle).for_each(|pair| pair.1 = pair.0);
        drop(chosen);
        locked(&pool.books).destroyed = true;
        driver.end_pool(&pool);
        Ok(())
    }

    fn cuMemPoolTrimTo(handle: Handle, keep: usize) {
        attribute(handle)?.shrink(driver()?, keep as u64)
    }

    fn cuMemPoolGetAttribute(handle: Handle, number: u32, out: Out<u64>) {
        let pool = attribute(handle)?;
        let books = locked(&pool.books);
        match number {
            1..=3 => out.cast::<u32>().set(books.reuse[number as usize]),
            4 => out.set(books.threshold),
            5 => out.set(books.reserved),
            6 => out.set(books.reserved_high),
            7 => out.set(books.used),
            8 => out.set(books.used_high),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn cuMemPoolSetAttribute(handle: Handle, number: u32, value: In<u64>) {
        let pool = attribute(handle)?;
        let mut books = locked(&pool.books);
        match number {
            1..=3 => books.reuse[number as usize] = In::<u32>::from_address(value.address()).get()?,
            4 => books.threshold = value.get()?,
            6 if value.get()? == 0 => books.reserved_high = books.reserved,
            8 if value.get()? == 0 => books.used_high = books.used,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    fn cuMemPoolSetAccess(handle: Handle, _access: In<u8>, _count: usize) {
        attribute(handle).map(|_| ())
    }

    fn cuMemPoolGetAccess(flags: Out<u32>, handle: Handle, _location: In<u64>) {
        attribute(handle)?;
        flags.set(3)
    }

    fn cuDeviceGetDefaultMemPool(out: Out<Handle>, ordinal: i32) {
        let driver = driver()?;
        driver.gpu(ordinal)?;
        out.set(driver.pools.of_device(ordinal).0)
    }

    fn cuDeviceGetMemPool(out: Out<Handle>, ordinal: i32) {
        let driver = driver()?;
        driver.gpu(ordinal)?;
        out.set(driver.pools.of_device(ordinal).1)
    }

    fn cuDeviceSetMemPool(ordinal: i32, handle: Handle) {
        let driver = driver()?;
        driver.gpu(ordinal)?;
        if driver.pools.get(handle)?.ordinal != ordinal {
            return Err(Code::INVALID_VALUE);
        }
        let default = driver.pools.of_device(ordinal).0;
        locked(&driver.pools.chosen).insert(ordinal, (default, handle));
        Ok(())
    }
}
