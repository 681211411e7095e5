//! Families of the driver's functions that give memory, and how one of them fills a GPU.

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::driver::{Driver, OUT_OF_MEMORY, SUCCESS, done};

/// Bytes of a mebibyte.
pub const MIB: usize = 1 << 20;
/// Bytes of address space for mapped memory: more than any GPU has.
const RANGE: usize = 1 << 40;
/// Bytes of a page of device memory.
const PAGE: usize = 2 * MIB;
/// Bytes of an element of an array: one float.
const ELEMENT: usize = 4;
/// Format and channels of such an element, in one word.
const FLOAT: u64 = 1 << 32 | 0x20;
/// Levels of a mipmapped array.
const LEVELS: u32 = 4;
/// Device attributes with the most columns and rows of flat arrays, plain and mipmapped.
const MOST_FLAT: [u32; 2] = [22, 23];
const MOST_MIPMAPPED: [u32; 2] = [73, 74];
/// Attribute of GPUs that can move managed memory by pages, and so prefetch it.
const CONCURRENT_MANAGED: u32 = 89;

/// Functions that give memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Family {
    /// cuMemAlloc
    Linear,
    /// cuMemAllocPitch
    Pitch,
    /// cuMemAllocManaged
    Managed,
    /// cuMemAllocAsync, from the current pool
    Async,
    /// cuMemAllocFromPoolAsync, from a pool of its own
    Pool,
    /// cuMemCreate, mapped, the handle released
    Virtual,
    /// cuArrayCreate
    Array,
    /// cuMipmappedArrayCreate
    Mipmap,
    /// A graph's allocation node
    Graph,
}

/// What a family of functions needs to allocate.
pub struct Stores<'d> {
    driver: &'d Driver,
    family: Family,
    pool: usize,
    range: u64,
    random: u64,
    /// Most columns and rows of an array.
    most: [usize; 2],
    /// Managed memory is moved to the GPU.
    resident: bool,
}

impl<'d> Stores<'d> {
    /// What `family` needs before its first allocation. `resident` has managed memory moved to the GPU.
    ///
    /// # Errors
    /// When the driver refuses a pool or a range.
    pub fn new(driver: &'d Driver, family: Family, resident: bool) -> Result<Self> {
        let (mut pool, mut range) = (0, 0);
        if family == Family::Pool {
            // Properties of pinned memory of GPU 0.
            let properties = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            done((driver.pool_create)(&mut pool, &properties), "cuMemPoolCreate")?;
        }
        if family == Family::Virtual {
            done((driver.range_reserve)(&mut range, RANGE, 0, 0, 0), "cuMemAddressReserve")?;
        }
        let most = match family {
            Family::Array => bounds(driver, MOST_FLAT)?,
            Family::Mipmap => bounds(driver, MOST_MIPMAPPED)?,
            _ => [0; 2],
        };
        let resident = resident && family == Family::Managed && driver.property(CONCURRENT_MANAGED)? != 0;
        let random = u64::from(std::process::id()) << 20 | 1;
        Ok(Self { driver, family, pool, range, random, most, resident })
    }

    /// Allocates sizes up to `largest` until even the smallest is refused. Returns the bytes that were
    /// granted.
    ///
    /// # Errors
    /// When the driver answers anything but success and out of memory.
    pub fn fill(&mut self, mut largest: usize) -> Result<usize> {
        let mut held = 0;
        while largest >= 512 {
            let bytes = self.some_size(largest);
            match self.allocate(bytes)? {
                Some(granted) => held += granted,
                None => largest /= 2,
            }
        }
        if self.resident {
            done((self.driver.synchronize)(), "cuCtxSynchronize")?;
        }
        Ok(held)
    }

    /// A size between half of `largest` and `largest`, such that no driver rounds it up.
    fn some_size(&mut self, largest: usize) -> usize {
        // Marsaglia's xorshift. Any sequence will do that differs between processes.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let part = usize::try_from(self.random % 1024).unwrap_or(0);
        let bytes = largest / 2 + largest / 2048 * part;
        let unit = if bytes < PAGE { 512 } else { PAGE };
        bytes.max(unit) / unit * unit
    }

    /// Bytes that were granted of about `bytes`; `None` if there is no room.
    fn allocate(&mut self, bytes: usize) -> Result<Option<usize>> {
        let driver = self.driver;
        let (mut pointer, mut handle) = (0, 0);
        let [width, height] = shape(bytes, self.most);
        let [columns, rows] = [width as u64, height as u64];
        let mut size = bytes;
        let status = match self.family {
            Family::Linear => (driver.allocate)(&mut pointer, bytes),
            Family::Pitch => (driver.allocate_pitch)(&mut pointer, &mut handle, 512, (bytes / 512).max(1), 4),
            Family::Managed => return self.manage(bytes),
            Family::Async => (driver.allocate_async)(&mut pointer, bytes, 0),
            Family::Pool => (driver.allocate_from_pool)(&mut pointer, bytes, self.pool, 0),
            Family::Virtual => return self.map(bytes.div_ceil(PAGE) * PAGE),
            Family::Array => {
                size = level_bytes([width, height], 0);
                (driver.array_create)(&mut handle, &[columns, rows, FLOAT])
            }
            Family::Mipmap => {
                let levels = LEVELS.min(levels_of([width, height]));
                size = (0..levels).map(|level| level_bytes([width, height], level)).sum();
                (driver.mipmap_create)(&mut handle, &[columns, rows, 0, FLOAT, 0], levels)
            }
            Family::Graph => return self.launch_allocation(bytes),
        };
        Ok(granted(status)?.then_some(size))
    }

