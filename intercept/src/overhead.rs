//! Corrects the charge for contexts by the host's figure. The books charge an upper bound for each process.
//! Near the limit, the library releases the unused part of that charge and withholds any excess.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use gpushare_region::{ComputePolicy, ContextCost, UsageFile};

use crate::book::{Book, Part, sum_of_part};
use crate::sys;

/// Below this fraction of the limit the books alone decide.
const NEAR: u64 = 10;
/// How long a refusal may wait for the host's first figure of a new context, in nanoseconds. The meter checks
/// every 300 milliseconds and trusts a figure at the second check that sees the whole context.
const FIRST_FIGURE: u64 = 2_500_000_000;
/// How long the meter may take to notice a new container, in nanoseconds. After that no allocation of the
/// container waits for it.
const FIRST_NOTICE: u64 = 500_000_000;
/// A meter that has not written for longer than this is not running, in nanoseconds.
const METER_LIVES: u64 = 1_000_000_000;
/// Pause between two checks of the figure, in microseconds.
const PAUSE: u64 = 5_000;

impl Book {
    /// The charge for the contexts of a process on `device`.
    pub fn context_cost(&self, device: usize) -> ContextCost {
        let cost = self.cost_by_host(device);
        // A supervisor charges their actual memory. The charge here is for people who read the books.
        if self.charged(device).is_some() { ContextCost { most: cost.bare, ..cost } } else { cost }
    }

    /// Bytes that a supervisor has charged to the container on `device`; `None` if the books account for its
    /// memory.
    #[inline]
    pub(crate) fn charged(&self, device: usize) -> Option<u64> {
        self.limits.and_then(|file| file.charged(device))
    }

    /// Whether a supervisor outside the container holds its memory.
    pub fn is_supervised(&self, device: usize) -> bool {
        self.charged(device).is_some()
    }

    /// Bytes of managed memory that the container has on `device`.
    pub fn managed(&self, device: usize) -> u64 {
        self.usage.map_or(0, |usage| sum_of_part(usage, device, Part::Managed))
    }

    fn cost_by_host(&self, device: usize) -> ContextCost {
        let line = self.limits.and_then(|file| file.devices.get(device));
        line.map_or(ContextCost::UNKNOWN, gpushare_region::LimitLine::context_cost)
    }

    /// Whether the books may decide alone on a sum of `bytes` on `device`.
    #[inline]
    pub(crate) fn is_far_from(&self, limit: u64, device: usize, bytes: u64) -> bool {
        let line = self.limits.and_then(|file| file.devices.get(device));
        bytes <= limit - limit / NEAR
            && self.charged(device).is_none()
            && line.is_some_and(|line| !line.is_beyond_cost())
    }

    /// The limit of `device` in bytes, raised by memory that contexts are charged for but do not use, or
    /// lowered by memory that they use uncharged.
    pub(crate) fn limit_by_figure(&self, usage: &UsageFile, device: usize) -> u64 {
        let Some(file) = self.limits else { return 0 };
        if let Some(charged) = file.charged(device) {
            // The books' sum is in both terms and cancels out, which leaves the limit minus the charge and
            // minus managed memory, which no supervisor knows of.
            let others = charged.saturating_add(self.managed(device));
            return file.memory(device).saturating_add(self.used(device)).saturating_sub(others);
        }
        let overhead = file.devices.get(device).and_then(|line| line.overhead(sys::now));
        let Some(overhead) = overhead else { return self.limit(device) };
        let charged = sum_of_part(usage, device, Part::Contexts);
        // The figure already includes memory that the books lack. Withholding it again would count it twice.
        file.memory(device).saturating_add(charged).saturating_sub(overhead.of(charged))
    }

    /// The memory that the container uses on `device`, in bytes, including actual context memory and memory
    /// that its books lack.
    pub(crate) fn used_by_figure(&self, usage: &UsageFile, device: usize) -> u64 {
        let limit = self.limits.map_or(0, |file| file.memory(device));
        let (used, by_figure) = (self.used(device), self.limit_by_figure(usage, device));
        used.saturating_add(limit.saturating_sub(by_figure)).saturating_sub(by_figure.saturating_sub(limit))
    }

    /// Whether the container holds more of `device` than its limit allows.
    pub fn is_over_limit(&self, device: usize) -> bool {
        self.usage.is_none_or(|usage| self.used(device) > self.limit_by_figure(usage, device))
    }

    /// Bytes of `device` that the container may still reserve.
    pub fn room(&self, device: usize) -> u64 {
        let limit = self.usage.map_or(0, |usage| self.limit_by_figure(usage, device));
        limit.saturating_sub(self.used(device))
    }

    /// How many bytes less the container uses on `device` than its books say, by the host's figure; 0 without
    /// one.
    pub fn uncharged(&self, device: usize) -> u64 {
        let (Some(file), Some(usage)) = (self.limits, self.usage) else { return 0 };
        if let Some(charged) = file.charged(device) {
            return self.used(device).saturating_sub(self.managed(device)).saturating_sub(charged);
        }
        let overhead = file.devices.get(device).and_then(|line| line.overhead(sys::now));
        let charged = sum_of_part(usage, device, Part::Contexts);
        overhead.map_or(0, |overhead| charged.saturating_sub(overhead.of(charged)))
    }

    /// Waits for the host's first figure of new contexts if `bytes` could then fit. True: there is a figure
    /// now. It waits once for each change of the contexts, so that a program which probes for memory does not
    /// wait at each refusal.
    #[cold]
    pub fn wait_for_figure(&self, device: usize, bytes: u64) -> bool {
        let (Some(file), Some(usage)) = (self.limits, self.usage) else { return false };
        let (Some(line), Some(measured)) = (file.devices.get(device), file.measured.get(device)) else {
            return false;
        };
        if file.charged(device).is_some() {
            return false; // it exists, and is exact
        }
        // The MPS server owns the contexts, so the host has no figure for them.
        if line.policy.load(Relaxed) == ComputePolicy::Mps.number() {
            return false;
        }
        let charged = sum_of_part(usage, device, Part::Contexts);
        let waited = self.waited_for.get(device).map_or(charged, |waited| waited.swap(charged, SeqCst));
        let ContextCost { bare, most } = line.context_cost();
        let least = self.used(device).saturating_sub(charged / most.max(1) * (most - bare));
        if charged == waited || least.saturating_add(bytes) > file.memory(device) {
            return false;
        }
        let begin = sys::now();
        loop {
            let now = sys::now();
            if line.overhead(|| now).is_some() {
                return true;
            }
            let waited = now.saturating_sub(begin);
            let meter_lives = match measured.written.load(Relaxed) {
                // It has not noticed the container yet, or is not running.
                0 => now.saturating_sub(first_wait(usage, begin)) < FIRST_NOTICE,
                written => now.saturating_sub(written) < METER_LIVES,
            };
            if !meter_lives || waited >= FIRST_FIGURE {
                return false;
            }
            sys::sleep(PAUSE);
        }
    }
}

/// When an allocation of the container first waited for the meter: `now` if none has waited before.
fn first_wait(usage: &UsageFile, now: u64) -> u64 {
    match usage.header.first_wait.compare_exchange(0, now, Relaxed, Relaxed) {
        Ok(_) => now,
        Err(before) => before,
    }
}
