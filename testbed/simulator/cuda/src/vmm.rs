//! Virtual memory management: reserved addresses, allocation handles, and mappings of handles to addresses.
//!
//! A handle's memory is a file without a name. Every mapping of it therefore shows the same bytes, even in
//! another process that imported it. The GPU is charged until the last reference and the last mapping are
//! gone.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use gpushare_simulator::memory::LARGE;

use crate::abi::{Code, DevicePointer, Handle, In, Out, Result};
use crate::driver::{Driver, driver, locked};
use crate::heap::{Allocation, Kind, reserve, unreserve};
use crate::multicast::Multicast;
use crate::registry::Registry;

/// CUmemAllocationProp of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    location_kind: u32,
    location: i32,
    security: u64,
    flags: [u8; 8],
}

/// Memory behind a handle.
struct Physical {
    file: File,
    length: u64,
    charged: u64,
    properties: Properties,
    /// Counts of handle references and of mappings.
    uses: Mutex<(u32, u32)>,
    /// The multicast object, if it is one.
    multicast: Option<Multicast>,
}

#[derive(Clone)]
struct Mapping {
    length: u64,
    /// Offset of the mapping in the handle's memory.
    offset: u64,
    physical: Handle,
}

/// All allocation handles, reservations and mappings of the process.
#[derive(Default)]
pub struct Virtual {
    handles: Registry<Physical>,
    reservations: Mutex<BTreeMap<u64, u64>>,
    mappings: Mutex<BTreeMap<u64, Mapping>>,
}

const DEVICE: u32 = 1;
/// Sizes and offsets are multiples of this, in bytes.
pub const GRANULARITY: u64 = LARGE;

impl Properties {
    /// Properties of memory that belongs to no single GPU.
    pub fn shared(handle_types: u64) -> Self {
        let handle_types = u32::try_from(handle_types).unwrap_or(0);
        Self { kind: 1, handle_types, location_kind: DEVICE, location: 0, security: 0, flags: [0; 8] }
    }
}