    fn manage(&self, bytes: usize) -> Result<Option<usize>> {
        let mut pointer = 0;
        if !granted((self.driver.allocate_managed)(&mut pointer, bytes, 1))? {
            return Ok(None);
        }
        if self.resident {
            done((self.driver.prefetch)(pointer, bytes, 0, 0), "cuMemPrefetchAsync")?;
        }
        Ok(Some(bytes))
    }

    /// Maps physical memory and releases its handle, so that only the mapping keeps it.
    fn map(&mut self, bytes: usize) -> Result<Option<usize>> {
        let mut handle = 0;
        if !granted((self.driver.physical_create)(&mut handle, bytes, &[1, 1, 0, 0], 0))? {
            return Ok(None);
        }
        done((self.driver.range_map)(self.range, bytes, 0, handle, 0), "cuMemMap")?;
        self.range += bytes as u64;
        done((self.driver.physical_release)(handle), "cuMemRelease")?;
        Ok(Some(bytes))
    }

    /// Launches, once, a graph that allocates and does not free.
    fn launch_allocation(&mut self, bytes: usize) -> Result<Option<usize>> {
        let driver = self.driver;
        let (mut graph, mut node, mut executable) = (0, 0, 0);
        let mut parameters = [0; 16];
        (parameters[0], parameters[1], parameters[13]) = (1, 1, bytes as u64);
        done((driver.graph_create)(&mut graph, 0), "cuGraphCreate")?;
        let added = (driver.graph_add_allocation)(&mut node, graph, 0, 0, &mut parameters);
        if !granted(added)? || !granted((driver.graph_instantiate)(&mut executable, graph, 0))? {
            return Ok(None);
        }
        Ok(granted((driver.graph_launch)(executable, 0))?.then_some(bytes))
    }
}

fn granted(status: i32) -> Result<bool> {
    match status {
        SUCCESS => Ok(true),
        OUT_OF_MEMORY => Ok(false),
        other => bail!("an allocation was answered {other}"),
    }
}

/// Most columns and rows, by the device attributes `numbers`.
fn bounds(driver: &Driver, numbers: [u32; 2]) -> Result<[usize; 2]> {
    let mut most = [0; 2];
    for (most, number) in most.iter_mut().zip(numbers) {
        *most = usize::try_from(driver.property(number)?)?;
    }
    if most.contains(&0) { bail!("the driver reports no bounds of arrays") } else { Ok(most) }
}

/// Columns and rows of an array of `bytes`, about as high as wide and within `most`. It has fewer bytes where
/// these bounds do not let it have all.
fn shape(bytes: usize, most: [usize; 2]) -> [usize; 2] {
    // A row is a power of two from 512 bytes to half a page, so that rows fill a size of whole pages exactly.
    let row = (bytes * ELEMENT).isqrt().next_power_of_two().clamp(512, PAGE / 2);
    let row = if bytes < PAGE { 512 } else { row };
    let width = (row / ELEMENT).min(most[0].max(1));
    [width, (bytes / (width * ELEMENT)).clamp(1, most[1].max(1))]
}

/// Bytes of one level of an array of `extents`.
fn level_bytes(extents: [usize; 2], level: u32) -> usize {
    extents.into_iter().map(|extent| (extent >> level).max(1)).product::<usize>() * ELEMENT
}

/// Levels down to a single element.
fn levels_of(extents: [usize; 2]) -> u32 {
    extents.into_iter().max().unwrap_or(1).max(1).ilog2() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_of_arrays_keep_to_the_bounds_and_to_the_size() {
        let (flat, mipmapped) = ([131_072, 65_536], [32_768, 32_768]);
        for bytes in [512, 1536, PAGE - 512, PAGE, 3 * PAGE, 64 * MIB, 1022 * MIB, 4096 * MIB] {
            for most in [flat, mipmapped] {
                let [width, height] = shape(bytes, most);
                assert!(width <= most[0] && height <= most[1], "{bytes}: {width} x {height}");
                assert_eq!(width * height * ELEMENT, bytes, "{width} x {height} within {most:?}");
            }
        }
        // As much as fits where not all does.
        assert_eq!(shape(64 * MIB, [128, 128]), [128, 128]);
    }

    #[test]
    fn levels_of_a_mipmapped_array_count() {
        assert_eq!(
            (0..4).map(|level| level_bytes([128, 8], level)).collect::<Vec<_>>(),
            [4096, 1024, 256, 64]
        );
        assert_eq!(level_bytes([128, 1], 3), 64);
        assert_eq!([levels_of([1, 1]), levels_of([128, 8]), levels_of([3, 4096])], [1, 8, 13]);
    }
}
