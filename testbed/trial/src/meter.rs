//! The host's meter as the containers see it: it measures each process in whole percents per window, and
//! reports late.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use gpushare_region::Measured;
use gpushare_simulator::virtual_gpu::VirtualGpu;

use crate::time::MILLISECOND;

/// How the driver rounds to whole percents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Down. The meter adds a quarter of a point to every sample.
    Down,
    /// To the nearest whole percent.
    Nearest,
}

/// A meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meter {
    /// Length of a window in nanoseconds.
    pub window: u64,
    /// How much later than the next look a window is reported, in nanoseconds.
    pub delay: u64,
    /// How percents are rounded.
    pub rounding: Rounding,
}

impl Default for Meter {
    fn default() -> Self {
        Self { window: 1_000 * MILLISECOND / 6, delay: 0, rounding: Rounding::Down }
    }
}

/// Nanoseconds between two looks of the meter.
pub(crate) const LOOK: u64 = 25 * MILLISECOND;

/// What the meter has counted.
#[derive(Debug)]
pub(crate) struct Counts {
    meter: Meter,
    /// The container of each process.
    owners: Vec<usize>,
    /// Busy time of each process at the end of the last window.
    busy: Vec<u64>,
    /// Windows that were not reported yet: their end, and each container's GPU time up to then.
    untold: Vec<(u64, Vec<u64>)>,
    used: Vec<u64>,
    pub(crate) next_window: u64,
}

impl Counts {
    pub(crate) fn new(meter: Meter, owners: Vec<usize>, containers: usize, phase: u64) -> Self {
        let busy = vec![0; owners.len()];
        let next_window = meter.window - phase % meter.window;
        Self { meter, owners, busy, untold: Vec::new(), used: vec![0; containers], next_window }
    }

    /// Ends a window at `now`.
    pub(crate) fn end_window(&mut self, gpu: &VirtualGpu, now: u64) {
        for (process, owner) in self.owners.iter().enumerate() {
            let busy = gpu.busy(process);
            let used = busy - self.busy[process];
            self.busy[process] = busy;
            // In hundredths of a percent: the whole percents, and the quarter that makes up for rounding
            // down.
            let percent = match self.meter.rounding {
                Rounding::Down if used > 0 => used * 100 / self.meter.window * 100 + 25,
                Rounding::Down => 0,
                Rounding::Nearest => (used * 200 / self.meter.window).div_ceil(2) * 100,
            };
            // No sample says 0 %, and the meter does not know a process without a sample.
            let percent = if percent < 100 { 0 } else { percent };
            self.used[*owner] += percent * self.meter.window / 10_000;
        }
        self.untold.push((now, self.used.clone()));
        self.next_window = now + self.meter.window;
    }

    /// Reports to each container what is due at `now`. `burst` is what each may use, in hundredths of a
    /// percent.
    pub(crate) fn tell(&mut self, lines: &[&Measured], now: u64, burst: &[u32]) {
        let due = self.untold.iter().take_while(|(end, _)| end + self.meter.delay <= now).count();
        let told = self.untold.drain(..due).next_back();
        for (container, line) in lines.iter().enumerate() {
            line.sequence.fetch_add(1, SeqCst);
            if let Some((until, used)) = &told {
                let own = used[container];
                line.until.store(*until, Relaxed);
                line.own_nanoseconds.store(own, Relaxed);
                // Any number serves that changes when others use the GPU.
                line.others_windows.store(used.iter().sum::<u64>() - own, Relaxed);
            }
            line.burst_share.store(burst[container], Relaxed);
            line.written.store(now, Relaxed);
            line.sequence.fetch_add(1, SeqCst);
        }
    }
}
