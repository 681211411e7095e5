//! Limits of a context: the stack of each thread, the buffer of printf, and the heap of malloc in kernels.
//!
//! The driver's own values are part of a context's cost. A higher value takes memory of the GPU from the call
//! until the context ends: heap and buffer their bytes, the stack its bytes for every thread that the GPU can
//! hold.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use gpushare_simulator::memory::LARGE;
use gpushare_simulator::state::Gpu;

use crate::abi::{Code, Out, Result};
use crate::context::{Context, current};
use crate::driver::{Driver, driver, locked};

/// Limits of a context that were set, by CUDA's numbers.
pub type Limits = HashMap<u32, usize>;

const STACK: u32 = 0;
const PRINTF: u32 = 1;
const HEAP: u32 = 2;
const COUNT: u32 = 8;
/// Largest stack of a thread in bytes: every GPU allows at most this much local memory.
const MOST_STACK: usize = 512 << 10;
/// Threads that a multiprocessor holds at one time.
const THREADS_PER_CORE: u64 = 2048;

fn default(limit: u32) -> usize {
    match limit {
        STACK => 1024,
        PRINTF | HEAP => 8 << 20,
        3 => 2,
        4 => 2048,
        5 => 128,
        _ => 0,
    }
}

/// Bytes of `gpu` that a limit costs beyond the driver's own value, rounded up to pages.
fn cost(gpu: &Gpu, limit: u32, value: usize) -> u64 {
    let above = value.saturating_sub(default(limit)) as u64;
    let bytes = match limit {
        STACK => {
            let threads = u64::from(gpu.cores.load(Ordering::Relaxed)) * THREADS_PER_CORE;
            above.next_multiple_of(16).saturating_mul(threads)
        }
        PRINTF | HEAP => above,
        _ => 0,
    };
    bytes.checked_next_multiple_of(LARGE).unwrap_or(u64::MAX)
}

fn set(context: &Context, limit: u32, value: usize) -> Result {
    let driver = driver()?;
    if limit >= COUNT || (limit == STACK && value > MOST_STACK) {
        return Err(Code::INVALID_VALUE);
    }
    let gpu = driver.gpu(context.ordinal)?;
    let mut limits = locked(&context.limits);
    let before = cost(gpu, limit, limits.get(&limit).copied().unwrap_or(default(limit)));
    let after = cost(gpu, limit, value);
    if after > before && !driver.take(context.ordinal, after - before)? {
        return Err(Code::OUT_OF_MEMORY);
    }
    driver.give(context.ordinal, before.saturating_sub(after))?;
    limits.insert(limit, value);
    Ok(())
}

impl Driver {
    /// Releases the memory that the limits of a dying context cost.
    pub fn forget_limits(&self, context: &Context) {
        let Ok(gpu) = self.gpu(context.ordinal) else { return };
        let gone = std::mem::take(&mut *locked(&context.limits));
        let gone = gone.into_iter().map(|(limit, value)| cost(gpu, limit, value)).sum();
        self.give_up(context.ordinal, gone);
    }
}

exports! {
    fn cuCtxSetLimit(limit: u32, value: usize) {
        driver()?;
        set(&*current()?, limit, value)
    }

    fn cuCtxGetLimit(out: Out<usize>, limit: u32) {
        driver()?;
        if limit >= COUNT {
            return Err(Code::INVALID_VALUE);
        }
        let context = current()?;
        let value = locked(&context.limits).get(&limit).copied();
        out.set(value.unwrap_or(default(limit)))
    }
}
