//! The oldest forms of the memory calls, whose sizes and addresses have 32 bits.
//!
//! Their memory is in the lower 4 GiB of addresses, outside of the GPUs' ranges. The kernel allocates half of
//! those addresses.

use gpushare_simulator::memory::rounded;

use crate::abi::{Code, Out, Result};
use crate::context::current;
use crate::driver::{driver, locked};
use crate::heap::{Allocation, Kind, reserve_low};
use crate::linear::pitch_of;

const PAGE: u64 = 4096;

fn allocate(length: u32) -> Result<u32> {
    let driver = driver()?;
    let context = current()?;
    driver.refuse_unsafe_while_capturing()?;
    if length == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let extent = rounded(length.into()).ok_or(Code::OUT_OF_MEMORY)?;
    if !driver.take(context.ordinal, extent)? {
        return Err(Code::OUT_OF_MEMORY);
    }
    let start = reserve_low(extent.next_multiple_of(PAGE))
        .inspect_err(|_| driver.give_up(context.ordinal, extent))?;
    let new = Allocation::new(context.ordinal, context.home, Kind::Device, length.into(), extent, extent);
    locked(&driver.heap).adopt(new.starting(start.into()));
    Ok(start)
}

fn narrow(value: u64) -> Result<u32> {
    u32::try_from(value).map_err(|_| Code::INVALID_VALUE)
}

exports! {
    fn cuMemAlloc(out: Out<u32>, length: u32) {
        out.given()?;
        out.set(allocate(length)?)
    }

    fn cuMemAllocPitch(out: Out<u32>, pitch: Out<u32>, width: u32, height: u32, element: u32) {
        out.given()?;
        pitch.given()?;
        let (row, all) = pitch_of(width as usize, height as usize, element)?;
        let row = u32::try_from(row).map_err(|_| Code::INVALID_VALUE)?;
        out.set(allocate(u32::try_from(all).map_err(|_| Code::OUT_OF_MEMORY)?)?)?;
        pitch.set(row)
    }

    fn cuMemFree(start: u32) {
        crate::linear::free(start.into())
    }

    fn cuMemGetAddressRange(base: Out<u32>, length: Out<u32>, address: u32) {
        let driver = driver()?;
        let found = locked(&driver.heap).find(address.into()).copied().ok_or(Code::NOT_FOUND)?;
        let (start, size) = (narrow(found.start)?, narrow(found.length)?);
        base.set_if_given(start);
        length.set_if_given(size);
        Ok(())
    }
}
