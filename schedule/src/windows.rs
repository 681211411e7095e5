//! Decides when a container runs, and when it is stopped.
//!
//! All other containers are stopped during the window of a container that is present. Containers without a
//! window get the rest of a frame. A window is therefore both a guarantee and a cap.

use crate::frame::{Piece, Place};
use crate::slices::{by_share, each_of_left};
use crate::{Card, Policy, Tenant};

/// How many microseconds before its window a container is started if it follows another one. The stop of the
/// first and the start of the second then overlap, and the card idles no longer than a switch takes. A
/// container without a predecessor would exceed its share this way. If the predecessor pays for an overrun,
/// its successor starts earlier by the same amount, because the overrun was at its cost.
const EARLY: u32 = 300;
/// Mean remainder of the driver's 2 ms slice when another container starts, in microseconds.
const SLICE_LEFT: u64 = 1_000;
/// Time that a call takes to stop channels, in microseconds.
const STOP: u32 = 500;

/// Whether a container runs now, and until when that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Whether its channels run.
    pub runs: bool,
    /// The latest time at which to recompute.
    pub until: u64,
}

/// Time that a container ran past its windows, which its next windows repay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrun {
    owed: u64,
    /// The frame of the last payment, and its amount.
    paid: Option<(u64, u32)>,
    /// Payment in the current or next window.
    now: u32,
    /// Length of the window.
    window: u32,
}

impl Overrun {
    /// Largest debt, in microseconds. A program stopped for longer in a debugger, or a suspended machine,
    /// starts over.
    const MOST: u64 = 1_000_000;

    /// Adds microseconds that the container ran outside of its windows, for whatever reason.
    pub fn add(&mut self, micros: u64) {
        self.owed = self.owed.saturating_add(micros).min(Self::MOST);
        self.now = self.most();
    }

    /// Returns the payment in the current or next window, in microseconds.
    pub fn pays_now(&self) -> u32 {
        self.now
    }

    /// Returns the largest payment: half of the window, or all of every second window if the debt exceeds two
    /// windows.
    fn most(&self) -> u32 {
        let was_left_out = self.paid.is_some_and(|(_, paid)| paid >= self.window);
        let is_large = self.owed > 2 * u64::from(self.window) && !was_left_out;
        let most = if is_large { self.window } else { self.window / 2 };
        u32::try_from(self.owed).unwrap_or(u32::MAX).min(most)
    }

    /// Returns the payment in this frame.
    fn pays(&mut self, frame: u64, window: u32) -> u32 {
        self.window = window;
        match self.paid {
            Some((paid, now)) if paid == frame => now,
            _ => {
                self.now = self.most();
                self.owed -= u64::from(self.now);
                self.paid = Some((frame, self.now));
                self.now
            }
        }
    }
}

