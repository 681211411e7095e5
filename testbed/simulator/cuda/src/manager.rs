//! The resource manager of a simulated node, if it has one: the directory `manager` in the node's shared
//! directory.
//!
//! Memory that the simulated GPU charges to this process is then also allocated from RM, as with the real
//! driver, and RM may refuse it. RM charges at least 64 KiB, so small amounts are combined in larger pieces.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use gpushare_manager_calls::{Client, DEVICE};
use gpushare_simulator::state::State;
use gpushare_supervisor::abi::{Class, Era, channels, slice};

use crate::abi::{Code, Result};
use crate::driver::{Driver, locked};

/// Amounts that are not a multiple of this, in bytes, come from pieces of [`PIECE`].
const UNIT: u64 = 64 << 10;
/// Size of a shared piece in bytes.
const PIECE: u64 = 2 << 20;
/// Number of allocations into which the memory of a context is divided.
const OF_A_CONTEXT: u64 = 120;

/// RM, as this process sees it.
pub struct Manager {
    folder: PathBuf,
    era: &'static Era,
    /// Indexed like the GPUs in the node's state.
    on: Vec<Mutex<Option<OnGpu>>>,
}

/// This process's objects on one GPU.
struct OnGpu {
    client: Client,
    /// Handles of its memory, by size in bytes.
    held: BTreeMap<u64, Vec<u32>>,
    /// Total bytes of small amounts.
    small: u64,
    /// The address space and the channel group of its contexts; the group's channel goes with it.
    space: Option<[u32; 2]>,
}

impl Manager {
    /// Returns the manager of the node with the shared directory `shared`; `None` if it has none.
    pub fn beside(shared: &Path, state: &State) -> Option<Self> {
        let folder = shared.join("manager");
        let era = state.driver.get().parse().ok().and_then(Era::for_version)?;
        let on = state.gpus().iter().map(|_| Mutex::new(None)).collect();
        folder.join("nvidiactl").exists().then_some(Self { folder, era, on })
    }

    fn with<T>(&self, gpu: usize, what: impl FnOnce(&mut OnGpu) -> Option<T>) -> Option<T> {
        let mut on = locked(self.on.get(gpu)?);
        if on.is_none() {
            let client = Client::open_on(&self.folder, self.era, u32::try_from(gpu).ok()?).ok()?;
            *on = Some(OnGpu { client, held: BTreeMap::new(), small: 0, space: None });
        }
        what(on.as_mut()?)
    }
}

impl OnGpu {
    /// Takes all of it or nothing.
    fn take(&mut self, bytes: u64, parts: u64) -> Option<()> {
        let (whole, small) = (bytes - bytes % UNIT, bytes % UNIT);
        let part = (whole / parts).next_multiple_of(UNIT);
        let mut taken = 0;
        let mut fits = true;
        while fits && taken < whole {
            let next = part.min(whole - taken);
            fits = self.add(next).is_some();
            taken += if fits { next } else { 0 };
        }
        let before = self.small;
        self.small += small;
        if fits && self.small.div_ceil(PIECE) > before.div_ceil(PIECE) {
            fits = self.add(PIECE).is_some();
        }
        if !fits {
            self.small = before;
            self.remove(taken);
        }
        fits.then_some(())
    }

    fn give(&mut self, bytes: u64) {
        let before = self.small.div_ceil(PIECE);
        let small = bytes % UNIT;
        // An amount that was taken in parts may be released in others.
        let borrows = small > self.small;
        self.small = if borrows { self.small + UNIT - small } else { self.small - small };
        let whole = bytes - small + if borrows { UNIT } else { 0 };
        let after = self.small.div_ceil(PIECE);
        self.remove(whole + before.saturating_sub(after) * PIECE);
        if after > before {
            let _ = self.add(PIECE);
        }
    }

    fn add(&mut self, bytes: u64) -> Option<()> {
        let handle = self.client.memory(bytes, 0).ok()?;
        self.held.entry(bytes).or_default().push(handle);
        Some(())
    }

    /// Frees this many bytes, in one piece if there is one of this size.
    fn remove(&mut self, mut bytes: u64) {
        while bytes > 0 {
            let exact = self.held.contains_key(&bytes).then_some(bytes);
            let smaller = || self.held.range(..bytes).next_back().map(|(size, _)| *size);
            let larger = || self.held.range(bytes..).next().map(|(size, _)| *size);
            let Some(size) = exact.or_else(smaller).or_else(larger) else { return };
            let Some(handle) = self.pop(size) else { return };
            let _ = self.client.free(self.client.handle, handle);
            if size > bytes {
                let _ = self.add(size - bytes);
            }
            bytes = bytes.saturating_sub(size);
        }
    }

