//! Reads the simulated GPU's own books while processes use it: the memory that living processes hold, and
//! when each container's work kept the GPU busy. None of this comes from gpushare.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use gpushare_simulator::session::{Life, Reader, Session};
use gpushare_simulator::{clock, timeline};

/// Polling interval: far shorter than the time for which a program holds its memory.
const LOOK: Duration = Duration::from_millis(1);

/// Returns the bytes that living processes hold on the first GPU, contexts included.
fn held(reader: &Reader) -> u64 {
    let gpu = &reader.state.gpus()[0];
    let slots = 0..reader.state.used_slots();
    let bytes = slots.map(|slot| (slot, gpu.bytes[slot].load(Ordering::Acquire)));
    bytes.filter(|(slot, bytes)| *bytes > 0 && reader.life(*slot) != Life::Dead).map(|(_, bytes)| bytes).sum()
}

/// Watches the first GPU's memory and keeps the highest sum that living processes held.
pub struct Peak {
    over: Arc<AtomicBool>,
    most: Arc<Mutex<u64>>,
    watcher: Option<JoinHandle<()>>,
}

impl Peak {
    /// Starts to watch the first GPU of the node whose state is in `shared`.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn watch(shared: &Path) -> Result<Self> {
        let reader = Reader::open(shared).context("cannot read the node's state")?;
        let (over, most) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(0)));
        let (ended, highest) = (Arc::clone(&over), Arc::clone(&most));
        let watcher = std::thread::spawn(move || {
            let mut before = held(reader);
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK);
                let now = held(reader);
                let mut highest = highest.lock().unwrap_or_else(PoisonError::into_inner);
                // When a process takes a dead one's slot, the slot shows the dead one's bytes for a moment,
                // so only a value seen twice counts.
                *highest = now.min(before).max(*highest);
                before = now;
            }
        });
        Ok(Self { over, most, watcher: Some(watcher) })
    }

    /// Returns the highest number of bytes held so far.
    pub fn bytes(&self) -> u64 {
        *self.most.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(watcher) = self.watcher.take() {
            // The thread ends within a millisecond and holds nothing.
            let _ = watcher.join();
        }
    }
}

/// Length of a bin of a [`Course`], nanoseconds.
pub const BIN: u64 = 10_000_000;
/// Age at which a bin is read, nanoseconds. Before that, a death could still cut work out of it.
const SETTLED: u64 = 200_000_000;

/// How long each container kept the first GPU busy, bin by bin.
pub struct Course {
    /// Our own slot in the state: only a process with a slot may advance the simulated GPU.
    session: Session,
    /// Ids of the containers, which processes' cgroups contain.
    containers: Vec<String>,
    /// Container of each process, by slot and generation; `None` for a process outside of the containers.
    owners: HashMap<(u32, u32), Option<usize>>,
    /// End of the last bin that was read, in nanoseconds of the device clock.
    read_until: u64,
    /// Nanoseconds of work by container and bin.
    bins: Vec<Vec<u64>>,
}

impl Course {
    /// Starts now, on the node whose state is in `shared`.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn begin(shared: &Path, containers: Vec<String>) -> Result<Self> {
        let session = Session::open(shared).context("cannot join the node's processes")?;
        let bins = vec![Vec::new(); containers.len()];
        Ok(Self { session, containers, owners: HashMap::new(), read_until: clock::now(), bins })
    }

    /// Reads the bins that have settled. Call it a few times a second, because the simulator forgets runs.
    pub fn follow(&mut self) {
        self.meet();
        while self.read_until + BIN + SETTLED < clock::now() {
            let until = self.read_until + BIN;
            self.bins.iter_mut().for_each(|bins| bins.push(0));
            let gpu = &self.session.state().gpus()[0];
            for busy in timeline::busy(gpu, &self.session, self.read_until, until) {
                let owner = self.owners.get(&(busy.owner.slot, busy.owner.generation)).copied().flatten();
                let last = owner.and_then(|owner| self.bins[owner].last_mut());
                last.into_iter().for_each(|bin| *bin += busy.time);
            }
            self.read_until = until;
        }
    }

    /// Finds the container of each new process while the process lives.
    fn meet(&mut self) {
        for slot in 0..self.session.state().used_slots() {
            let generation = self.session.state().slots[slot].generation.load(Ordering::Acquire);
            let Ok(number) = u32::try_from(slot) else { continue };
            if self.owners.contains_key(&(number, generation)) {
                continue;
            }
            if let Life::Alive(Some(pid)) = self.session.reader.life(slot) {
                let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
                let owner = self.containers.iter().position(|id| cgroup.contains(id.as_str()));
                self.owners.insert((number, generation), owner);
            }
        }
    }

    /// Releases the slot.
    pub fn end(self) {
        self.session.close();
    }

    /// Returns the nanoseconds of work in each bin, from the first bin in which container `index` worked.
    pub fn since_first_work(&self, index: usize) -> &[u64] {
        let bins = &self.bins[index];
        let first = bins.iter().position(|busy| *busy > 0).unwrap_or(bins.len());
        &bins[first..]
    }
}
