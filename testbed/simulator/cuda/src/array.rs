//! Arrays and mipmapped arrays: linear memory whose size follows from format and extents.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::abi::{Code, Handle, In, Out, Result};
use crate::bounds;
use crate::context::current;
use crate::driver::{Driver, driver, locked};
use crate::heap::Kind;
use crate::registry::Registry;

/// CUDA_ARRAY3D_DESCRIPTOR of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Description {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// CUDA_ARRAY_DESCRIPTOR of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Flat {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// An array, or one level of a mipmapped array.
pub struct Array {
    /// First address of its memory; 0 while it has none.
    pub start: u64,
    description: Description,
    /// Whether it is a level of a mipmapped array, which holds the memory.
    part: bool,
}

struct Mipmapped {
    start: u64,
    levels: Vec<Handle>,
}

/// All arrays of the process.
#[derive(Default)]
pub struct Arrays {
    arrays: Registry<Array>,
    mipmapped: Registry<Mipmapped>,
    /// Held while level arrays are added or removed together with their mipmapped array.
    change: Mutex<()>,
}

/// Flags of sparse and deferred arrays, which have no memory at creation.
const UNBACKED: u32 = 0x40 | 0x80;

/// Bits of one element with all its channels; for block-compressed formats, bits per texel.
fn bits(format: u32, channels: u32) -> Result<usize> {
    let single = match format {
        0x01 | 0x08 => 8,
        0x02 | 0x09 | 0x10 => 16,
        0x03 | 0x0a | 0x20 => 32,
        0xb0 => return Ok(12),
        0x91 | 0x92 | 0x97 | 0x98 => return Ok(4),
        0x93..=0x96 | 0x99..=0x9e => return Ok(8),
        0xc0..=0xc5 => 8,
        0xc6..=0xcb => 16,
        _ => return Err(Code::INVALID_VALUE),
    };
    if matches!(channels, 1 | 2 | 4) { Ok(single * channels as usize) } else { Err(Code::INVALID_VALUE) }
}

impl Description {
    fn of(flat: Flat) -> Self {
        Self {
            width: flat.width,
            height: flat.height,
            depth: 0,
            format: flat.format,
            channels: flat.channels,
            flags: 0,
        }
    }

    fn bytes(&self) -> Result<u64> {
        let row =
            self.width.checked_mul(bits(self.format, self.channels)?).ok_or(Code::INVALID_VALUE)?.div_ceil(8);
        let plane = row.checked_mul(self.height.max(1)).ok_or(Code::INVALID_VALUE)?;
        let all = plane.checked_mul(self.depth.max(1)).ok_or(Code::INVALID_VALUE)?;
        if all == 0 { Err(Code::INVALID_VALUE) } else { Ok(all as u64) }
    }

    fn level(&self, level: u32) -> Self {
        let half = |extent: usize| if extent == 0 { 0 } else { (extent >> level).max(1) };
        Self { width: half(self.width), height: half(self.height), depth: half(self.depth), ..*self }
    }
}

impl Array {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        bits(self.description.format, self.description.channels)
            .map_or(0, |bits| self.description.width * bits / 8)
    }

    /// Rows of one plane.
    pub fn rows(&self) -> usize {
        self.description.height.max(1)
    }
}

impl Arrays {
    /// The array of a handle; INVALID_HANDLE if there is none.
    pub fn get(&self, handle: Handle) -> Result<Arc<Array>> {
        self.arrays.get(handle)
    }

    /// Whether the array gets its memory mapped after creation.
    pub fn is_unbacked(&self, handle: Handle) -> Result<bool> {
        Ok(self.arrays.get(handle)?.description.flags & UNBACKED != 0)
    }

    /// Whether a mipmapped array gets its memory mapped after creation.
    pub fn is_unbacked_mipmapped(&self, handle: Handle) -> Result<bool> {
        let owner = self.mipmapped.get(handle)?;
        owner.levels.first().map_or(Ok(false), |level| self.is_unbacked(*level))
    }
}

fn back(driver: &Driver, description: &Description, bytes: u64) -> Result<u64> {
    if description.flags & UNBACKED != 0 {
        return Ok(0);
    }
    let context = current()?;
    driver.refuse_unsafe_while_capturing()?;
    Ok(driver.allocate(context.ordinal, context.home, Kind::Array, bytes)?.start)
}