fn new_file(length: u64) -> Result<File> {
    // SAFETY: makes a new file without a name; the text is terminated.
    let descriptor = unsafe { libc::memfd_create(c"gpushare-simulator".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(Code::OPERATING_SYSTEM);
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
    file.set_len(length).map_err(|_| Code::OUT_OF_MEMORY)?;
    Ok(file)
}

/// Maps `length` bytes of `file` at `start`, replacing the current mapping.
pub fn map_file(file: &File, start: u64, length: u64, offset: u64) -> Result {
    let convert = |value: u64| usize::try_from(value).map_err(|_| Code::INVALID_VALUE);
    let (address, size) = (convert(start)?, convert(length)?);
    let offset = libc::off_t::try_from(offset).map_err(|_| Code::INVALID_VALUE)?;
    let place = std::ptr::with_exposed_provenance_mut(address);
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: this process reserved the range and assigned it to this use.
    let got = unsafe { libc::mmap(place, size, access, kind, file.as_raw_fd(), offset) };
    if got == libc::MAP_FAILED { Err(Code::MAP_FAILED) } else { Ok(()) }
}

/// Puts fresh memory in place of a mapping.
pub fn unmap_file(start: u64, length: u64) {
    let (Ok(address), Ok(size)) = (usize::try_from(start), usize::try_from(length)) else { return };
    let place = std::ptr::with_exposed_provenance_mut(address);
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range is a mapping of this process that nothing uses any more.
    unsafe { libc::mmap(place, size, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0) };
}

impl Virtual {
    /// Removes the memory and releases its charge, if no reference and no mapping is left.
    fn settle(&self, driver: &Driver, handle: Handle) -> Result {
        let physical = self.handles.get(handle)?;
        if *locked(&physical.uses) == (0, 0) {
            self.handles.remove(handle)?;
            if let Some(multicast) = &physical.multicast {
                multicast.unbind_all(driver);
            }
            driver.give(physical.properties.location, physical.charged)?;
        }
        Ok(())
    }

    fn live(&self, handle: Handle) -> Result<Arc<Physical>> {
        let physical = self.handles.get(handle).map_err(|_| Code::INVALID_VALUE)?;
        if locked(&physical.uses).0 == 0 { Err(Code::INVALID_VALUE) } else { Ok(physical) }
    }

    fn mapping_of(&self, address: u64) -> Result<Handle> {
        let mappings = locked(&self.mappings);
        let found = mappings
            .range(..=address)
            .next_back()
            .filter(|(start, mapping)| address - *start < mapping.length);
        found.map(|(_, mapping)| mapping.physical).ok_or(Code::INVALID_VALUE)
    }

    /// The memory handle at a mapped address, and the address's offset in that memory.
    pub fn mapped_at(&self, address: u64) -> Result<(Handle, u64)> {
        let handle = self.mapping_of(address)?;
        let mappings = locked(&self.mappings);
        let (start, mapping) = mappings.range(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
        Ok((handle, mapping.offset + (address - start)))
    }

    /// CUDA ordinal of the GPU that holds a handle's memory.
    pub fn gpu_of(&self, handle: Handle) -> Result<i32> {
        Ok(self.live(handle)?.properties.location)
    }

    /// Counts one more mapping of the `length` bytes at `offset`, to something other than addresses.
    pub fn hold(&self, handle: Handle, offset: u64, length: u64) -> Result {
        let physical = self.live(handle)?;
        if physical.multicast.is_some() || offset.checked_add(length).is_none_or(|end| end > physical.length)
        {
            return Err(Code::INVALID_VALUE);
        }
        locked(&physical.uses).1 += 1;
        Ok(())
    }

    /// Ends a mapping that [`Virtual::hold`] counted.
    pub fn let_go(&self, driver: &Driver, handle: Handle) -> Result {
        locked(&self.handles.get(handle)?.uses).1 -= 1;
        self.settle(driver, handle)
    }

    /// Makes a handle for a multicast object.
    pub fn add_multicast(&self, length: u64, properties: Properties, multicast: Multicast) -> Result<Handle> {
        let uses = Mutex::new((1, 0));
        let file = new_file(length)?;
        let multicast = Some(multicast);
        Ok(self.handles.add(Physical { file, length, charged: 0, properties, uses, multicast }))
    }

    /// Calls `act` with the multicast object of a handle; INVALID_VALUE if it is not one.
    pub fn with_multicast(&self, handle: Handle, act: impl FnOnce(&Multicast) -> Result) -> Result {
        act(self.live(handle)?.multicast.as_ref().ok_or(Code::INVALID_VALUE)?)
    }

    fn reserved(&self, start: u64, length: u64) -> bool {
        let reservations = locked(&self.reservations);
        let found = reservations.range(..=start).next_back();
        found.is_some_and(|(from, size)| start.checked_add(length).is_some_and(|end| end <= from + size))
    }
}

fn create(driver: &Driver, length: u64, properties: Properties) -> Result<Handle> {
    if length == 0 || !length.is_multiple_of(LARGE) {
        return Err(Code::INVALID_VALUE);
    }
    if properties.location_kind != DEVICE {
        return Err(Code::NOT_SUPPORTED);
    }
    if !driver.delay.is_zero() {
        std::thread::sleep(driver.delay);
    }
    if !driver.take(properties.location, length)? {
        return Err(Code::OUT_OF_MEMORY);
    }
    let file = new_file(length).inspect_err(|_| driver.give_up(properties.location, length))?;
    let uses = Mutex::new((1, 0));
    let physical = Physical { file, length, charged: length, properties, uses, multicast: None };
    Ok(driver.memory.handles.add(physical))
}

fn map(driver: &Driver, start: u64, length: u64, offset: u64, handle: Handle) -> Result {
    let physical = driver.memory.live(handle)?;
    let inside = offset.checked_add(length).is_some_and(|end| end <= physical.length);
    if length == 0 || !inside || !driver.memory.reserved(start, length) {
        return Err(Code::INVALID_VALUE);
    }
    let mut mappings = locked(&driver.memory.mappings);
    let before = mappings.range(..start + length).next_back();
    if before.is_some_and(|(from, mapping)| from + mapping.length > start) {
        return Err(Code::INVALID_VALUE);
    }
    map_file(&physical.file, start, length, offset)?;
    locked(&physical.uses).1 += 1;
    mappings.insert(start, Mapping { length, offset, physical: handle });
    let ordinal = physical.properties.location;
    let shown = Allocation::new(ordinal, 0, Kind::Mapped, length, length, 0).starting(start);
    locked(&driver.heap).adopt(shown);
    Ok(())
}

fn unmap(driver: &Driver, start: u64, length: u64) -> Result {
    let gone: Vec<(u64, Mapping)> = {
        let mut mappings = locked(&driver.memory.mappings);
        let inside: Vec<u64> =
            mappings.range(start..start.saturating_add(length)).map(|(from, _)| *from).collect();
        inside.into_iter().filter_map(|from| mappings.remove_entry(&from)).collect()
    };
    if gone.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    for (from, mapping) in gone {
        unmap_file(from, mapping.length);
        let _ = locked(&driver.heap).remove(from);
        locked(&driver.memory.handles.get(mapping.physical)?.uses).1 -= 1;
        driver.memory.settle(driver, mapping.physical)?;
    }
    Ok(())
}

exports! {
    fn cuMemGetAllocationGranularity(out: Out<usize>, properties: In<Properties>, _option: u32) {
        driver()?;
        properties.get()?;
        out.set(usize::try_from(LARGE).unwrap_or(usize::MAX))
    }

    fn cuMemAddressReserve(out: Out<DevicePointer>, length: usize, align: usize, _wish: u64, _flags: u64) {
        out.given()?;
        let driver = driver()?;
        let (length, align) = (length as u64, (align as u64).max(LARGE));
        if length == 0 || !length.is_multiple_of(LARGE) || !align.is_power_of_two() {
            return Err(Code::INVALID_VALUE);
        }
        let whole = length.checked_add(align).ok_or(Code::OUT_OF_MEMORY)?;
        let base = reserve(whole)?;
        let start = base.next_multiple_of(align);
        for (from, to) in [(base, start), (start + length, base + whole)] {
            if to > from {
                unreserve(from, to - from);
            }
        }
        locked(&driver.memory.reservations).insert(start, length);
        out.set(start)
    }

    fn cuMemAddressFree(start: DevicePointer, length: usize) {
        let driver = driver()?;
        let mut reservations = locked(&driver.memory.reservations);
        if reservations.get(&start) != Some(&(length as u64)) {
            return Err(Code::INVALID_VALUE);
        }
        if locked(&driver.memory.mappings).range(start..start + length as u64).next().is_some() {
            return Err(Code::INVALID_VALUE);
        }
        reservations.remove(&start);
        unreserve(start, length as u64);
        Ok(())
    }

    fn cuMemCreate(out: Out<Handle>, length: usize, properties: In<Properties>, _flags: u64) {
        out.given()?;
        out.set(create(driver()?, length as u64, properties.get()?)?)
    }

    fn cuMemRelease(handle: Handle) {
        let driver = driver()?;
        let physical = driver.memory.live(handle)?;
        locked(&physical.uses).0 -= 1;
        drop(physical);
        driver.memory.settle(driver, handle)
    }

    fn cuMemRetainAllocationHandle(out: Out<Handle>, address: u64) {
        out.given()?;
        let driver = driver()?;
        let handle = driver.memory.mapping_of(address)?;
        locked(&driver.memory.handles.get(handle)?.uses).0 += 1;
        out.set(handle)
    }

    fn cuMemMap(start: DevicePointer, length: usize, offset: usize, handle: Handle, _flags: u64) {
        map(driver()?, start, length as u64, offset as u64, handle)
    }

    fn cuMemUnmap(start: DevicePointer, length: usize) {
        unmap(driver()?, start, length as u64)
    }

    /// Every mapping can be read and written from the start, so access rights are not stored.
    fn cuMemSetAccess(start: DevicePointer, _length: usize, _access: In<u8>, _count: usize) {
        driver()?.memory.mapping_of(start).map(|_| ())
    }

    fn cuMemGetAccess(flags: Out<u64>, _location: In<u64>, start: DevicePointer) {
        driver()?.memory.mapping_of(start)?;
        flags.set(3)
    }

    fn cuMemGetAllocationPropertiesFromHandle(out: Out<Properties>, handle: Handle) {
        out.set(driver()?.memory.live(handle)?.properties)
    }

    fn cuMemExportToShareableHandle(out: Out<i32>, handle: Handle, kind: u32, _flags: u64) {
        out.given()?;
        let physical = driver()?.memory.live(handle)?;
        if kind != 1 {
            return Err(Code::NOT_SUPPORTED);
        }
        let copy = physical.file.try_clone().map_err(|_| Code::OPERATING_SYSTEM)?;
        out.set(copy.into_raw_fd())
    }

    /// The exporter is charged for the memory, not the importer.
    fn cuMemImportFromShareableHandle(out: Out<Handle>, descriptor: usize, kind: u32) {
        out.given()?;
        let driver = driver()?;
        if kind != 1 {
            return Err(Code::NOT_SUPPORTED);
        }
        let number = i32::try_from(descriptor).map_err(|_| Code::INVALID_VALUE)?;
        // SAFETY: the caller passes an open descriptor, which it keeps.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        let file = File::from(borrowed.try_clone_to_owned().map_err(|_| Code::INVALID_VALUE)?);
        let length = file.metadata().map_err(|_| Code::INVALID_VALUE)?.len();
        let (properties, uses) = (Properties::shared(1), Mutex::new((1, 0)));
        let physical = Physical { file, length, charged: 0, properties, uses, multicast: None };
        out.set(driver.memory.handles.add(physical))
    }
}
