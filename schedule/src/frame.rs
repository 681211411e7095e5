//! Frames, and the places of windows in them.

/// A part of a frame. It may extend past the frame's end into the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Start in the frame, in microseconds.
    pub start: u32,
    /// Its length in microseconds.
    pub length: u32,
}

impl Piece {
    /// Returns the end in microseconds.
    pub fn end(self) -> u32 {
        self.start.saturating_add(self.length)
    }
}

/// Position of a window in each frame: one piece or two, in chronological order.
pub type Place = Vec<Piece>;

/// Most pieces of a window. Each costs a stop and a start of the other containers that have work.
const MOST_PIECES: usize = 2;

/// The period in which each window comes once. Frames follow each other from the clock's zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame(u32);

impl Frame {
    /// A frame of 50 ms. With 20 ms, the shares would be off by 2 points.
    pub const SHORT: Self = Self(50_000);
    /// A frame of 100 ms.
    pub const LONG: Self = Self(100_000);
    /// Most windows of a card with short frames. More would lose 3 per cent at their edges.
    const MOST_IN_SHORT: usize = 6;
    /// Per cent of a frame reserved from windows while a container without one is on the card.
    const RESERVE: u32 = 5;

    /// Returns the frame for a node whose fullest card has `most` windows.
    pub fn for_windows(most: usize) -> Self {
        if most > Self::MOST_IN_SHORT { Self::LONG } else { Self::SHORT }
    }

    /// Returns the length in microseconds.
    pub fn length(self) -> u32 {
        self.0
    }

    /// Returns the length of a window of `percent` per cent.
    pub fn share(self, percent: u32) -> u32 {
        self.0 / 100 * percent.min(100)
    }

    /// Returns the microseconds that windows may take in total, depending on whether containers without a
    /// window share the card.
    pub fn room(self, is_beside_others: bool) -> u32 {
        if is_beside_others { self.share(100 - Self::RESERVE) } else { self.0 }
    }

    /// Returns the frame that contains this moment, and the offset in it.
    pub(crate) fn position(self, now: u64) -> (u64, u32) {
        let length = u64::from(self.0);
        (now / length, u32::try_from(now % length).unwrap_or(0))
    }

    /// Returns the first place for a window between those that are taken: whole if one fits, otherwise in two
    /// pieces. Returns `None` if there is none, and all windows must be [repacked](Self::packed).
    pub fn first_fit(self, taken: &[Piece], length: u32) -> Option<Place> {
        let free = self.free(taken);
        if let Some(gap) = free.iter().find(|gap| gap.length >= length) {
            return Some(vec![Piece { start: gap.start, length }]);
        }
        let pairs =
            free.iter().enumerate().flat_map(|(at, one)| free[at + 1..].iter().map(move |two| (*one, *two)));
        let (one, two) = pairs.into_iter().find(|(one, two)| one.length + two.length >= length)?;
        Some(vec![one, Piece { start: two.start, length: length - one.length }])
    }

    /// Returns a place that is free on all of these cards, given their taken pieces; `None` if there is none.
    pub fn first_common_fit(self, cards: &[&[Piece]], length: u32) -> Option<Place> {
        self.first_fit(&cards.concat(), length)
    }

    /// Places windows of these lengths one after the other. Returns `None` if they do not fit.
    pub fn packed(self, lengths: &[u32]) -> Option<Vec<Place>> {
        let mut start = 0u32;
        let mut places = Vec::with_capacity(lengths.len());
        for length in lengths {
            places.push(vec![Piece { start, length: *length }]);
            start = start.checked_add(*length).filter(|end| *end <= self.0)?;
        }
        Some(places)
    }

    /// Lists the parts of a frame that are in none of these pieces, in chronological order.
    pub(crate) fn free(self, taken: &[Piece]) -> Vec<Piece> {
        let mut taken: Vec<Piece> = taken.to_vec();
        taken.sort_unstable_by_key(|piece| piece.start);
        let mut free = Vec::new();
        let mut at = 0;
        for piece in taken.into_iter().chain([Piece { start: self.0, length: 0 }]) {
            if piece.start > at {
                free.push(Piece { start: at, length: piece.start - at });
            }
            at = at.max(piece.end());
        }
        free
    }
}

/// Whether a place is valid: within the frame, in order, and in few enough pieces.
pub fn is_place(frame: Frame, place: &[Piece]) -> bool {
    let is_in_order = place.windows(2).all(|pair| pair[0].end() <= pair[1].start);
    let is_within = place.iter().all(|piece| piece.length > 0 && piece.end() <= frame.length());
    !place.is_empty() && place.len() <= MOST_PIECES && is_in_order && is_within
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(start: u32, length: u32) -> Piece {
        Piece { start, length }
    }

    #[test]
    fn a_window_goes_to_the_first_gap_that_holds_it_or_to_two() {
        let frame = Frame::SHORT;
        assert_eq!(frame.first_fit(&[], 15_000), Some(vec![piece(0, 15_000)]));
        let taken = [piece(10_000, 5_000), piece(30_000, 10_000)];
        assert_eq!(frame.first_fit(&taken, 10_000), Some(vec![piece(0, 10_000)]));
        assert_eq!(frame.first_fit(&taken, 12_000), Some(vec![piece(15_000, 12_000)]));
        assert_eq!(frame.first_fit(&taken, 20_000), Some(vec![piece(0, 10_000), piece(15_000, 10_000)]));
        assert_eq!(frame.first_fit(&taken, 25_000), Some(vec![piece(0, 10_000), piece(15_000, 15_000)]));
        assert_eq!(frame.first_fit(&taken, 35_000), None, "three pieces");
        assert_eq!(frame.first_fit(&[piece(0, 50_000)], 1), None);
    }

    #[test]
    fn windows_of_one_container_on_several_cards_lie_at_the_same_place_where_they_can() {
        let frame = Frame::SHORT;
        let (a, b): (&[_], &[_]) = (&[piece(0, 15_000)], &[piece(15_000, 20_000)]);
        assert_eq!(frame.first_common_fit(&[a, b], 15_000), Some(vec![piece(35_000, 15_000)]));
        assert_eq!(frame.first_common_fit(&[a, b], 16_000), None);
    }

    #[test]
    fn packed_windows_follow_each_other_and_every_place_is_one() {
        let frame = Frame::SHORT;
        let places = frame.packed(&[15_000, 35_000]).unwrap();
        assert_eq!(places, [vec![piece(0, 15_000)], vec![piece(15_000, 35_000)]]);
        assert!(places.iter().all(|place| is_place(frame, place)));
        assert_eq!(frame.packed(&[15_000, 35_001]), None);
        for wrong in [vec![], vec![piece(0, 0)], vec![piece(40_000, 10_001)], vec![piece(5, 9), piece(10, 1)]]
        {
            assert!(!is_place(frame, &wrong), "{wrong:?}");
        }
    }

    #[test]
    fn seven_windows_need_a_long_frame_and_others_keep_a_reserve() {
        assert_eq!(Frame::for_windows(6), Frame::SHORT);
        assert_eq!(Frame::for_windows(7), Frame::LONG);
        assert_eq!(Frame::SHORT.share(30), 15_000);
        assert_eq!((Frame::SHORT.room(false), Frame::SHORT.room(true)), (50_000, 47_500));
    }
}
