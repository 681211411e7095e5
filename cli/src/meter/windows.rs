//! Turns NVML's samples of per-process utilisation into GPU time: none is lost, none is counted twice.
//!
//! A sample says that a process used a whole number of percents of a window that ended at its stamp. An idle
//! process has no sample. So a window begins at the process's last stamp if that is near, else one sampling
//! period before its end.

use std::collections::{HashMap, VecDeque};

/// Sampling period where the driver tells none, in microseconds.
pub const PERIOD: u64 = 1_000_000 / 6;
/// Periods outside these bounds are not believed; in microseconds.
const PERIODS: std::ops::RangeInclusive<u64> = 20_000..=1_200_000;
/// For how many periods stamps are asked for again, since stamps of different processes need not come in
/// order.
const OVERLAP: u64 = 2;

/// How many gaps between windows the period is learned from.
const GAPS: usize = 8;

/// One process in one window, as NVML reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Host pid.
    pub pid: u32,
    /// End of the window, microseconds since 1970.
    pub stamp: u64,
    /// Whole percents of the window in which the process had work on the GPU.
    pub percent: u32,
}

/// GPU time that a process used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spent {
    /// Host pid.
    pub pid: u32,
    /// GPU time in nanoseconds.
    pub nanoseconds: u64,
}

/// Which samples of one GPU were counted.
#[derive(Clone, Debug)]
pub struct Windows {
    begin: u64,
    newest: u64,
    period: u64,
    /// The period that the driver told, in microseconds.
    told: u64,
    /// The last gaps between two windows of one process, in microseconds.
    gaps: VecDeque<u64>,
    last: HashMap<u32, u64>,
}

impl Windows {
    /// Counts windows that end after `begin`, in microseconds since 1970.
    pub fn since(begin: u64, period: u64) -> Self {
        let period = if PERIODS.contains(&period) { period } else { PERIOD };
        Self { begin, newest: begin, period, told: period, gaps: VecDeque::new(), last: HashMap::new() }
    }

    /// Takes note that all until this stamp is counted, in another way.
    pub fn reach(&mut self, stamp: u64) {
        self.newest = self.newest.max(stamp);
        self.begin = self.begin.max(stamp);
        self.last.clear();
    }

    /// The stamp to ask NVML from, in microseconds since 1970.
    pub fn ask_from(&self) -> u64 {
        self.newest.saturating_sub(OVERLAP * self.period).max(self.begin)
    }

    /// The newest stamp that was counted, in microseconds since 1970.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// The sampling period in microseconds.
    pub fn period(&self) -> u64 {
        self.period
    }

    /// The GPU time in those of `samples` that were not counted before.
    pub fn count(&mut self, mut samples: Vec<Sample>) -> Vec<Spent> {
        // Some drivers hand out entries that were never filled in.
        samples.retain(|sample| sample.stamp > self.begin && (1..=100).contains(&sample.percent));
        samples.sort_by_key(|sample| sample.stamp);
        let spent = samples.iter().filter_map(|sample| self.count_one(sample)).collect();
        let forgotten = self.newest.saturating_sub(2 * OVERLAP * self.period);
        self.last.retain(|_, stamp| *stamp >= forgotten);
        spent
    }

    fn count_one(&mut self, sample: &Sample) -> Option<Spent> {
        let last = self.last.get(&sample.pid).copied();
        let since = sample.stamp.checked_sub(last.unwrap_or(self.begin)).filter(|since| *since > 0)?;
        // The period is learned from the first process with a new window.
        if last.is_some() && PERIODS.contains(&since) && sample.stamp >= self.newest + PERIODS.start() {
            self.learn(since);
        }
        let width = if since <= self.period * 3 / 2 { since } else { self.period };
        self.last.insert(sample.pid, sample.stamp);
        self.newest = self.newest.max(sample.stamp);
        // Percents seem to be rounded down. A quarter of a point more is the middle between rounding down and
        // to nearest, and close enough for both. Percent × microseconds × 10 are nanoseconds.
        let nanoseconds = (u64::from(sample.percent) * 100 + 25) * width / 10;
        Some(Spent { pid: sample.pid, nanoseconds })
    }

