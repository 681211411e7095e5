//! Memory of graphs. An allocation node's address is fixed when the node is made; the GPU is charged when the
//! node runs.
//!
//! Charged memory stays reserved for later launches until it is trimmed or the process ends.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use gpushare_simulator::memory::{LARGE, rounded};

use crate::abi::{Code, In, Out, Result};
use crate::driver::{Driver, driver, locked};
use crate::heap::Kind;

#[derive(Clone, Copy, Default)]
struct Books {
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
}

#[derive(Default)]
struct State {
    books: HashMap<i32, Books>,
    taken: HashSet<u64>,
}

/// All graph memory of the process, by GPU.
#[derive(Default)]
pub struct GraphMemory {
    state: Mutex<State>,
}

impl GraphMemory {
    /// Finds addresses for an allocation node, without charging the GPU.
    pub fn place(&self, driver: &Driver, ordinal: i32, length: u64) -> Result<u64> {
        rounded(length).ok_or(Code::OUT_OF_MEMORY)?;
        Ok(driver.allocate(ordinal, 0, Kind::Graph, length)?.start)
    }

    /// Takes the memory of an allocation node. Taking it again before it is freed is an error.
    pub fn take(&self, driver: &Driver, start: u64) -> Result {
        let found = *locked(&driver.heap).at(start).ok_or(Code::INVALID_VALUE)?;
        let mut state = locked(&self.state);
        if state.taken.contains(&start) {
            return Err(Code::INVALID_VALUE);
        }
        let books = state.books.entry(found.ordinal).or_default();
        let used = books.used + found.extent;
        if used > books.reserved {
            let missing = (used - books.reserved).next_multiple_of(LARGE);
            if !driver.take(found.ordinal, missing)? {
                return Err(Code::OUT_OF_MEMORY);
            }
            books.reserved += missing;
            books.reserved_high = books.reserved_high.max(books.reserved);
        }
        books.used = used;
        books.used_high = books.used_high.max(used);
        state.taken.insert(start);
        Ok(())
    }

    /// Frees the memory of an allocation node.
    pub fn give(&self, driver: &Driver, start: u64) -> Result {
        let found = *locked(&driver.heap).at(start).ok_or(Code::INVALID_VALUE)?;
        let mut state = locked(&self.state);
        if !state.taken.remove(&start) {
            return Err(Code::INVALID_VALUE);
        }
        let books = state.books.entry(found.ordinal).or_default();
        books.used = books.used.saturating_sub(found.extent);
        Ok(())
    }

    /// Releases to the GPU the reserved memory that no allocation uses.
    pub fn trim(&self, driver: &Driver, ordinal: i32) -> Result {
        let mut state = locked(&self.state);
        let books = state.books.entry(ordinal).or_default();
        let spare = books.reserved - books.used.next_multiple_of(LARGE).min(books.reserved);
        books.reserved -= spare;
        driver.give(ordinal, spare)?;
        Ok(())
    }

    /// Frees and releases everything on a GPU that no longer has a context.
    pub fn forget(&self, driver: &Driver, ordinal: i32) {
        let held = locked(&driver.heap).select(|found| found.kind == Kind::Graph && found.ordinal == ordinal);
        for allocation in &held {
            let _ = self.give(driver, allocation.start);
        }
        let _ = self.trim(driver, ordinal);
    }
}

exports! {
    fn cuDeviceGraphMemTrim(ordinal: i32) {
        let driver = driver()?;
        driver.gpu(ordinal)?;
        driver.graph_memory.trim(driver, ordinal)
    }

    fn cuDeviceGetGraphMemAttribute(ordinal: i32, number: u32, out: Out<u64>) {
        let driver = driver()?;
        driver.gpu(ordinal)?;
        let books = locked(&driver.graph_memory.state).books.get(&ordinal).copied().unwrap_or_default();
        out.set(match number {
            0 => books.used,
            1 => books.used_high,
            2 => books.reserved,
            3 => books.reserved_high,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    /// Only the two high-water marks can be set, and only to 0.
    fn cuDeviceSetGraphMemAttribute(ordinal: i32, number: u32, value: In<u64>) {
        let driver = driver()?;
        driver.gpu(ordinal)?;
        if !matches!(number, 1 | 3) || value.get()? != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = locked(&driver.graph_memory.state);
        let books = state.books.entry(ordinal).or_default();
        if number == 1 {
            books.used_high = books.used;
        } else {
            books.reserved_high = books.reserved;
        }
        Ok(())
    }
}