impl Card<'_> {
    /// Returns whether the container of this lease runs at `now`, a moment of the clock that counts frames.
    /// Stopping it takes `calls` calls, each for up to 64 channels.
    pub fn stretch(&self, lease: i64, now: u64, calls: u32, overrun: &mut Overrun) -> Stretch {
        let (number, at) = self.frame.position(now);
        let begin = now - u64::from(at);
        let next = begin + u64::from(self.frame.length());
        let Some(tenant) = self.tenant(lease) else { return Stretch { runs: true, until: next } };
        let whole = self.allowed(tenant);
        let mut pieces = whole.clone();
        if !matches!(tenant.policy, Policy::Fixed(_)) {
            *overrun = Overrun::default();
        }
        if whole == [Piece { start: 0, length: self.frame.length() }] {
            return Stretch { runs: true, until: next };
        }
        if matches!(tenant.policy, Policy::Fixed(_)) {
            // An early start may lie in the previous frame.
            let is_next = |piece: &&Piece| {
                let early = self.early(tenant, piece).unwrap_or(0);
                piece.start < early && at >= piece.start + self.frame.length() - early
            };
            let is_next = whole.iter().any(|piece| is_next(&piece));
            let paid = overrun.pays(number + u64::from(is_next), time_in(&whole));
            shorten(&mut pieces, paid.max(tenant.pays));
            let end = whole.iter().map(|piece| piece.end()).max().unwrap_or(0);
            if paid >= time_in(&whole) && !is_next {
                // A skipped window has no stop at which the next payment is worked out.
                if at < end {
                    return Stretch { runs: false, until: begin + u64::from(end) };
                }
                overrun.add(0);
            }
        }
        let lead = calls.saturating_sub(1).saturating_mul(STOP);
        let pairs = pieces.iter().zip(&whole).filter(|(piece, _)| piece.length > 0);
        let runs: Vec<(u32, u32)> =
            pairs.map(|(piece, whole)| self.run(tenant, *piece, whole, lead)).collect();
        // A piece with an early start may begin in the previous frame.
        let length = self.frame.length();
        for (start, end) in &runs {
            for (start, end) in [(*start, *end), (start.saturating_sub(length), end.saturating_sub(length))] {
                if (start..end).contains(&at) {
                    return Stretch { runs: true, until: begin + u64::from(end) };
                }
            }
        }
        let starts = runs.iter().flat_map(|(start, _)| [*start, start.wrapping_sub(length)]);
        let next_start = starts.filter(|start| (at + 1..=length).contains(start)).min().unwrap_or(length);
        Stretch { runs: false, until: begin + u64::from(next_start) }
    }

    /// Returns when the calls for this piece of a window start and end, both in one frame's time. `whole` is
    /// the piece without payments.
    fn run(&self, tenant: &Tenant, piece: Piece, whole: &Piece, lead: u32) -> (u32, u32) {
        let length = self.frame.length();
        let passed = self.passed(tenant, whole, self.tenants.len()).min(piece.length / 2);
        let end = piece.end() - passed;
        let end = end - lead.min((end - piece.start) / 2);
        match self.early(tenant, whole) {
            None => (piece.start, end),
            // In the previous frame's time, to keep it positive.
            Some(early) if piece.start < early => (piece.start + length - early, end + length),
            Some(early) => (piece.start - early, end),
        }
    }

    /// Returns how early a container starts for this piece; `None` without a predecessor.
    fn early(&self, tenant: &Tenant, piece: &Piece) -> Option<u32> {
        let length = self.frame.length();
        let leaves = |other: &Tenant| {
            other.lease != tenant.lease
                && other.is_present
                && self.allowed(other).iter().any(|one| one.end() % length == piece.start % length)
        };
        let most = match tenant.policy {
            Policy::Fixed(_) => piece.length,
            _ => length / 2,
        };
        let given = || self.given(tenant, piece.start, self.tenants.len());
        self.tenants.iter().any(leaves).then(|| EARLY + given().min(most))
    }

    /// Returns the payment of the container whose window ends at `start`, and what it passes on. `depth`
    /// bounds the recursion.
    fn given(&self, tenant: &Tenant, start: u32, depth: usize) -> u32 {
        let length = self.frame.length();
        let others = self.tenants.iter().filter(|other| other.lease != tenant.lease && other.is_present);
        let payment = |other: &Tenant| {
            let Policy::Fixed(place) = &other.policy else { return None };
            let at = place.iter().position(|piece| piece.end() % length == start % length)?;
            let mut left = place.clone();
            shorten(&mut left, other.pays);
            let passed = if depth > 0 { self.passed(other, &place[at], depth - 1) } else { 0 };
            Some(place[at].length - left[at].length + passed)
        };
        others.filter_map(payment).max().unwrap_or(0).min(length / 2)
    }

    /// Returns the rest of a predecessor's payment that is longer than this window. The window ends earlier
    /// by the rest, so that its successor gets it. Only a skipped window is passed on: after a shortened one
    /// the predecessor probably overruns again, into the moved window.
    fn passed(&self, tenant: &Tenant, piece: &Piece, depth: usize) -> u32 {
        let length = self.frame.length();
        let is_left_out = |other: &Tenant| match &other.policy {
            Policy::Fixed(place) if other.lease != tenant.lease && other.is_present => {
                other.pays >= time_in(place)
                    && place.iter().any(|one| one.end() % length == piece.start % length)
            }
            _ => false,
        };
        let is_window = matches!(tenant.policy, Policy::Fixed(_));
        if !is_window || !self.tenants.iter().any(is_left_out) {
            return 0;
        }
        self.given(tenant, piece.start, depth).saturating_sub(piece.length)
    }

    /// Returns the GPU time of a container that should have stopped at `due` and ran until `until`. Once
    /// other containers have started and its slice is over, its groups get only their part.
    pub(crate) fn overran(&self, lease: i64, due: u64, until: u64) -> u64 {
        const BEFORE: u64 = 1_000;
        let shares = |other: &&Tenant| {
            other.lease != lease
                && other.is_present
                && (due.saturating_sub(BEFORE)..until).contains(&other.started)
        };
        let sharers = || self.tenants.iter().filter(shares);
        let shared_from =
            sharers().map(|other| other.started.max(due) + SLICE_LEFT).min().unwrap_or(until).min(until);
        let groups = |tenant: &Tenant| u64::from(tenant.working.max(1));
        let own = self.tenant(lease).map_or(1, groups);
        let all = own + sharers().map(groups).sum::<u64>();
        shared_from.saturating_sub(due) + until.saturating_sub(shared_from) * own / all
    }

    /// Returns the pieces of a frame in which a container may run.
    fn allowed(&self, tenant: &Tenant) -> Vec<Piece> {
        match &tenant.policy {
            Policy::Fixed(place) => place.clone(),
            Policy::Burst { .. } | Policy::Unlimited if self.has_latency() => {
                self.part_beside_latency(tenant)
            }
            Policy::Burst { ceiling, .. } => {
                let left = self.left();
                let most = percent_of(&left, *ceiling);
                between(left, 0, most)
            }
            Policy::Latency { .. } | Policy::Unlimited => self.left(),
        }
    }

    /// While a latency container is present, the other containers split the time that windows leave, one
    /// after the other and in proportion to their shares. Their slices are so short that switching between
    /// them would cost more.
    fn part_beside_latency(&self, tenant: &Tenant) -> Place {
        let has_part = |other: &&Tenant| {
            let works = other.lease == tenant.lease || (other.is_present && !other.rests);
            works && by_share(other, 0).is_some()
        };
        let mut others: Vec<&Tenant> = self.tenants.iter().filter(has_part).collect();
        others.sort_by_key(|other| other.lease);
        let each_of_left = each_of_left(&others);
        let weight = |other: &&Tenant| by_share(other, each_of_left).unwrap_or(0);
        let all = others.iter().map(weight).sum::<u64>().max(1);
        let before = others.iter().filter(|other| other.lease < tenant.lease).map(weight).sum();
        let left = self.left();
        let at = |weight: u64| u32::try_from(u64::from(time_in(&left)) * weight / all).unwrap_or(u32::MAX);
        let (begin, end) = (at(before), at(before + weight(&tenant)));
        let most = match tenant.policy {
            Policy::Burst { ceiling, .. } => percent_of(&left, ceiling),
            _ => u32::MAX,
        };
        between(left, begin, end.min(begin.saturating_add(most)))
    }

    /// Returns the time that the windows of present containers leave.
    fn left(&self) -> Place {
        let windows =
            self.tenants.iter().filter(|tenant| tenant.is_present).filter_map(|tenant| {
                match &tenant.policy {
                    Policy::Fixed(place) => Some(place),
                    _ => None,
                }
            });
        self.frame.free(&windows.flatten().copied().collect::<Vec<_>>())
    }
}

