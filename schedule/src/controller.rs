//! A supervisor's orders to the card for its container, from one step to the next.
//!
//! The supervisor requests orders at each step, performs them, and reports when channels had been stopped.
//! The next step is due when the orders expire, or when something has changed.

use crate::Card;
use crate::slices::Slices;
use crate::stint::Stint;
use crate::windows::Overrun;

/// Microseconds that a call takes to stop channels. Time beyond it is overrun.
const STOP: u64 = 500;

/// Which of a container's channel groups run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Running {
    /// All of them.
    All,
    /// Only the groups of a turn: `count` groups starting from `first`, wrapping around.
    Turn {
        /// The first one.
        first: u32,
        /// How many.
        count: u32,
    },
    /// None, except those of copy engines.
    Stopped,
    /// None, including those of copy engines.
    Paused,
}

impl Running {
    /// Whether group `number` runs, if the container has `groups` of them.
    pub fn includes(self, number: u32, groups: u32) -> bool {
        match self {
            Self::All => true,
            Self::Turn { first, count } => {
                let groups = groups.max(1);
                (number % groups + groups - first % groups) % groups < count
            }
            Self::Stopped | Self::Paused => false,
        }
    }
}

/// Orders that hold from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orders {
    /// Which groups run.
    pub running: Running,
    /// Length of a slice; `None` leaves it unchanged.
    pub slice: Option<u32>,
    /// The latest time of the next step.
    pub until: u64,
}

/// A container on one card, over time.
#[derive(Debug, Default)]
pub struct Controller {
    overrun: Overrun,
    /// When the channels that run now should stop.
    due: Option<u64>,
    stint: Stint,
}

impl Controller {
    /// Returns the microseconds that the container pays in its current or next window.
    pub fn pays(&self) -> u32 {
        self.overrun.pays_now()
    }

    /// Returns how many microseconds of a slice the container's groups use; 0 if they use all of it.
    pub fn stint(&self) -> u32 {
        self.stint.micros()
    }

    /// Returns the orders for a paused container, and clears its debts.
    pub fn pause(&mut self, card: &Card, now: u64) -> Orders {
        *self = Self::default();
        Orders { running: Running::Paused, slice: None, until: now + u64::from(card.frame.length()) }
    }

    /// Returns the orders at `now`, a moment of the clock that counts frames, for the container of this
    /// lease. It has `groups` channel groups here that take turns, and stopping it takes `calls` calls.
    pub fn step(&mut self, card: &Card, lease: i64, now: u64, (groups, calls): (u32, u32)) -> Orders {
        let stretch = card.stretch(lease, now, calls, &mut self.overrun);
        let slices = card.slices(lease);
        let slice = slices.map(|slices| slices.slice);
        if let (Some(slice), Some(tenant)) = (slice, card.tenant(lease)) {
            self.stint.note(now, slice);
            self.stint.judge(now, tenant.stay);
        }
        if !stretch.runs {
            return Orders { running: Running::Stopped, slice, until: stretch.until };
        }
        self.due = Some(stretch.until);
        // The record does not say which groups work. If too many do, all take turns.
        let working = card.tenant(lease).map_or(groups, |tenant| tenant.working);
        let crowded = slices.filter(|slices| working > slices.at_once);
        let turn = crowded.and_then(|slices| slices.part(groups, working.max(groups)).turn(groups, now));
        let (running, until) = match turn {
            Some((first, count)) => {
                (Running::Turn { first, count }, stretch.until.min(Slices::next_turn(now)))
            }
            None => (Running::All, stretch.until),
        };
        Orders { running, slice, until }
    }

    /// Resets everything but debts when the container has no channel left. A container that comes back still
    /// owes.
    pub fn leave(&mut self) {
        *self = Self { overrun: std::mem::take(&mut self.overrun), ..Self::default() };
    }

    /// Records when the calls began and ended that stopped all channels of this lease's container. GPU time
    /// after the end of its window becomes a debt. `card` is the state after the calls: it shows which other
    /// containers had started.
    pub fn stopped(&mut self, card: &Card, lease: i64, (began, ended): (u64, u64), calls: u32) {
        let Some(due) = self.due.take() else { return };
        let took = ended.saturating_sub(began).saturating_sub(STOP * u64::from(calls));
        let until = due.max(began).saturating_add(took);
        self.overrun.add(card.overran(lease, due, until));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Frame, Piece};
    use crate::{Policy, Tenant};

