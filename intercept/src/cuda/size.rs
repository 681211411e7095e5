//! Computes how much device memory a request takes. The arithmetic saturates: a request that is too large to
//! compute never fits.

/// `CUarray_format` with the bytes of one texel of one channel.
const CHANNEL_FORMATS: [(u32, u64); 21] = [
    (0x01, 1), // unsigned 8
    (0x02, 2),
    (0x03, 4),
    (0x08, 1), // signed 8
    (0x09, 2),
    (0x0a, 4),
    (0x10, 2), // half
    (0x20, 4), // float
    (0xc0, 1), // unsigned normalised 8 × 1, 2, 4 channels
    (0xc1, 1),
    (0xc2, 1),
    (0xc3, 2), // unsigned normalised 16
    (0xc4, 2),
    (0xc5, 2),
    (0xc6, 1), // signed normalised 8
    (0xc7, 1),
    (0xc8, 1),
    (0xc9, 2), // signed normalised 16
    (0xca, 2),
    (0xcb, 2),
    (0x50, 4), // 10-10-10-2: one word for all channels, charged as one channel of four bytes
];

/// Formats whose texel has a fixed size for any number of channels, with twice the bytes per texel.
const TEXEL_FORMATS: [(u32, u64); 17] = [
    (0xb0, 3),  // NV12
    (0x9f, 6),  // P010
    (0xa1, 6),  // P016
    (0xa2, 4),  // NV16
    (0xa3, 8),  // P210
    (0xa4, 8),  // P216
    (0xa5, 4),  // YUY2
    (0xa6, 8),  // Y210
    (0xa7, 8),  // Y216
    (0xa8, 8),  // AYUV
    (0xa9, 8),  // Y410
    (0xb1, 16), // Y416
    (0xb2, 6),  // 4:4:4 planar, 8 bits
    (0xb3, 12), // 4:4:4 planar, 10 bits
    (0xb4, 6),  // 4:4:4 semi-planar, 8 bits
    (0xb5, 12), // 4:4:4 semi-planar, 16 bits
    (0x51, 8),  // 10-10-10-2 of integers
];

/// Block-compressed formats: bytes of a block of four by four texels.
const BLOCK_FORMATS: core::ops::RangeInclusive<u32> = 0x91..=0x9e;
const SMALL_BLOCKS: [u32; 4] = [0x91, 0x92, 0x97, 0x98]; // BC1, BC4

const LAYERED: u32 = 0x01;
const CUBEMAP: u32 = 0x04;
const SPARSE: u32 = 0x40;
const DEFERRED: u32 = 0x80;

const MIB: u64 = 1 << 20;

/// The memory that the driver takes for a request of `bytes`: below 1 MiB a multiple of 512 bytes, from 1 MiB
/// on a multiple of 2 MiB.
pub fn charged(bytes: u64) -> u64 {
    let step = if bytes < MIB { 512 } else { 2 * MIB };
    bytes.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

/// The most bytes that pitched memory of `width` bytes by `height` rows takes, before rounding.
pub fn pitched(width: u64, height: u64) -> u64 {
    width.checked_next_multiple_of(512).map_or(u64::MAX, |pitch| pitch.saturating_mul(height))
}

/// The shape of an array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Texels.
    pub width: u64,
    /// Texels; 0 for a one-dimensional array.
    pub height: u64,
    /// Texels, layers or cube faces; 0 for fewer dimensions.
    pub depth: u64,
    /// `CUarray_format`.
    pub format: u32,
    /// 1, 2 or 4.
    pub channels: u32,
    /// `CUDA_ARRAY3D_*`.
    pub flags: u32,
}

impl Shape {
    /// Bytes of an array with this shape before rounding. Arrays that get their memory later take nothing.
    pub fn bytes(&self) -> u64 {
        if self.flags & (SPARSE | DEFERRED) != 0 { 0 } else { self.level_bytes(0) }
    }

    /// Bytes of a mipmapped array with `levels` requested levels, before rounding.
    pub fn mipmap_bytes(&self, levels: u32) -> u64 {
        if self.flags & (SPARSE | DEFERRED) != 0 {
            return 0;
        }
        let layers = self.flags & (LAYERED | CUBEMAP) != 0;
        let longest = self.width.max(self.height).max(if layers { 0 } else { self.depth }).max(1);
        let most = longest.ilog2() + 1;
        (0..levels.clamp(1, most)).fold(0, |sum, level| self.level_bytes(level).saturating_add(sum))
    }