    fn pop(&mut self, size: u64) -> Option<u32> {
        let handles = self.held.get_mut(&size)?;
        let handle = handles.pop();
        if handles.is_empty() {
            self.held.remove(&size);
        }
        handle
    }

    /// Makes an address space and a channel group.
    fn open_context(&mut self, bytes: u64, era: &Era) -> Option<()> {
        if self.space.is_none() {
            let own = self.client.handle;
            let mut space = vec![0; era.address_space];
            let space = self.client.allocate(Class(0x90f1), [own, DEVICE, 0], &mut space).ok()?;
            let group = self.client.allocate(Class(0xa06c), [own, DEVICE, 0], &mut [0; 20]);
            let made = group.ok().filter(|group| {
                let is_begun = self.begin(*group, era).is_some();
                if !is_begun {
                    let _ = self.client.free(own, *group);
                }
                is_begun
            });
            let Some(group) = made else {
                let _ = self.client.free(own, space);
                return None;
            };
            self.space = Some([space, group]);
        }
        let taken = self.take(bytes, OF_A_CONTEXT);
        if taken.is_none() {
            self.close_contexts();
        }
        taken
    }

    /// Makes the channel of a group and runs it, in turns of the length that the driver's library requests.
    fn begin(&self, group: u32, era: &Era) -> Option<()> {
        const CHANNEL: Class = Class(0xc86f);
        const MICROSECONDS: u64 = 2_048;
        let place = [self.client.handle, group, 0];
        let _channel = self.client.allocate(CHANNEL, place, &mut vec![0; era.channel]).ok()?;
        self.client.control(group, slice::COMMAND, &mut MICROSECONDS.to_ne_bytes()).ok()?;
        self.client.control(group, channels::SCHEDULE[0], &mut [1, 0, 0]).ok()
    }

    fn close_contexts(&mut self) {
        for handle in self.space.take().into_iter().flatten() {
            let _ = self.client.free(self.client.handle, handle);
        }
    }
}

impl Driver {
    fn index(&self, ordinal: i32) -> Result<usize> {
        let index = usize::try_from(ordinal).ok().and_then(|ordinal| self.devices.get(ordinal));
        index.copied().ok_or(Code::INVALID_DEVICE)
    }

    /// Takes memory of a GPU for this process; false if there is not enough.
    pub fn take(&self, ordinal: i32, bytes: u64) -> Result<bool> {
        self.take_by(ordinal, bytes, |on, _| on.take(bytes, 1))
    }

    /// Like [`Driver::take`], for the first context on a GPU.
    pub fn take_for_context(&self, ordinal: i32, bytes: u64) -> Result<bool> {
        self.take_by(ordinal, bytes, |on, era| on.open_context(bytes, era))
    }

    fn take_by(
        &self,
        ordinal: i32,
        bytes: u64,
        from: impl FnOnce(&mut OnGpu, &Era) -> Option<()>,
    ) -> Result<bool> {
        let (gpu, index) = (self.gpu(ordinal)?, self.index(ordinal)?);
        if !gpu.take(&self.session, bytes) {
            return Ok(false);
        }
        let Some(manager) = self.manager.as_ref().filter(|_| bytes > 0) else { return Ok(true) };
        let taken = manager.with(index, |on| from(on, manager.era)).is_some();
        if !taken {
            gpu.give(&self.session, bytes);
        }
        Ok(taken)
    }

    /// Takes memory of a GPU for the pages of managed memory, which the resource manager does not know.
    /// Returns whether there is enough.
    pub fn take_pages(&self, ordinal: i32, bytes: u64) -> Result<bool> {
        Ok(self.gpu(ordinal)?.take(&self.session, bytes))
    }

    /// Releases such memory.
    pub fn give_pages(&self, ordinal: i32, bytes: u64) -> Result {
        self.gpu(ordinal)?.give(&self.session, bytes);
        Ok(())
    }

    /// Releases memory of a GPU.
    pub fn give(&self, ordinal: i32, bytes: u64) -> Result {
        let (gpu, index) = (self.gpu(ordinal)?, self.index(ordinal)?);
        if let Some(manager) = self.manager.as_ref().filter(|_| bytes > 0) {
            let _ = manager.with(index, |on| {
                on.give(bytes);
                Some(())
            });
        }
        gpu.give(&self.session, bytes);
        Ok(())
    }

    /// Like [`Driver::give`], for callers that cannot handle an error.
    pub fn give_up(&self, ordinal: i32, bytes: u64) {
        let _ = self.give(ordinal, bytes);
    }

    /// Releases the memory of the last context on a GPU.
    pub fn give_contexts(&self, ordinal: i32, bytes: u64) -> Result {
        if let Some(manager) = &self.manager {
            let _ = manager.with(self.index(ordinal)?, |on| {
                on.close_contexts();
                Some(())
            });
        }
        self.give(ordinal, bytes)
    }
}
