//! Multicast objects: handles that stand for the same memory on several GPUs.
//!
//! An object is created and mapped like separate memory, and costs none. Memory bound to an object stays
//! charged until it is unbound or the object is gone. The object's mappings show separate memory, because a
//! write to all GPUs at once takes instructions that no kernel has here.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::abi::{Code, DevicePointer, Handle, In, Out, Result};
use crate::driver::{Driver, driver, locked};
use crate::vmm::{GRANULARITY, Properties};

/// CUmulticastObjectProp of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Wanted {
    devices: u32,
    length: usize,
    handle_types: u64,
    flags: u64,
}

/// A multicast object's GPUs and bindings; `vmm` holds its memory.
pub struct Multicast {
    length: u64,
    devices: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    added: Vec<i32>,
    /// Length and memory of each binding, by GPU and offset in the object.
    bound: BTreeMap<(i32, u64), (u64, Handle)>,
}

impl Multicast {
    /// Unbinds all memory.
    pub fn unbind_all(&self, driver: &Driver) {
        for (_, memory) in std::mem::take(&mut locked(&self.state).bound).into_values() {
            let _ = driver.memory.let_go(driver, memory);
        }
    }

    fn add(&self, ordinal: i32) -> Result {
        let mut state = locked(&self.state);
        if state.added.contains(&ordinal) || state.added.len() >= self.devices as usize {
            return Err(Code::INVALID_VALUE);
        }
        state.added.push(ordinal);
        Ok(())
    }

    fn bind(&self, driver: &Driver, place: u64, memory: Handle, offset: u64, length: u64) -> Result {
        let mut state = locked(&self.state);
        // CUDA's documentation requires that every device is added before anything is bound.
        if state.added.len() < self.devices as usize {
            return Err(Code::INVALID_VALUE);
        }
        let end = place.checked_add(length).filter(|&end| end <= self.length).ok_or(Code::INVALID_VALUE)?;
        let ordinal = driver.memory.gpu_of(memory)?;
        let aligned = [place, offset, length].iter().all(|value| value.is_multiple_of(GRANULARITY));
        if length == 0 || !aligned || !state.added.contains(&ordinal) {
            return Err(Code::INVALID_VALUE);
        }
        let before = state.bound.range((ordinal, 0)..(ordinal, end)).next_back();
        if before.is_some_and(|((_, from), (size, _))| from + size > place) {
            return Err(Code::INVALID_VALUE);
        }
        driver.memory.hold(memory, offset, length)?;
        state.bound.insert((ordinal, place), (length, memory));
        Ok(())
    }

    fn unbind(&self, driver: &Driver, ordinal: i32, place: u64, length: u64) -> Result {
        let end = place.checked_add(length).ok_or(Code::INVALID_VALUE)?;
        let mut state = locked(&self.state);
        let inside: Vec<_> =
            state.bound.range((ordinal, place)..(ordinal, end)).map(|(key, _)| *key).collect();
        if inside.is_empty() {
            return Err(Code::INVALID_VALUE);
        }
        inside
            .into_iter()
            .filter_map(|key| state.bound.remove(&key))
            .try_for_each(|(_, memory)| driver.memory.let_go(driver, memory))
    }
}

fn create(driver: &Driver, wanted: Wanted) -> Result<Handle> {
    let length = wanted.length as u64;
    let devices = wanted.devices as usize;
    if length == 0 || !length.is_multiple_of(GRANULARITY) || !(1..=driver.devices.len()).contains(&devices) {
        return Err(Code::INVALID_VALUE);
    }
    let multicast = Multicast { length, devices: wanted.devices, state: Mutex::default() };
    driver.memory.add_multicast(length, Properties::shared(wanted.handle_types), multicast)
}

fn bind_mem(object: Handle, place: usize, memory: Handle, offset: usize, length: usize) -> Result {
    let driver = driver()?;
    let bind =
        |multicast: &Multicast| multicast.bind(driver, place as u64, memory, offset as u64, length as u64);
    driver.memory.with_multicast(object, bind)
}

fn bind_address(object: Handle, place: usize, address: DevicePointer, length: usize) -> Result {
    let driver = driver()?;
    let (memory, offset) = driver.memory.mapped_at(address)?;
    let bind = |multicast: &Multicast| multicast.bind(driver, place as u64, memory, offset, length as u64);
    driver.memory.with_multicast(object, bind)
}

exports! {
    fn cuMulticastGetGranularity(out: Out<usize>, wanted: In<Wanted>, _option: u32) {
        driver()?;
        wanted.get()?;
        out.set(usize::try_from(GRANULARITY).unwrap_or(usize::MAX))
    }

    fn cuMulticastCreate(out: Out<Handle>, wanted: In<Wanted>) {
        out.given()?;
        out.set(create(driver()?, wanted.get()?)?)
    }

    fn cuMulticastAddDevice(object: Handle, ordinal: i32) {
        let driver = driver()?;
        driver.gpu(ordinal)?;
        driver.memory.with_multicast(object, |multicast| multicast.add(ordinal))
    }

    fn cuMulticastBindMem
    (object: Handle, place: usize, memory: Handle, offset: usize, length: usize, _flags: u64) {
        bind_mem(object, place, memory, offset, length)
    }

    fn cuMulticastBindMem_v2
    (object: Handle, _device: i32, place: usize, memory: Handle, offset: usize, length: usize, _flags: u64) {
        bind_mem(object, place, memory, offset, length)
    }

    fn cuMulticastBindAddr(object: Handle, place: usize, address: DevicePointer, length: usize, _flags: u64) {
        bind_address(object, place, address, length)
    }

    fn cuMulticastBindAddr_v2
    (object: Handle, _device: i32, place: usize, address: DevicePointer, length: usize, _flags: u64) {
        bind_address(object, place, address, length)
    }

    fn cuMulticastUnbind(object: Handle, ordinal: i32, place: usize, length: usize) {
        let driver = driver()?;
        let unbind =
            |multicast: &Multicast| multicast.unbind(driver, ordinal, place as u64, length as u64);
        driver.memory.with_multicast(object, unbind)
    }
}