    fn level_bytes(&self, level: u32) -> u64 {
        let at_level = |length: u64| (length >> level).max(1);
        let layers = self.flags & (LAYERED | CUBEMAP) != 0;
        let depth = if layers { self.depth.max(1) } else { at_level(self.depth) };
        let (width, height) = (at_level(self.width), at_level(self.height));
        if BLOCK_FORMATS.contains(&self.format) {
            let block = if SMALL_BLOCKS.contains(&self.format) { 8 } else { 16 };
            return width
                .div_ceil(4)
                .saturating_mul(height.div_ceil(4))
                .saturating_mul(depth)
                .saturating_mul(block);
        }
        let texels = width.saturating_mul(height).saturating_mul(depth);
        texels.saturating_mul(self.twice_texel_bytes()).div_ceil(2)
    }

    /// Twice the bytes of a texel, since half-sampled formats have fractional bytes per texel.
    fn twice_texel_bytes(&self) -> u64 {
        let find = |table: &[(u32, u64)]| table.iter().find(|row| row.0 == self.format).map(|row| row.1);
        if let Some(bytes) = find(&CHANNEL_FORMATS) {
            return 2 * bytes * u64::from(self.channels.clamp(1, 4));
        }
        find(&TEXEL_FORMATS).unwrap_or(2 * 4 * 4) // unknown: the largest, four channels of four bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_round_as_the_driver_rounds() {
        for (bytes, want) in [
            (0, 0),
            (1, 512),
            (513, 1024),
            (MIB - 1, MIB),
            (MIB, 2 * MIB),
            (2 * MIB + 1, 4 * MIB),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(charged(bytes), want, "{bytes} bytes");
        }
        assert_eq!(pitched(1, 3), 1536);
        assert_eq!(pitched(u64::MAX, 2), u64::MAX);
    }

    /// Case 6: bits used as bytes, and one-dimensional arrays charged nothing.
    #[test]
    fn case_6_arrays_take_bytes_per_texel_in_one_two_and_three_dimensions() {
        let shape = |width, height, depth, format, channels, flags| Shape {
            width,
            height,
            depth,
            format,
            channels,
            flags,
        };
        for (shape, want) in [
            (shape(1000, 0, 0, 0x20, 1, 0), 4000),
            (shape(1000, 10, 0, 0x01, 4, 0), 40_000),
            (shape(16, 16, 16, 0x10, 2, 0), 16_384),
            (shape(16, 16, 6, 0x03, 1, CUBEMAP), 6144),
            (shape(16, 16, 0, 0x91, 4, 0), 128),
            (shape(17, 17, 0, 0x9d, 4, 0), 400),
            (shape(16, 16, 0, 0xb0, 3, 0), 384),
            (shape(16, 16, 0, 0x777, 1, 0), 4096),
            (shape(1 << 20, 1 << 20, 0, 0x20, 4, SPARSE), 0),
            (shape(1 << 20, 1 << 20, 0, 0x20, 4, DEFERRED), 0),
            (shape(u64::MAX, u64::MAX, 2, 0x20, 4, 0), u64::MAX / 2 + 1),
        ] {
            assert_eq!(shape.bytes(), want, "{shape:?}");
        }
    }

    /// Case 7: levels ignored.
    #[test]
    fn case_7_a_mipmap_takes_the_sum_of_the_levels_really_made() {
        let flat = Shape { width: 8, height: 8, format: 0x20, channels: 1, ..Shape::default() };
        let layered = Shape { depth: 3, flags: LAYERED, ..flat };
        let solid = Shape { depth: 8, ..flat };
        for (shape, levels, want) in [
            (flat, 1, 256),
            (flat, 2, 256 + 64),
            (flat, 99, 256 + 64 + 16 + 4),
            (flat, 0, 256),
            (layered, 99, 3 * (256 + 64 + 16 + 4)),
            (solid, 99, 2048 + 256 + 32 + 4),
        ] {
            assert_eq!(shape.mipmap_bytes(levels), want, "{shape:?}, {levels} levels");
        }
    }
}