/// Refuses an array that exceeds the device's limits.
fn check_bounds(driver: &Driver, description: &Description, is_mipmapped: bool) -> Result {
    let is_bounded = driver.session.state().physics.bounds_arrays.load(Ordering::Relaxed) != 0;
    let extents = [description.width, description.height, description.depth];
    let fits = !is_bounded || bounds::allow(extents, description.flags, is_mipmapped);
    if fits { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

fn create(out: Out<Handle>, description: Description) -> Result {
    out.given()?;
    let driver = driver()?;
    check_bounds(driver, &description, false)?;
    let start = back(driver, &description, description.bytes()?)?;
    out.set(driver.arrays.arrays.add(Array { start, description, part: false }))
}

fn create_mipmapped(out: Out<Handle>, description: Description, levels: u32) -> Result {
    out.given()?;
    let driver = driver()?;
    check_bounds(driver, &description, true)?;
    let longest = description.width.max(description.height).max(description.depth).max(1);
    let most = usize::BITS - longest.leading_zeros();
    let shapes: Vec<Description> = (0..levels.clamp(1, most)).map(|level| description.level(level)).collect();
    let sizes = shapes.iter().map(Description::bytes).collect::<Result<Vec<u64>>>()?;
    let start = back(driver, &description, sizes.iter().sum())?;
    let _one = locked(&driver.arrays.change);
    let mut next = start;
    let mut handles = Vec::new();
    for (description, size) in shapes.into_iter().zip(sizes) {
        handles.push(driver.arrays.arrays.add(Array { start: next, description, part: true }));
        next += if start == 0 { 0 } else { size };
    }
    out.set(driver.arrays.mipmapped.add(Mipmapped { start, levels: handles }))
}

fn free(driver: &Driver, start: u64) -> Result {
    // If the context died, its memory was freed with it.
    if start != 0 && locked(&driver.heap).at(start).is_some() {
        driver.release(start)?;
    }
    Ok(())
}

exports! {
    fn cuArrayCreate_v2(out: Out<Handle>, description: In<Flat>) {
        create(out, Description::of(description.get()?))
    }

    fn cuArray3DCreate_v2(out: Out<Handle>, description: In<Description>) {
        create(out, description.get()?)
    }

    fn cuArrayGetDescriptor_v2(out: Out<Flat>, handle: Handle) {
        let Description { width, height, format, channels, .. } = driver()?.arrays.get(handle)?.description;
        out.set(Flat { width, height, format, channels })
    }

    fn cuArray3DGetDescriptor_v2(out: Out<Description>, handle: Handle) {
        out.set(driver()?.arrays.get(handle)?.description)
    }

    fn cuArrayDestroy(handle: Handle) {
        let driver = driver()?;
        let array = driver.arrays.get(handle)?;
        if array.part {
            return Err(Code::INVALID_HANDLE);
        }
        driver.arrays.arrays.remove(handle)?;
        driver.sparse.forget(driver, handle);
        free(driver, array.start)
    }

    fn cuMipmappedArrayCreate(out: Out<Handle>, description: In<Description>, levels: u32) {
        create_mipmapped(out, description.get()?, levels)
    }

    fn cuMipmappedArrayGetLevel(out: Out<Handle>, handle: Handle, level: u32) {
        let owner = driver()?.arrays.mipmapped.get(handle)?;
        out.set(*owner.levels.get(level as usize).ok_or(Code::INVALID_VALUE)?)
    }

    fn cuMipmappedArrayDestroy(handle: Handle) {
        let driver = driver()?;
        let _one = locked(&driver.arrays.change);
        let owner = driver.arrays.mipmapped.remove(handle)?;
        driver.sparse.forget(driver, handle);
        for &level in &owner.levels {
            let _ = driver.arrays.arrays.remove(level);
        }
        free(driver, owner.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_takes_its_elements_bytes_in_each_dimension() {
        let shape = |width, height, depth, format, channels| Description {
            width,
            height,
            depth,
            format,
            channels,
            flags: 0,
        };
        for (description, want) in [
            (shape(1024, 0, 0, 0x20, 1), Ok(4096)),
            (shape(1024, 1024, 0, 0x20, 4), Ok(16 << 20)),
            (shape(64, 64, 64, 0x01, 1), Ok(1 << 18)),
            (shape(64, 64, 0, 0x91, 4), Ok(2048)),
            (shape(64, 64, 0, 0x20, 3), Err(Code::INVALID_VALUE)),
            (shape(0, 64, 0, 0x20, 1), Err(Code::INVALID_VALUE)),
        ] {
            assert_eq!(description.bytes(), want, "{description:?}");
        }
    }
}
