//! A lease's plan for sharing the time of a GPU, written by one process and read by others.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use gpushare_schedule::Policy;
use gpushare_schedule::frame::{Frame, Piece, Place, is_place};

/// A lease's part of a GPU's time, and the frame that it applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The sharing policy.
    pub policy: Policy,
    /// The frame of the node's windows.
    pub frame: Frame,
}

const NONE: u32 = 0;
const FIXED: u32 = 1;
const BURST: u32 = 2;
const UNLIMITED: u32 = 3;
const LATENCY: u32 = 4;

/// A plan in shared memory. It has one writer at a time. All zeros means no plan.
#[derive(Debug, Default)]
#[repr(C)]
pub struct SharedPlan {
    /// Odd while the rest is being written.
    version: AtomicU32,
    kind: AtomicU32,
    /// Per cent of the GPU, and the ceiling in per cent of the time that windows leave.
    percents: [AtomicU32; 2],
    frame: AtomicU32,
    /// Start and length of two pieces, in microseconds.
    pieces: [AtomicU32; 4],
}

/// How often to retry reading a plan while it is being written.
const TRIES: usize = 64;

impl SharedPlan {
    /// Writes a plan.
    pub fn write(&self, plan: Option<&Plan>) {
        if self.read().as_ref() == plan {
            return;
        }
        let (mut kind, mut percents, mut pieces) = (NONE, [0; 2], [0; 4]);
        match plan.map(|plan| &plan.policy) {
            Some(Policy::Fixed(place)) => {
                kind = FIXED;
                for (words, piece) in pieces.chunks_exact_mut(2).zip(place) {
                    words.copy_from_slice(&[piece.start, piece.length]);
                }
            }
            Some(Policy::Burst { share, ceiling }) => (kind, percents) = (BURST, [*share, *ceiling]),
            Some(Policy::Latency { share }) => (kind, percents) = (LATENCY, [*share, 0]),
            Some(Policy::Unlimited) => kind = UNLIMITED,
            None => {}
        }
        let version = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(version, Ordering::Relaxed);
        fence(Ordering::Release);
        self.kind.store(kind, Ordering::Relaxed);
        self.frame.store(plan.map_or(0, |plan| plan.frame.length()), Ordering::Relaxed);
        let words = self.percents.iter().chain(&self.pieces);
        words
            .zip(percents.into_iter().chain(pieces))
            .for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        self.version.store(version.wrapping_add(1), Ordering::Release);
    }

    /// Reads the plan. Returns `None` for bytes that no writer of ours wrote.
    pub fn read(&self) -> Option<Plan> {
        for _ in 0..TRIES {
            let version = self.version.load(Ordering::Acquire);
            let load = |word: &AtomicU32| word.load(Ordering::Relaxed);
            let (kind, frame) = (load(&self.kind), load(&self.frame));
            let [share, ceiling] = [0, 1].map(|at| load(&self.percents[at]));
            let pieces = [0, 2].map(|at| (load(&self.pieces[at]), load(&self.pieces[at + 1])));
            fence(Ordering::Acquire);
            if version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version {
                return plan(kind, frame, (share, ceiling), pieces);
            }
            std::hint::spin_loop();
        }
        None // its writer ended in the middle of a write
    }
}

fn plan(kind: u32, frame: u32, (share, ceiling): (u32, u32), pieces: [(u32, u32); 2]) -> Option<Plan> {
    let frame = [Frame::SHORT, Frame::LONG].into_iter().find(|one| one.length() == frame)?;
    let is_percent = |percent| (1..=100).contains(&percent);
    let policy = match kind {
        FIXED => {
            let pieces = pieces.into_iter().map(|(start, length)| Piece { start, length });
            let place: Place = pieces.filter(|piece| piece.length > 0).collect();
            is_place(frame, &place).then_some(Policy::Fixed(place))?
        }
        BURST if is_percent(share) && is_percent(ceiling) => Policy::Burst { share, ceiling },
        LATENCY if is_percent(share) => Policy::Latency { share },
        UNLIMITED => Policy::Unlimited,
        _ => return None,
    };
    Some(Plan { policy, frame })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let shared = SharedPlan::default();
        assert_eq!(shared.read(), None);
        let piece = |start, length| Piece { start, length };
        for policy in [
            Policy::Fixed(vec![piece(0, 15_000)]),
            Policy::Fixed(vec![piece(0, 5_000), piece(40_000, 10_000)]),
            Policy::Burst { share: 30, ceiling: 60 },
            Policy::Latency { share: 30 },
            Policy::Unlimited,
        ] {
            let plan = Plan { policy, frame: Frame::SHORT };
            shared.write(Some(&plan));
            assert_eq!(shared.read(), Some(plan));
        }
        shared.frame.store(7, Ordering::Relaxed);
        assert_eq!(shared.read(), None, "a frame that nobody uses");
        shared.write(None);
        assert_eq!(shared.read(), None);
    }

    #[test]
    fn a_plan_whose_writer_ended_in_the_middle_is_none_and_can_be_written_anew() {
        let shared = SharedPlan::default();
        let plan = Plan { policy: Policy::Unlimited, frame: Frame::LONG };
        shared.write(Some(&plan));
        let _ = shared.version.fetch_or(1, Ordering::Relaxed);
        assert_eq!(shared.read(), None);
        shared.write(Some(&plan));
        assert_eq!(shared.read(), Some(plan));
    }
}
