//! The two files of a container, which it may have written.

use gpushare_region::{LIMITS_LEN, USAGE_HEADER_LEN, USAGE_LEN, empty_usage_header, encode_limits};

#[path = "../../region/tests/properties/mod.rs"]
mod properties;

/// The host's readers of a limits file: of the bytes `data`, and of a right file that begins with them.
pub fn limits(data: &[u8]) {
    properties::limits(data);
    let mut file = encode_limits(&[]).expect("no GPU is not too many");
    let length = data.len().min(LIMITS_LEN);
    file[..length].copy_from_slice(&data[..length]);
    properties::limits(&file);
}

/// The host's reader of a usage file. `data` is the front of the file and says how the rest is filled: a fuzzer would never find
/// a whole file of the right length by itself.
pub fn usage(data: &[u8]) {
    let Some((&kind, front)) = data.split_first() else { return };
    let mut file = vec![if kind & 1 == 0 { 0 } else { 0xff }; USAGE_LEN];
    // Right but for what the fuzzer puts over it.
    file[..USAGE_HEADER_LEN].copy_from_slice(&empty_usage_header());
    let start = if kind & 2 == 0 { 0 } else { 24 };
    let end = USAGE_LEN.min(start + front.len());
    file[start..end].copy_from_slice(&front[..end - start]);
    if kind & 4 != 0 {
        file.truncate(end);
    }
    properties::usage(&file);
}