    /// Takes the second shortest of the last gaps as the period. One stamp that came late makes one short
    /// gap, and a process that was idle makes long ones.
    fn learn(&mut self, gap: u64) {
        if self.gaps.len() == GAPS {
            self.gaps.pop_front();
        }
        self.gaps.push_back(gap);
        let mut gaps: Vec<u64> = self.gaps.iter().copied().collect();
        gaps.sort_unstable();
        self.period = gaps.get(1).map_or(self.told, |gap| self.told.min(*gap));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1_700_000_000_000_000;

    fn sample(pid: u32, window: u64, percent: u32) -> Sample {
        Sample { pid, stamp: START + window * PERIOD, percent }
    }

    fn total(spent: &[Spent], pid: u32) -> u64 {
        spent.iter().filter(|spent| spent.pid == pid).map(|spent| spent.nanoseconds).sum()
    }

    /// GPU time of `windows` windows of `percent`, with the rounding that is added.
    fn time(windows: u64, percent: u64) -> u64 {
        windows * (percent * 100 + 25) * PERIOD / 10
    }

    #[test]
    fn each_window_counts_once_however_often_it_is_told() {
        let mut windows = Windows::since(START, PERIOD);
        let mut spent = Vec::new();
        for newest in 1..=60_u64 {
            for _poll in 0..3 {
                // As NVML does: all that it remembers that is newer than asked for.
                let told = (newest.saturating_sub(5)..=newest)
                    .flat_map(|window| [sample(7, window, 30), sample(8, window, 60)])
                    .filter(|sample| sample.stamp > windows.ask_from());
                let told = told.collect();
                spent.extend(windows.count(told));
            }
        }
        assert_eq!((total(&spent, 7), total(&spent, 8)), (time(60, 30), time(60, 60)));
        assert_eq!(windows.newest(), START + 60 * PERIOD);
    }

    #[test]
    fn a_process_that_was_idle_pays_for_its_own_windows_alone() {
        let mut windows = Windows::since(START, PERIOD);
        let mut spent = windows.count(vec![sample(7, 1, 50)]);
        spent.extend(windows.count(vec![]));
        spent.extend(windows.count(vec![sample(7, 30, 50), sample(8, 30, 100)]));
        assert_eq!((total(&spent, 7), total(&spent, 8)), (time(2, 50), time(1, 100)));
    }

    #[test]
    fn late_and_shifted_stamps_are_neither_lost_nor_doubled() {
        let mut windows = Windows::since(START, PERIOD);
        let shifted = |window| Sample { stamp: START + window * PERIOD - 300, ..sample(8, window, 40) };
        let mut spent = Vec::new();
        for window in 1..=12 {
            spent.extend(windows.count(vec![sample(7, window, 40)]));
            assert!(windows.ask_from() < shifted(window).stamp || window < 2);
            spent.extend(windows.count(vec![shifted(window), sample(7, window, 40)]));
        }
        assert_eq!(total(&spent, 7), time(12, 40));
        assert!(total(&spent, 8).abs_diff(time(12, 40)) < 4000 * 1000, "{}", total(&spent, 8));
    }

    #[test]
    fn what_was_counted_before_and_what_is_no_sample_is_left_out() {
        let mut windows = Windows::since(START, PERIOD);
        let strange = vec![
            sample(7, 0, 50),
            sample(7, 1, 0),
            sample(7, 1, 101),
            sample(7, 1, u32::MAX),
            Sample { pid: 7, stamp: 0, percent: 50 },
        ];
        assert_eq!(windows.count(strange), []);
        assert_eq!(windows.newest(), START);
        assert_eq!(total(&windows.count(vec![sample(7, 1, 50)]), 7), time(1, 50));
    }

    #[test]
    fn what_was_counted_in_another_way_is_not_counted_again() {
        let mut windows = Windows::since(START, PERIOD);
        assert_eq!(total(&windows.count(vec![sample(7, 1, 50)]), 7), time(1, 50));
        windows.reach(START + 4 * PERIOD + PERIOD / 2);
        let told = (1..=5).flat_map(|window| [sample(7, window, 50), sample(8, window, 100)]);
        let spent = windows.count(told.collect());
        assert_eq!((total(&spent, 7), total(&spent, 8)), (time(1, 50) / 2, time(1, 100) / 2));
    }

    #[test]
    fn stamps_that_come_late_cost_no_time() {
        for (what, processes, late, most) in [
            ("none", 1, &[][..], 0),
            ("one", 1, &[3], 0),
            ("one, of several processes", 4, &[3], 0),
            ("two in a row", 1, &[3, 4], 0),
            ("two close together", 1, &[3, 6], 4),
        ] {
            let mut windows = Windows::since(START, PERIOD);
            let mut spent = Vec::new();
            for window in 1..=60 {
                let shift = if late.contains(&window) { 60_000 } else { 0 };
                let told = (0..processes).map(|at| {
                    let sample = sample(7 + at, window, 50);
                    Sample { stamp: sample.stamp + shift + u64::from(at), ..sample }
                });
                spent.extend(windows.count(told.collect()));
            }
            assert_eq!(windows.period(), PERIOD, "{what}");
            for pid in 7..7 + processes {
                let lost = time(60, 50).abs_diff(total(&spent, pid));
                assert!(lost <= time(most, 50) + 10_000, "{what}: process {pid} lost {lost} ns");
            }
        }
    }

    #[test]
    fn a_shorter_period_is_learned_and_a_wild_one_is_not_believed() {
        let mut windows = Windows::since(START, 1_000_000);
        windows.count((1..=4).map(|window| sample(7, window, 50)).collect());
        assert_eq!(windows.period(), PERIOD);
        for wild in [0, 1, u64::MAX] {
            assert_eq!(Windows::since(START, wild).period(), PERIOD, "{wild}");
        }
    }
}
