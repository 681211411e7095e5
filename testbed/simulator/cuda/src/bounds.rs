//! The largest arrays that a device accepts, by its attributes (CUDA programming guide, "Technical
//! Specifications per Compute Capability", 9.0). A larger one fails with CUDA_ERROR_INVALID_VALUE.

/// Width of an array of one or two dimensions.
pub const LINE: u32 = 131_072;
/// Height of an array of two dimensions.
pub const HEIGHT: u32 = 65_536;
/// Each extent of an array of three dimensions.
pub const CUBE: u32 = 16_384;
/// Each extent of a layered or mipmapped array and of a cube map.
pub const SIDE: u32 = 32_768;
/// Layers of a layered array.
pub const LAYERS: u32 = 2_048;
/// Layers of a layered cube map, which has six faces per cube.
pub const FACES: u32 = 2_046;

const LAYERED: u32 = 0x01;
const CUBE_MAP: u32 = 0x04;

/// Whether a device accepts an array with these extents and flags, or a mipmapped array whose first level has
/// them.
pub fn allow([width, height, depth]: [usize; 3], flags: u32, is_mipmapped: bool) -> bool {
    let within = |most: [u32; 3]| {
        [width, height, depth].into_iter().zip(most).all(|(extent, most)| extent <= most as usize)
    };
    match (flags & CUBE_MAP != 0, flags & LAYERED != 0) {
        (true, layered) => {
            let faces = if layered { FACES } else { 6 };
            width == height && depth > 0 && depth.is_multiple_of(6) && within([SIDE, SIDE, faces])
        }
        (false, true) => within([SIDE, SIDE, LAYERS]),
        (false, false) if depth > 0 => within([CUBE; 3]),
        (false, false) if is_mipmapped => within([SIDE, SIDE, 0]),
        (false, false) => within([LINE, if height > 0 { HEIGHT } else { 0 }, 0]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_has_the_bounds_of_its_form() {
        for (width, height, depth, flags, is_mipmapped, want) in [
            (131_072, 0, 0, 0, false, true),
            (131_073, 0, 0, 0, false, false),
            (131_072, 65_536, 0, 0, false, true),
            (131_072, 65_537, 0, 0, false, false),
            (16_384, 16_384, 16_384, 0, false, true),
            (16_385, 1, 1, 0, false, false),
            (32_768, 32_768, 0, 0, true, true),
            (32_769, 1, 0, 0, true, false),
            (16_384, 16_384, 16_384, 0, true, true),
            (32_768, 32_768, 2_048, LAYERED, false, true),
            (32_768, 32_768, 2_049, LAYERED, false, false),
            (32_768, 32_768, 6, CUBE_MAP, false, true),
            (32_768, 16_384, 6, CUBE_MAP, false, false),
            (64, 64, 5, CUBE_MAP, false, false),
            (64, 64, 2_046, CUBE_MAP | LAYERED, false, true),
        ] {
            let extents = [width, height, depth];
            let got = allow(extents, flags, is_mipmapped);
            assert_eq!(got, want, "{extents:?}, flags {flags}, mipmapped: {is_mipmapped}");
        }
    }
}
