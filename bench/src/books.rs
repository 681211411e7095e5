//! The simulated GPU's own books, read beside the processes that use it: what living processes hold. Nothing here comes from
//! gpushare.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use gpushare_simulator::session::{Life, Reader};

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
