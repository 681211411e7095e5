//! Linear device memory: allocation, free, sizes, and the attributes of an address.

use std::sync::atomic::Ordering;

use gpushare_simulator::memory::rounded;

use crate::abi::{Code, DevicePointer, Handle, In, Out, Result};
use crate::context::current;
use crate::driver::{Driver, driver, locked};
use crate::heap::{Allocation, Kind, unreserve};

/// `CU_MEM_ADVISE_SET_PREFERRED_LOCATION`.
const PREFERRED_LOCATION: u32 = 3;
/// `CU_DEVICE_CPU`.
const HOST: i32 = -1;

impl Driver {
    /// Uncharges managed memory from the GPU, because its pages belong to the host from now on.
    fn leave_to_host(&self, address: u64) -> Result {
        let mut heap = locked(&self.heap);
        let found = heap.find_mut(address).filter(|found| found.kind == Kind::Managed);
        let found = found.ok_or(Code::INVALID_VALUE)?;
        let charged = std::mem::take(&mut found.charged);
        self.give_pages(found.ordinal, charged)
    }

    /// Charges the GPU `ordinal` if the kind says so, and finds addresses for `length` bytes.
    pub fn allocate(&self, ordinal: i32, context: Handle, kind: Kind, length: u64) -> Result<Allocation> {
        let gpu = self.gpu(ordinal)?;
        let extent = rounded(length).ok_or(Code::OUT_OF_MEMORY)?;
        if length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if !self.delay.is_zero() {
            std::thread::sleep(self.delay);
        }
        let charged = match kind {
            Kind::Pool(_) | Kind::Graph | Kind::Imported | Kind::Mapped => 0,
            // It may exceed the GPU's memory. The whole allocation then stays in host memory.
            Kind::Managed => {
                if self.take_pages(ordinal, extent)? {
                    extent
                } else {
                    0
                }
            }
            _ if self.take(ordinal, extent)? => extent,
            _ => return Err(Code::OUT_OF_MEMORY),
        };
        let new = Allocation::new(ordinal, context, kind, length, extent, charged);
        let placed = locked(&self.heap).place(gpu.memory.load(Ordering::Relaxed), new);
        if placed.is_err() {
            self.give_back(kind, ordinal, charged)?;
        }
        placed
    }

    /// Frees the allocation that starts at `start`.
    pub fn release(&self, start: u64) -> Result<Allocation> {
        self.unshare(start);
        let gone = locked(&self.heap).remove(start)?;
        if u32::try_from(start).is_ok() {
            // Memory below 4 GiB comes from the oldest forms and is outside of every GPU's range.
            unreserve(start, gone.extent.next_multiple_of(4096));
        }
        self.give_back(gone.kind, gone.ordinal, gone.charged)?;
        Ok(gone)
    }

    fn give_back(&self, kind: Kind, ordinal: i32, charged: u64) -> Result {
        match kind {
            Kind::Managed => self.give_pages(ordinal, charged),
            _ => self.give(ordinal, charged),
        }
    }

