//! Who gives his slices away.
//!
//! A program that waits for its kernels has no work when it should run, unless the card waits for it. Then the
//! others have their whole slices for each of its short ones. Its container's supervisor sees that by the card's own
//! record, and says so to all: they make the round shorter.

/// Over how many microseconds the record's figure is, with what passes until it is known.
const RECORDED: u64 = 1_200_000;

/// How long a container's groups have the card at a stretch where that is less than they may.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stint {
    /// In microseconds; 0: they use their slices.
    micros: u32,
    /// The shortest slice that the card was asked for in this stretch of time and in the one before.
    shortest: [u32; 2],
    /// When this stretch ends.
    ends: u64,
    /// When the figure may change again: each change is a call for each group of everybody.
    again: u64,
}

impl Stint {
    pub(crate) fn micros(&self) -> u32 {
        self.micros
    }

    /// Takes note of the slice that counts from `now` on.
    pub(crate) fn note(&mut self, now: u64, slice: u32) {
        if now >= self.ends {
            (self.shortest, self.ends) = ([slice, self.shortest[0]], now + RECORDED);
        }
        self.shortest[0] = self.shortest[0].min(slice);
    }

    /// Judges at `now` by what the record says of the last second: for how long a group had the card at a stretch; 0:
    /// nobody took it over.
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
    fn who_has_the_card_for_less_than_his_slice_gives_it_away() {
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
        // Who has more from now on did not have it in the last second.
        assert_eq!(judge(3_900_000, 8_000, 2_900), 0);
        assert_eq!(judge(7_000_000, 8_000, 2_900), 0);
        assert_eq!(judge(8_300_000, 8_000, 2_900), 2_900);
    }
}
