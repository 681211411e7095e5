//! The readers of a region's two files, which a container may have written.

use gpushare_region::{LIMITS_LEN, USAGE_HEADER_LEN, USAGE_LEN, empty_usage_header, encode_limits};

#[path = "../../../region/tests/properties/mod.rs"]
mod properties;

/// Runs the host's readers of a limits file on `data`, and on a valid file that begins with `data`.
pub fn limits(data: &[u8]) {
    properties::limits(data);
    let mut file = encode_limits(&[], 0).expect("no GPU is not too many");
    let length = data.len().min(LIMITS_LEN);
    file[..length].copy_from_slice(&data[..length]);
    properties::limits(&file);
}

/// Runs the host's reader of a usage file. The first byte of `data` says how the file is filled; the rest
/// overwrites a part of it. Without that, a fuzzer would never find a whole file of the right length.
pub fn usage(data: &[u8]) {
    let Some((&kind, front)) = data.split_first() else { return };
    let mut file = vec![if kind & 1 == 0 { 0 } else { 0xff }; USAGE_LEN];
    // The header is valid, apart from what the fuzzer writes over it.
    file[..USAGE_HEADER_LEN].copy_from_slice(&empty_usage_header());
    let start = if kind & 2 == 0 { 0 } else { 24 };
    let end = USAGE_LEN.min(start + front.len());
    file[start..end].copy_from_slice(&front[..end - start]);
    if kind & 4 != 0 {
        file.truncate(end);
    }
    properties::usage(&file);
}