    fn tenant(lease: i64, policy: Policy, working: u32) -> Tenant {
        Tenant::new(lease, policy, working)
    }

    fn step(controller: &mut Controller, tenants: &[Tenant], now: u64, groups: u32) -> Orders {
        controller.step(&Card { frame: Frame::SHORT, tenants }, 1, now, (groups, groups))
    }

    #[test]
    fn groups_take_turns_where_not_all_can_run_at_once_and_a_window_stops_them_all() {
        let share = Policy::Burst { share: 30, ceiling: 100 };
        let tenants = [tenant(1, share.clone(), 16), tenant(2, Policy::Burst { share: 70, ceiling: 100 }, 1)];
        let mut controller = Controller::default();
        let first = step(&mut controller, &tenants, 30_000, 16);
        assert_eq!(first.running, Running::Turn { first: 0, count: 7 });
        let second = step(&mut controller, &tenants, 100_000, 16);
        assert_eq!(second.running, Running::Turn { first: 7, count: 7 });
        // Only one group works, according to the card's record.
        let one_works = [Tenant { working: 1, ..tenants[0].clone() }, tenants[1].clone()];
        assert_eq!(step(&mut controller, &one_works, 30_000, 16).running, Running::All);
        // Another supervisor has half of the groups, so it also gets half of the time.
        assert_eq!(step(&mut controller, &tenants, 0, 8).running, Running::Turn { first: 0, count: 3 });
        let window = tenant(3, Policy::Fixed(vec![Piece { start: 0, length: 25_000 }]), 1);
        let tenants = [tenants.as_slice(), &[window]].concat();
        assert_eq!(step(&mut controller, &tenants, 0, 16).running, Running::Stopped);
        assert_eq!(step(&mut controller, &tenants, 30_000, 16).running, Running::Turn { first: 0, count: 7 });
    }

    #[test]
    fn who_is_stopped_late_pays_and_who_is_stopped_in_time_does_not() {
        let tenants = [tenant(1, Policy::Fixed(vec![Piece { start: 0, length: 10_000 }]), 1)];
        let end = |took: u64| {
            let mut controller = Controller::default();
            assert_eq!(step(&mut controller, &tenants, 0, 1).running, Running::All);
            assert_eq!(step(&mut controller, &tenants, 10_000, 1).running, Running::Stopped);
            let card = Card { frame: Frame::SHORT, tenants: &tenants };
            controller.stopped(&card, 1, (10_000, 10_000 + took), 1);
            step(&mut controller, &tenants, 50_000, 1).until - 50_000
        };
        assert_eq!([end(500), end(2_500), end(10_000)], [10_000, 8_000, 5_000]);
    }

    #[test]
    fn debts_survive_a_container_without_channels() {
        let tenants = [tenant(1, Policy::Fixed(vec![Piece { start: 0, length: 10_000 }]), 1)];
        let card = Card { frame: Frame::SHORT, tenants: &tenants };
        let mut controller = Controller::default();
        let _ = step(&mut controller, &tenants, 0, 1);
        let _ = step(&mut controller, &tenants, 10_000, 1);
        controller.stopped(&card, 1, (10_000, 13_500), 1);
        controller.leave();
        assert_eq!(step(&mut controller, &tenants, 50_000, 1).until, 57_000);
    }

    #[test]
    fn who_was_paused_owes_nothing_for_it() {
        let tenants = [tenant(1, Policy::Fixed(vec![Piece { start: 0, length: 10_000 }]), 1)];
        let card = Card { frame: Frame::SHORT, tenants: &tenants };
        let mut controller = Controller::default();
        assert_eq!(step(&mut controller, &tenants, 0, 1).running, Running::All);
        assert_eq!(controller.pause(&card, 5_000).running, Running::Paused);
        // The program resumes it outside of its window.
        assert_eq!(step(&mut controller, &tenants, 40_000, 1).running, Running::Stopped);
        controller.stopped(&card, 1, (40_000, 40_500), 1);
        assert_eq!(step(&mut controller, &tenants, 50_000, 1).until, 60_000);
    }

    #[test]
    fn a_turn_goes_round() {
        let turn = Running::Turn { first: 5, count: 3 };
        let runs: Vec<u32> = (0..6).filter(|at| turn.includes(*at, 6)).collect();
        assert_eq!(runs, [0, 1, 5]);
        assert!(Running::All.includes(0, 0) && !Running::Stopped.includes(0, 1));
    }
}
