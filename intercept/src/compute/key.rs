//! The kind of a launch. Launches of one kind are assumed to cost the same.

/// A function with its grid and block, or an executable graph, as a hash. Two kinds with the same hash share
/// their cost: event pairs and the meter then settle a mixture of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u64);

/// Places in the tables of costs.
pub(super) const PLACES: usize = 4096;

/// Odd numbers without a pattern. Multiplication by them spreads handles, which differ in few bits.
const FACTORS: [u64; 4] =
    [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0xd6e8_feb8_6659_fd93];

impl Key {
    /// A launch of `function` with `grid` and `block` in three dimensions each.
    #[inline(always)]
    pub const fn kernel(function: usize, grid: [u32; 3], block: [u32; 3]) -> Self {
        // Four products that do not wait for each other.
        Self(
            (function as u64).wrapping_mul(FACTORS[0])
                ^ pair(grid[0], grid[1]).wrapping_mul(FACTORS[1])
                ^ pair(grid[2], block[0]).wrapping_mul(FACTORS[2])
                ^ pair(block[1], block[2]).wrapping_mul(FACTORS[3]),
        )
    }

    /// A launch of an executable graph.
    #[inline(always)]
    pub const fn graph(executable: usize) -> Self {
        Self((executable as u64).wrapping_mul(FACTORS[1]) ^ FACTORS[2])
    }

    pub(super) const fn bits(self) -> u64 {
        self.0
    }

    pub(super) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Place in the tables: the upper bits of a product depend on all bits of its factors.
    #[inline(always)]
    pub(super) const fn place(self) -> usize {
        (self.0 >> 52) as usize % PLACES
    }

    /// Distinguishes kinds that map to the same place. Never 0, which marks an empty place.
    #[inline(always)]
    pub(super) const fn tag(self) -> u32 {
        ((self.0 >> 20) & 0xffff_ffff) as u32 | 1
    }
}

const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_launch_makes_another_kind() {
        let base = Key::kernel(0x7f00_1234_5600, [1, 2, 3], [4, 5, 6]);
        for (what, other) in [
            ("function", Key::kernel(0x7f00_1234_5610, [1, 2, 3], [4, 5, 6])),
            ("grid x", Key::kernel(0x7f00_1234_5600, [2, 2, 3], [4, 5, 6])),
            ("grid y", Key::kernel(0x7f00_1234_5600, [1, 1, 3], [4, 5, 6])),
            ("grid z", Key::kernel(0x7f00_1234_5600, [1, 2, 4], [4, 5, 6])),
            ("block x", Key::kernel(0x7f00_1234_5600, [1, 2, 3], [5, 5, 6])),
            ("block y", Key::kernel(0x7f00_1234_5600, [1, 2, 3], [4, 4, 6])),
            ("block z", Key::kernel(0x7f00_1234_5600, [1, 2, 3], [4, 5, 7])),
            ("graph", Key::graph(0x7f00_1234_5600)),
        ] {
            assert_ne!((base.place(), base.tag()), (other.place(), other.tag()), "another {what}");
        }
    }

    #[test]
    fn neighbouring_handles_spread_over_the_table() {
        let mut taken = vec![false; PLACES];
        for index in 0..1000 {
            taken[Key::kernel(0x5555_0000_0000 + index * 64, [132, 1, 1], [256, 1, 1]).place()] = true;
        }
        let places = taken.iter().filter(|taken| **taken).count();
        assert!(places > 850, "{places} places for 1000 functions; chance gives 886");
    }
}
