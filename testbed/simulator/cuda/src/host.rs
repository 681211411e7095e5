//! Page-locked host memory. Here it is ordinary memory, which the device sees at the same address.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::abi::{Code, DevicePointer, Handle, Out, Result};
use crate::context::current;
use crate::driver::{driver, locked};
use crate::heap::{reserve, unreserve};

/// A range of page-locked memory.
#[derive(Clone, Copy)]
pub struct HostRange {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Context that was current when it was made.
    pub context: Handle,
    /// Flags of cuMemHostAlloc or cuMemHostRegister.
    pub flags: u32,
    ours: bool,
}

/// All page-locked memory of the process.
#[derive(Default)]
pub struct HostMemory {
    ranges: Mutex<BTreeMap<u64, HostRange>>,
}

impl HostMemory {
    /// The range that `address` lies in.
    pub fn find(&self, address: u64) -> Option<HostRange> {
        let ranges = locked(&self.ranges);
        let found = ranges.range(..=address).next_back().map(|(_, range)| *range);
        found.filter(|range| address - range.start < range.length)
    }

    fn allocate(&self, length: usize, flags: u32) -> Result<u64> {
        let context = current()?.handle;
        if length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let start = reserve(length as u64)?;
        let range = HostRange { start, length: length as u64, context, flags, ours: true };
        locked(&self.ranges).insert(start, range);
        Ok(start)
    }

    fn remove(&self, start: u64, ours: bool) -> Result<HostRange> {
        let mut ranges = locked(&self.ranges);
        match ranges.get(&start) {
            Some(range) if range.ours == ours => ranges.remove(&start).ok_or(Code::INVALID_VALUE),
            _ => Err(if ours { Code::INVALID_VALUE } else { Code::HOST_MEMORY_NOT_REGISTERED }),
        }
    }
}

exports! {
    fn cuMemAllocHost_v2 also cuMemAllocHost (out: Out<u64>, length: usize) {
        out.given()?;
        out.set(driver()?.host.allocate(length, 0)?)
    }

    fn cuMemHostAlloc(out: Out<u64>, length: usize, flags: u32) {
        out.given()?;
        out.set(driver()?.host.allocate(length, flags)?)
    }

    fn cuMemFreeHost(start: u64) {
        let range = driver()?.host.remove(start, true)?;
        unreserve(range.start, range.length);
        Ok(())
    }

    fn cuMemHostRegister_v2 also cuMemHostRegister (start: u64, length: usize, flags: u32) {
        let driver = driver()?;
        let context = current()?.handle;
        if start == 0 || length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if driver.host.find(start).is_some() {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let range = HostRange { start, length: length as u64, context, flags, ours: false };
        locked(&driver.host.ranges).insert(start, range);
        Ok(())
    }

    fn cuMemHostUnregister(start: u64) {
        driver()?.host.remove(start, false).map(|_| ())
    }

    fn cuMemHostGetDevicePointer_v2(out: Out<DevicePointer>, start: u64, _flags: u32) {
        out.given()?;
        driver()?.host.find(start).ok_or(Code::INVALID_VALUE)?;
        out.set(start)
    }

    fn cuMemHostGetFlags(out: Out<u32>, start: u64) {
        out.set(driver()?.host.find(start).ok_or(Code::INVALID_VALUE)?.flags)
    }
}
