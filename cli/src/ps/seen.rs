//! Figures of a container's use of its share: from the container's own books or its supervisor's, and from
//! the driver as the meter tells them.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use gpushare_inject::{Region, UsageError, supervision};
use gpushare_inventory::DeviceMemory;
use gpushare_quota::{Lease, Running};
use gpushare_region::{MAX_DEVICES, Measurement, Usage};

use super::lends;
use crate::clock::Clock;

/// A measurement older than this, in nanoseconds, is of a meter that has ended.
const STALE: u64 = 3_000_000_000;

/// What can be seen of a container's use of its share.
pub struct Seen {
    /// The container's own books.
    books: Result<Usage, UsageError>,
    /// Bytes that its supervisors have charged, by grant, where they can be read; empty where none holds it.
    charged: Vec<Option<u64>>,
    is_paused: bool,
    throttled: [u64; MAX_DEVICES],
    measured: [Measurement; MAX_DEVICES],
    now: Clock,
}

impl Seen {
    /// Reads what can be seen of `lease`, whose region lies below the folder `state`. `running` tells living
    /// processes from those that ended.
    pub fn of(state: &Path, lease: &Lease, running: &Running) -> Self {
        let region = Region::of(state, lease.id);
        let (charged, is_paused) = by_supervisor(state, lease);
        Self {
            // Host memory has the line after the GPUs'.
            books: region.read_usage(running, lease.grants.len() + usize::from(lends(lease))),
            charged,
            is_paused,
            throttled: region.read_throttled().unwrap_or_default(),
            measured: region.measured().unwrap_or_default(),
            now: Clock::now(),
        }
    }

    /// As [`Seen::of`], with the books' file kept open in `files` from look to look.
    pub fn kept(state: &Path, lease: &Lease, running: &Running, files: &mut HashMap<i64, File>) -> Self {
        let region = Region::of(state, lease.id);
        if !files.contains_key(&lease.id)
            && let Ok(file) = region.open_books()
        {
            files.insert(lease.id, file);
        }
        let Some(file) = files.get(&lease.id) else { return Self::of(state, lease, running) };
        let (charged, is_paused) = by_supervisor(state, lease);
        Self {
            books: Region::usage_in(file, running, lease.grants.len() + usize::from(lends(lease))),
            charged,
            is_paused,
            throttled: Region::throttled_in(file).unwrap_or_default(),
            measured: region.measured().unwrap_or_default(),
            now: Clock::now(),
        }
    }

    /// Memory that the container holds on the GPU of grant `line`: by its supervisors' books where one holds
    /// it, else by the container's own, for its living processes.
    pub fn used(&self, line: usize) -> Option<DeviceMemory> {
        if let Some(charged) = self.charged.get(line) {
            return charged.map(DeviceMemory::from_bytes);
        }
        self.booked(line)
    }

    fn booked(&self, line: usize) -> Option<DeviceMemory> {
        let books = self.books.as_ref().ok()?;
        books.devices.get(line).map(|device| DeviceMemory::from_bytes(device.bytes))
    }

    /// What the container's contexts and the code that was loaded into them take of the GPU of grant `line`,
    /// by the driver's count less what the books say that programs allocated. `None` where no meter runs, the
    /// driver does not report memory by process, or the container keeps no books.
    pub fn contexts(&self, line: usize) -> Option<DeviceMemory> {
        let books = self.books.as_ref().ok()?.devices.get(line)?;
        let counted = self.fresh(line)?.memory_bytes;
        let allocated = books.bytes.saturating_sub(books.context_bytes);
        (counted > 0 && books.context_bytes > 0)
            .then(|| DeviceMemory::from_bytes(counted.saturating_sub(allocated)))
    }

    /// As [`Seen::used`], with what contexts really take where that is known. A supervisor's books have that.
    pub fn used_with_contexts(&self, line: usize) -> Option<DeviceMemory> {
        if line < self.charged.len() {
            return self.used(line);
        }
        let (used, charged) = (self.used(line)?.bytes(), self.contexts_charged(line)?.bytes());
        let contexts = self.contexts(line).map_or(charged, DeviceMemory::bytes);
        Some(DeviceMemory::from_bytes(used.saturating_sub(charged).saturating_add(contexts)))
    }

    /// What the container's books charge for contexts on the GPU of grant `line`.
    pub fn contexts_charged(&self, line: usize) -> Option<DeviceMemory> {
        let books = self.books.as_ref().ok()?;
        books.devices.get(line).map(|device| DeviceMemory::from_bytes(device.context_bytes))
    }

    /// Host memory that the container's living processes hold in place of GPUs', by the container's books.
    pub fn host_used(&self, lease: &Lease) -> Option<DeviceMemory> {
        self.booked(lease.grants.len()).filter(|_| lends(lease))
    }

    /// What the meter says of the GPU of grant `line`; `None` where no meter runs.
    pub fn fresh(&self, line: usize) -> Option<&Measurement> {
        let ago = |written: u64| self.now.monotonic.checked_sub(written);
        self.measured.get(line).filter(|value| ago(value.written).is_some_and(|ago| ago < STALE))
    }

    /// Allocations that the limit refused, by the container's own books.
    pub fn refused(&self) -> u64 {
        self.books.as_ref().map_or(0, |usage| usage.refused)
    }

    /// How long launches were held back on the GPU of grant `line`, in nanoseconds.
    pub fn throttled(&self, line: usize) -> u64 {
        self.throttled.get(line).copied().unwrap_or(0)
    }

    /// GPU time in nanoseconds on the GPU of grant `line`; `None` if it was never measured.
    pub fn gpu_time(&self, line: usize) -> Option<u64> {
        self.measured.get(line).filter(|value| value.until > 0).map(|value| value.own_nanoseconds)
    }

    /// What tells that time; `None` if nothing does.
    pub fn gpu_time_by(&self, line: usize) -> Option<&'static str> {
        let measured = self.measured.get(line).filter(|value| value.until > 0)?;
        Some(if measured.is_by_record { "record" } else { "samples" })
    }

    /// Whether somebody has paused it.
    pub fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Whether the books say what cannot be.
    pub fn is_damaged(&self) -> bool {
        matches!(self.books, Err(UsageError::Damaged(_)))
    }
}

/// Whether somebody has paused the programs of `lease`. `state` is the state folder.
pub fn is_paused(state: &Path, lease: &Lease) -> bool {
    by_supervisor(state, lease).1
}

/// Bytes that the supervisors of `lease` have charged, by grant, and whether its programs are paused.
fn by_supervisor(state: &Path, lease: &Lease) -> (Vec<Option<u64>>, bool) {
    if !lease.enforcement.is_supervised() {
        return (Vec::new(), false);
    }
    let seen = supervision(state, lease.id).ok().flatten();
    let is_paused = seen.as_ref().is_some_and(|seen| seen.is_paused);
    let charged = seen.map_or_else(Vec::new, |seen| seen.charged);
    ((0..lease.grants.len()).map(|line| charged.get(line).copied()).collect(), is_paused)
}