    /// Refuses a range that is neither within one allocation nor, by its first byte, in page-locked host
    /// memory.
    pub fn check(&self, address: u64, length: u64) -> Result {
        if length == 0 {
            return Ok(());
        }
        let mut heap = locked(&self.heap);
        let inside = heap.find(address).is_some_and(|found| {
            address.checked_add(length).is_some_and(|end| end <= found.start + found.length)
        });
        if inside {
            heap.touch(address);
            return Ok(());
        }
        drop(heap);
        if self.host.find(address).is_some() { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }
}

fn allocate(length: usize, kind: Kind) -> Result<u64> {
    let driver = driver()?;
    let context = current()?;
    driver.refuse_unsafe_while_capturing()?;
    Ok(driver.allocate(context.ordinal, context.home, kind, length as u64)?.start)
}

const PITCH: usize = 512;

/// Bytes of a row, and bytes of all rows.
pub fn pitch_of(width: usize, height: usize, element: u32) -> Result<(usize, usize)> {
    if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let row = width.checked_next_multiple_of(PITCH).ok_or(Code::INVALID_VALUE)?;
    Ok((row, row.checked_mul(height).ok_or(Code::OUT_OF_MEMORY)?))
}

/// cuMemFree: frees memory of any kind that may be freed by address.
pub fn free(start: u64) -> Result {
    let driver = driver()?;
    current()?;
    driver.refuse_unsafe_while_capturing()?;
    if start == 0 {
        return Ok(());
    }
    let kind = locked(&driver.heap).at(start).map(|found| found.kind).ok_or(Code::INVALID_VALUE)?;
    match kind {
        Kind::Device | Kind::Managed => driver.release(start).map(|_| ()),
        Kind::Pool(_) | Kind::Graph => driver.free_ordered(start),
        Kind::Imported => driver.close_import(start),
        Kind::Array | Kind::Mapped => Err(Code::INVALID_VALUE),
    }
}

fn free_and_total() -> Result<(u64, u64)> {
    let driver = driver()?;
    let gpu = driver.gpu(current()?.ordinal)?;
    Ok(driver.session.free_and_total(gpu))
}

fn size(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Writes a pointer attribute, by its number in CUDA's list.
fn write_attribute(number: u32, address: u64, out: Out<u8>) -> Result {
    let driver = driver()?;
    let known = locked(&driver.heap).find(address).copied();
    let host = driver.host.find(address);
    let Some(found) = known else {
        let host = host.ok_or(Code::INVALID_VALUE)?;
        return match number {
            1 => out.cast::<Handle>().set(host.context),
            2 => out.cast::<u32>().set(1),
            3 | 4 => out.cast::<u64>().set(address),
            8 | 17 => out.cast::<u64>().set(0).or(Err(Code::INVALID_VALUE)),
            9 => out.cast::<i32>().set(0),
            11 => out.cast::<u64>().set(host.start),
            12 => out.cast::<usize>().set(size(host.length)),
            13 => out.set(1),
            _ => Err(Code::NOT_SUPPORTED),
        };
    };
    match number {
        1 => out.cast::<Handle>().set(found.context),
        2 => out.cast::<u32>().set(2),
        3 => out.cast::<u64>().set(address),
        4 if found.kind == Kind::Managed => out.cast::<u64>().set(address),
        4 => Err(Code::INVALID_VALUE),
        6 | 10 | 13 | 15 => out.set(u8::from(number != 6 && number != 15)),
        7 | 20 => out.cast::<u64>().set(found.id),
        8 => out.set(u8::from(found.kind == Kind::Managed)),
        9 => out.cast::<i32>().set(found.ordinal),
        11 | 19 => out.cast::<u64>().set(found.start),
        12 | 18 => out.cast::<usize>().set(size(found.length)),
        14 => out.cast::<u64>().set(1),
        16 => out.cast::<u32>().set(3),
        17 => out.cast::<Handle>().set(if let Kind::Pool(pool) = found.kind { pool } else { 0 }),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

exports! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let (left, all) = free_and_total()?;
        free.set_if_given(size(left));
        total.set_if_given(size(all));
        Ok(())
    }

    /// The oldest form returns the sizes in 32 bits.
    fn cuMemGetInfo(free: Out<u32>, total: Out<u32>) {
        let (left, all) = free_and_total()?;
        free.set_if_given(u32::try_from(left).unwrap_or(u32::MAX));
        total.set_if_given(u32::try_from(all).unwrap_or(u32::MAX));
        Ok(())
    }

    fn cuMemAlloc_v2(out: Out<DevicePointer>, length: usize) {
        out.given()?;
        out.set(allocate(length, Kind::Device)?)
    }

    fn cuMemAllocPitch_v2(out: Out<DevicePointer>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        out.given()?;
        pitch.given()?;
        let (row, all) = pitch_of(width, height, element)?;
        let start = allocate(all, Kind::Device)?;
        pitch.set(row)?;
        out.set(start)
    }

    fn cuMemAllocManaged(out: Out<DevicePointer>, length: usize, flags: u32) {
        out.given()?;
        if !matches!(flags, 1 | 2 | 4) {
            return Err(Code::INVALID_VALUE);
        }
        out.set(allocate(length, Kind::Managed)?)
    }

    fn cuMemFree_v2(start: DevicePointer) {
        free(start)
    }

    fn cuMemGetAddressRange_v2(base: Out<DevicePointer>, length: Out<usize>, address: DevicePointer) {
        let driver = driver()?;
        let found = locked(&driver.heap).find(address).copied().ok_or(Code::NOT_FOUND)?;
        base.set_if_given(found.start);
        length.set_if_given(size(found.length));
        Ok(())
    }

    fn cuPointerGetAttribute(out: Out<u8>, number: u32, address: DevicePointer) {
        write_attribute(number, address, out)
    }

    /// An unknown address is not an error here: its attributes are zeros.
    fn cuPointerGetAttributes(count: u32, numbers: In<u32>, out: In<u64>, address: DevicePointer) {
        for index in 0..count as usize {
            let place = Out::<u8>::from_address(out.at(index)?);
            let number = numbers.at(index)?;
            if write_attribute(number, address, place).is_err() {
                match number {
                    6 | 8 | 10 | 13 | 15 => place.set(0)?,
                    2 | 16 => place.cast::<u32>().set(0)?,
                    9 => place.cast::<i32>().set(-2)?,
                    _ => place.cast::<u64>().set(0)?,
                }
            }
        }
        Ok(())
    }

    fn cuPointerSetAttribute(_value: In<u8>, _number: u32, address: DevicePointer) {
        driver()?.check(address, 1)
    }

    fn cuMemAdvise(address: DevicePointer, length: usize, advice: u32, device: i32) {
        let driver = driver()?;
        driver.check(address, length as u64)?;
        if advice == PREFERRED_LOCATION && device == HOST {
            driver.leave_to_host(address)?;
        }
        Ok(())
    }

    fn cuMemPrefetchAsync thread cuMemPrefetchAsync_ptsz
    (address: DevicePointer, length: usize, _device: i32, _stream: Handle) {
        driver()?.check(address, length as u64)
    }
}
