//! The simulated GPU's own books, read beside the processes that use it: what living processes hold, and whose work kept
//! it busy when. Nothing here comes from gpushare.

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

/// How often is looked: far shorter than for what time a program holds what it has.
const LOOK: Duration = Duration::from_millis(1);

/// Bytes that living processes hold on the first GPU, contexts included.
fn held(reader: &Reader) -> u64 {
    let gpu = &reader.state.gpus()[0];
    let slots = 0..reader.state.used_slots();
    let bytes = slots.map(|slot| (slot, gpu.bytes[slot].load(Ordering::Acquire)));
    bytes.filter(|(slot, bytes)| *bytes > 0 && reader.life(*slot) != Life::Dead).map(|(_, bytes)| bytes).sum()
}

/// Watches how much is held at most.
pub struct Peak {
    over: Arc<AtomicBool>,
    most: Arc<Mutex<u64>>,
    watcher: Option<JoinHandle<()>>,
}

impl Peak {
    /// Begins to watch the first GPU of the node whose state is in `shared`.
    ///
    /// # Errors
    /// When there is no such node.
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
                // A process that takes a dead one's slot is seen with its bytes for a moment: twice must it be there.
                *highest = now.min(before).max(*highest);
                before = now;
            }
        });
        Ok(Self { over, most, watcher: Some(watcher) })
    }

    /// The most that was held until now, in bytes.
    pub fn bytes(&self) -> u64 {
        *self.most.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(watcher) = self.watcher.take() {
            // It ends within a millisecond and holds nothing.
            let _ = watcher.join();
        }
    }
}

/// Length of a bin of a [`Course`], nanoseconds.
pub const BIN: u64 = 10_000_000;
/// A bin is read when it is this old: until then a death could still cut work out of it. Nanoseconds.
const SETTLED: u64 = 200_000_000;

/// How long each container kept the first GPU busy, bin by bin.
pub struct Course {
    /// At the state as a process of the node: only such a one may move the simulated GPU on.
    session: Session,
    /// Ids of the containers.
    containers: Vec<String>,
    /// Container of each process that was seen, by slot and generation.
    owners: HashMap<(u32, u32), Option<usize>>,
    /// End of the last bin read, nanoseconds of the device clock.
    read_until: u64,
    /// Nanoseconds of work by container and bin.
    bins: Vec<Vec<u64>>,
}

impl Course {
    /// Begins now, on the node whose state is in `shared`.
    ///
    /// # Errors
    /// When there is no such node.
    pub fn begin(shared: &Path, containers: Vec<String>) -> Result<Self> {
        let session = Session::open(shared).context("cannot join the node's processes")?;
        let bins = vec![Vec::new(); containers.len()];
        Ok(Self { session, containers, owners: HashMap::new(), read_until: clock::now(), bins })
    }

    /// Reads what has happened; to be called a few times a second, since the simulator forgets.
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

    /// Finds out to which container each new process belongs, as long as it lives.
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

    /// Gives the place among the node's processes back.
    pub fn end(self) {
        self.session.close();
    }

    /// Nanoseconds of work in each bin, from the first in which container `index` worked.
    pub fn since_first_work(&self, index: usize) -> &[u64] {
        let bins = &self.bins[index];
        let first = bins.iter().position(|busy| *busy > 0).unwrap_or(bins.len());
        &bins[first..]
    }
}
