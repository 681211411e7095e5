//! What the contexts of the container really take. The books charge an upper bound for each, and the host's figure
//! replaces it where a reservation comes near the limit: what the driver has not used is given out, and what it has
//! used beyond the charge is kept back.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use gpushare_region::{ContextCost, UsageFile};

use crate::book::{Book, Part, sum_of_part};
use crate::sys;

/// Below this part of the limit the books alone decide.
const NEAR: u64 = 10;
/// How long a refusal may wait for the host's first figure of a new context, in nanoseconds. The meter looks twice
/// before it believes one, and looks every 300 milliseconds.
const FIRST_FIGURE: u64 = 1_500_000_000;
/// A meter that has not written for longer does not run, in nanoseconds.
const METER_LIVES: u64 = 1_000_000_000;
/// Pause between two looks at the figure, in microseconds.
const PAUSE: u64 = 5_000;

impl Book {
    /// What the contexts of a process on `device` are charged as.
    pub fn context_cost(&self, device: usize) -> ContextCost {
        let line = self.limits.and_then(|file| file.devices.get(device));
        line.map_or(ContextCost::UNKNOWN, gpushare_region::LimitLine::context_cost)
    }

    /// Whether the books may decide alone on a sum of `bytes` on `device`.
    #[inline]
    pub(crate) fn is_far_from(&self, limit: u64, device: usize, bytes: u64) -> bool {
        let line = self.limits.and_then(|file| file.devices.get(device));
        bytes <= limit - limit / NEAR && line.is_some_and(|line| !line.is_beyond_cost())
    }

    /// The limit of `device` in bytes, raised by what contexts are charged and do not take, or lowered by what they
    /// take and are not charged.
    pub(crate) fn limit_by_figure(&self, usage: &UsageFile, device: usize) -> u64 {
        let Some(file) = self.limits else { return 0 };
        let overhead = file.devices.get(device).and_then(|line| line.overhead(sys::now));
        let Some(overhead) = overhead else { return self.limit(device) };
        let charged = sum_of_part(usage, device, Part::Contexts);
        // What the books lack is part of the figure, so it is not withheld a second time.
        file.memory(device).saturating_add(charged).saturating_sub(overhead.of(charged))
    }

    /// Whether the container holds more of `device` than it may.
    pub fn is_over_limit(&self, device: usize) -> bool {
        self.usage.is_none_or(|usage| self.used(device) > self.limit_by_figure(usage, device))
    }

    /// Bytes of `device` that the container may still reserve.
    pub fn room(&self, device: usize) -> u64 {
        let limit = self.usage.map_or(0, |usage| self.limit_by_figure(usage, device));
        limit.saturating_sub(self.used(device))
    }

    /// By how many bytes less the container holds of `device` than its books say, by the host's figure; 0 without one.
    pub fn uncharged(&self, device: usize) -> u64 {
        let (Some(file), Some(usage)) = (self.limits, self.usage) else { return 0 };
        let overhead = file.devices.get(device).and_then(|line| line.overhead(sys::now));
        let charged = sum_of_part(usage, device, Part::Contexts);
        overhead.map_or(0, |overhead| charged.saturating_sub(overhead.of(charged)))
    }

    /// Waits for the host's first figure of contexts that are new, where `bytes` could fit by it. True: there is a
    /// figure now. It waits once for each change of the contexts, so that a program which probes for memory does not
    /// wait at each refusal.
    #[cold]
    pub fn wait_for_figure(&self, device: usize, bytes: u64) -> bool {
        let (Some(file), Some(usage)) = (self.limits, self.usage) else { return false };
        let (Some(line), Some(measured)) = (file.devices.get(device), file.measured.get(device)) else {
            return false;
        };
        let charged = sum_of_part(usage, device, Part::Contexts);
        let waited = self.waited_for.get(device).map_or(charged, |waited| waited.swap(charged, SeqCst));
        let ContextCost { bare, most } = line.context_cost();
        let least = self.used(device).saturating_sub(charged / most.max(1) * (most - bare));
        if charged == waited || least.saturating_add(bytes) > file.memory(device) {
            return false;
        }
        let deadline = sys::now().saturating_add(FIRST_FIGURE);
        loop {
            let now = sys::now();
            if line.overhead(|| now).is_some() {
                return true;
            }
            let meter_lives = now.saturating_sub(measured.written.load(Relaxed)) < METER_LIVES;
            if !meter_lives || now >= deadline {
                return false;
            }
            sys::sleep(PAUSE);
        }
    }
}