/// Returns the total length of these pieces.
fn time_in(pieces: &[Piece]) -> u32 {
    pieces.iter().map(|piece| piece.length).sum()
}

/// Returns `percent` per cent of the total length of these pieces.
fn percent_of(pieces: &[Piece], percent: u32) -> u32 {
    let all = time_in(pieces);
    u32::try_from(u64::from(all) * u64::from(percent.min(100)) / 100).unwrap_or(all)
}

/// Cuts the pieces to the range between two offsets into their total length.
fn between(pieces: Place, from: u32, to: u32) -> Place {
    let mut passed = 0;
    let cut = pieces.into_iter().map(|piece| {
        let begin = from.clamp(passed, passed + piece.length) - passed;
        let end = to.clamp(passed, passed + piece.length) - passed;
        passed += piece.length;
        Piece { start: piece.start + begin, length: end - begin }
    });
    cut.filter(|piece| piece.length > 0).collect()
}

/// Cuts `by` microseconds off the pieces, starting from the end of the last one.
fn shorten(pieces: &mut [Piece], by: u32) {
    let mut rest = by;
    for piece in pieces.iter_mut().rev() {
        let now = rest.min(piece.length);
        piece.length -= now;
        rest -= now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Frame;

    const FRAME: Frame = Frame::SHORT;

    fn fixed(lease: i64, start: u32, length: u32) -> Tenant {
        Tenant::new(lease, Policy::Fixed(vec![Piece { start, length }]), 1)
    }

    fn burst(lease: i64, ceiling: u32) -> Tenant {
        Tenant::new(lease, Policy::Burst { share: 30, ceiling }, 1)
    }

    /// Returns the container's calls within two frames, as `(time, runs)`.
    fn calls(tenants: &[Tenant], lease: i64) -> Vec<(u64, bool)> {
        let card = Card { frame: FRAME, tenants };
        let (mut now, mut before) = (0, None);
        let mut calls = Vec::new();
        while now < 100_000 {
            let stretch = card.stretch(lease, now, 1, &mut Overrun::default());
            assert!(stretch.until > now, "{stretch:?} at {now}");
            if before != Some(stretch.runs) {
                calls.push((now, stretch.runs));
            }
            before = Some(stretch.runs);
            now = stretch.until;
        }
        calls
    }

    #[test]
    fn a_lone_container_runs_in_its_window_and_starts_when_it_begins() {
        let tenants = [fixed(1, 10_000, 15_000)];
        assert_eq!(
            calls(&tenants, 1),
            [(0, false), (10_000, true), (25_000, false), (60_000, true), (75_000, false)]
        );
    }

    #[test]
    fn adjacent_windows_overlap_by_the_early_start() {
        let tenants = [fixed(1, 0, 15_000), fixed(2, 15_000, 35_000)];
        assert_eq!(
            calls(&tenants, 1),
            [(0, true), (15_000, false), (49_700, true), (65_000, false), (99_700, true)]
        );
        assert_eq!(calls(&tenants, 2), [(0, false), (14_700, true), (50_000, false), (64_700, true)]);
    }

    #[test]
    fn a_window_of_who_is_not_there_belongs_to_those_without_one() {
        let mut tenants = vec![fixed(1, 0, 15_000), burst(2, 100)];
        assert_eq!(calls(&tenants, 2), [(0, false), (14_700, true), (50_000, false), (64_700, true)]);
        tenants[0].is_present = false;
        assert_eq!(calls(&tenants, 2), [(0, true)]);
        // A container with a window keeps to it, and follows those without one.
        tenants.push(fixed(3, 15_000, 10_000));
        assert_eq!(
            calls(&tenants, 3),
            [(0, false), (14_700, true), (25_000, false), (64_700, true), (75_000, false)]
        );
        assert_eq!(
            calls(&tenants, 2),
            [(0, true), (15_000, false), (24_700, true), (65_000, false), (74_700, true)]
        );
    }

    #[test]
    fn a_ceiling_is_a_part_of_what_windows_leave() {
        let alone = [burst(1, 60)];
        assert_eq!(calls(&alone, 1), [(0, true), (30_000, false), (50_000, true), (80_000, false)]);
        let two = [fixed(1, 0, 25_000), burst(2, 60)];
        assert_eq!(
            calls(&two, 2),
            [(0, false), (24_700, true), (40_000, false), (74_700, true), (90_000, false)]
        );
    }

    #[test]
    fn beside_one_that_is_answered_at_once_the_others_have_what_windows_leave_in_turn() {
        let latency = Tenant { policy: Policy::Latency { share: 20 }, ..burst(1, 100) };
        let free = Tenant { policy: Policy::Unlimited, ..burst(4, 100) };
        // A window takes 10 ms. Two containers get 30 parts each of the rest, and one gets the 40 that are
        // left.
        let tenants = [fixed(9, 0, 10_000), latency.clone(), burst(2, 100), burst(3, 20), free];
        assert_eq!(calls(&tenants, 1), [(0, false), (9_700, true), (50_000, false), (59_700, true)]);
        assert_eq!(
            calls(&tenants, 2),
            [(0, false), (9_700, true), (22_000, false), (59_700, true), (72_000, false)]
        );
        // The ceiling limits it.
        assert_eq!(
            calls(&tenants, 3),
            [(0, false), (21_700, true), (30_000, false), (71_700, true), (80_000, false)]
        );
        assert_eq!(calls(&tenants, 4), [(0, false), (34_000, true), (50_000, false), (84_000, true)]);
        // The others get the time of a resting container.
        let resting = Tenant { rests: true, ..burst(3, 100) };
        assert_eq!(calls(&[latency.clone(), burst(2, 100), resting], 2), [(0, true)]);
        // A container that shares only with a latency container is never stopped.
        assert_eq!(calls(&[latency, burst(2, 100)], 2), [(0, true)]);
    }

    #[test]
    fn what_one_ran_past_its_window_is_paid_by_itself_and_not_in_one_piece() {
        let tenants = [fixed(1, 0, 10_000)];
        let card = Card { frame: FRAME, tenants: &tenants };
        let mut overrun = Overrun::default();
        overrun.add(7_000);
        let ends: Vec<u64> =
            (0..4).map(|frame| card.stretch(1, frame * 50_000, 1, &mut overrun).until % 50_000).collect();
        assert_eq!(ends, [5_000, 8_000, 10_000, 10_000]);
        // A second query in the same frame returns the same.
        overrun.add(1_000);
        assert_eq!(card.stretch(1, 200_000, 1, &mut overrun).until, 209_000);
        assert_eq!(card.stretch(1, 204_000, 1, &mut overrun).until, 209_000);
    }

    #[test]
    fn a_successor_gets_what_its_predecessor_pays() {
        let mut overrun = Overrun::default();
        let card = Card { frame: FRAME, tenants: &[fixed(1, 0, 10_000)] };
        assert_eq!(card.stretch(1, 0, 1, &mut overrun).until, 10_000);
        assert_eq!(overrun.pays_now(), 0);
        overrun.add(7_000);
        assert_eq!(overrun.pays_now(), 5_000, "in its next window");
        assert_eq!(card.stretch(1, 50_000, 1, &mut overrun).until, 55_000);
        assert_eq!(overrun.pays_now(), 5_000, "in the one that it is in");
        let owes = Tenant { pays: 5_000, ..fixed(1, 0, 10_000) };
        let tenants = [owes.clone(), fixed(2, 10_000, 20_000), fixed(3, 30_000, 20_000)];
        assert_eq!(
            calls(&tenants, 2),
            [(0, false), (4_700, true), (30_000, false), (54_700, true), (80_000, false)]
        );
        assert_eq!(calls(&tenants, 3)[1], (29_700, true), "the others have their own");
        // The predecessor of the frame's first window.
        let tenants = [fixed(2, 0, 10_000), Tenant { pays: 5_000, ..fixed(1, 30_000, 20_000) }];
        assert_eq!(calls(&tenants, 2)[..3], [(0, true), (10_000, false), (44_700, true)]);
        let tenants = [owes, burst(2, 100)];
        assert_eq!(calls(&tenants, 2)[1], (4_700, true), "so have those without a window");
    }

    #[test]
    fn a_payment_goes_to_the_successor_of_the_piece_that_it_shortens() {
        let place = vec![Piece { start: 0, length: 20_000 }, Piece { start: 40_000, length: 2_000 }];
        let owes = Tenant { policy: Policy::Fixed(place), pays: 3_000, ..fixed(1, 0, 0) };
        let tenants = [owes, fixed(2, 20_000, 20_000), burst(3, 100)];
        // The payment takes all of the second piece, and 1 ms of the first.
        assert_eq!(calls(&tenants, 2)[..2], [(0, false), (18_700, true)]);
        assert_eq!(calls(&tenants, 3)[..2], [(0, false), (39_700, true)]);
    }

    #[test]
    fn a_large_debt_skips_every_second_window() {
        let tenants = [fixed(1, 0, 10_000)];
        let card = Card { frame: FRAME, tenants: &tenants };
        let mut overrun = Overrun::default();
        let mut paid = |frame: u64| {
            overrun.pays(frame, 10_000);
            overrun.pays_now()
        };
        assert_eq!(paid(0), 0);
        overrun.add(36_000);
        let mut paid = |frame: u64| overrun.pays(frame, 10_000);
        assert_eq!([1, 2, 3, 4, 5, 6].map(&mut paid), [10_000, 5_000, 10_000, 5_000, 5_000, 1_000]);
        assert_eq!(card.stretch(1, 0, 1, &mut overrun).until, 10_000);
        // The payment of a skipped window ends with it.
        let tenants = [fixed(1, 20_000, 10_000)];
        let card = Card { frame: FRAME, tenants: &tenants };
        overrun.add(36_000);
        assert_eq!(card.stretch(1, 350_000, 1, &mut overrun), Stretch { runs: false, until: 380_000 });
        assert_eq!(overrun.pays_now(), 10_000);
        assert_eq!(card.stretch(1, 380_000, 1, &mut overrun), Stretch { runs: false, until: 400_000 });
        assert_eq!(overrun.pays_now(), 5_000);
        // A skipped window doubles the next one at most, which passes on the rest.
        let out = Tenant { pays: 10_000, ..fixed(1, 0, 10_000) };
        let tenants = [out, fixed(2, 10_000, 3_000), fixed(3, 13_000, 27_000)];
        assert_eq!(calls(&tenants, 2)[..3], [(0, false), (6_700, true), (11_500, false)]);
    }

    #[test]
    fn a_window_that_starts_in_the_previous_frame_pays_once() {
        let tenants = [fixed(1, 0, 10_000), fixed(2, 40_000, 10_000)];
        let card = Card { frame: FRAME, tenants: &tenants };
        let mut overrun = Overrun::default();
        assert_eq!(card.stretch(1, 0, 1, &mut overrun).until, 10_000);
        overrun.add(2_000);
        assert_eq!(card.stretch(1, 10_000, 1, &mut overrun), Stretch { runs: false, until: 49_700 });
        assert_eq!(card.stretch(1, 49_700, 1, &mut overrun), Stretch { runs: true, until: 58_000 });
        assert_eq!(card.stretch(1, 51_000, 1, &mut overrun).until, 58_000);
        assert_eq!(card.stretch(1, 99_700, 1, &mut overrun).until, 110_000);
    }

    #[test]
    fn a_container_without_a_window_owes_nothing() {
        let mut overrun = Overrun::default();
        let card = Card { frame: FRAME, tenants: &[fixed(1, 0, 10_000)] };
        let _ = card.stretch(1, 0, 1, &mut overrun);
        overrun.add(4_000);
        let card = Card { frame: FRAME, tenants: &[burst(1, 100)] };
        let _ = card.stretch(1, 50_000, 1, &mut overrun);
        assert_eq!(overrun, Overrun::default());
    }

    #[test]
    fn an_overrun_counts_in_part_once_others_have_started() {
        let overrun = |started, working| {
            let other = Tenant { started, working, ..fixed(2, 10_000, 10_000) };
            let card = Card { frame: FRAME, tenants: &[fixed(1, 0, 10_000), other] };
            card.overran(1, 110_000, 118_000)
        };
        assert_eq!(overrun(0, 1), 8_000, "nobody else ran");
        assert_eq!(overrun(70_000, 1), 8_000, "nor since");
        assert_eq!(overrun(110_000, 1), 1_000 + 3_500);
        assert_eq!(overrun(110_000, 6), 1_000 + 1_000);
        assert_eq!(overrun(114_000, 1), 4_000 + 1_000 + 1_500);
        assert_eq!(overrun(117_500, 1), 8_000, "its slice was not over");
    }

    #[test]
    fn who_needs_many_calls_to_be_stopped_begins_earlier() {
        let tenants = [fixed(1, 0, 10_000)];
        let card = Card { frame: FRAME, tenants: &tenants };
        assert_eq!(card.stretch(1, 0, 8, &mut Overrun::default()).until, 6_500);
        assert_eq!(card.stretch(1, 0, 800, &mut Overrun::default()).until, 5_000, "half of it at most");
    }
}
