//! Detects containers that give their slices away.
//!
//! A program that waits for each kernel runs out of work in the middle of its slice, and the card moves on.
//! Other containers use their slices in full, so it falls behind its share. Its supervisor sees the short
//! turns in the card's record and publishes their length. All supervisors then shorten the round.

/// Age of the oldest turn in the record's figure, in microseconds: a second, plus the delay of the record.
const RECORDED: u64 = 1_200_000;

/// The part of their slices that a container's groups use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stint {
    /// In microseconds; 0 if they use all of it.
    micros: u32,
    /// The shortest slice of this period and of the previous one.
    shortest: [u32; 2],
    /// End of this period.
    ends: u64,
    /// Earliest time of the next change. A change costs one call for each group of each container.
    again: u64,
}

impl Stint {
    pub(crate) fn micros(&self) -> u32 {
        self.micros
    }

    /// Records the slice in force from `now` on.
    pub(crate) fn note(&mut self, now: u64, slice: u32) {
        if now >= self.ends {
            (self.shortest, self.ends) = ([slice, self.shortest[0]], now + RECORDED);
        }
        self.shortest[0] = self.shortest[0].min(slice);
    }

    /// Updates the figure from `stay`, the mean length of a turn in the last second; 0 if there were no
    /// turns.
    pub(crate) fn judge(&mut self, now: u64, stay: u32) {
        if now < self.again {
            return;
        }
        let [one, other] = self.shortest.map(u64::from);
        let gives_away = stay > 0 && u64::from(stay) * 4 < one.min(other) * 3;
        let micros = if gives_away { stay } else { 0 };
        if micros.abs_diff(self.micros) > micros / 8 {
            (self.micros, self.again) = (micros, now + RECORDED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_shorter_than_the_slice_are_a_stint() {
        let mut stint = Stint::default();
        let mut judge = |now: u64, slice, stay| {
            stint.note(now, slice);
            stint.judge(now, stay);
            stint.micros()
        };
        assert_eq!(judge(0, 3_000, 1_000), 0, "the record is of the time before");
        assert_eq!(judge(1_200_000, 3_000, 1_000), 1_000);
        assert_eq!(judge(2_350_000, 3_000, 2_900), 1_000, "too soon");
        assert_eq!(judge(2_450_000, 3_000, 1_100), 1_000, "about the same");
        assert_eq!(judge(2_550_000, 3_000, 2_900), 0);
        assert_eq!(judge(3_800_000, 3_000, 0), 0, "alone");
        // The last second had the shorter slices.
        assert_eq!(judge(3_900_000, 8_000, 2_900), 0);
        assert_eq!(judge(7_000_000, 8_000, 2_900), 0);
        assert_eq!(judge(8_300_000, 8_000, 2_900), 2_900);
    }
}
