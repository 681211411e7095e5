//! The host's reader of a usage file. The fuzzer writes the front of the file and says how the rest is filled: it would never
//! find a whole file of the right length by itself.
#![no_main]

#[path = "../../tests/properties/mod.rs"]
#[allow(dead_code)]
mod properties;

use gpushare_region::{USAGE_HEADER_LEN, USAGE_LEN, empty_usage_header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
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
});
