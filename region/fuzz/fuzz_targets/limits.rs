//! The host's readers of a limits file that a container may have changed.
#![no_main]

#[path = "../../tests/properties/mod.rs"]
#[allow(dead_code)]
mod properties;

use gpushare_region::{LIMITS_LEN, encode_limits};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    properties::limits(data);
    let mut file = encode_limits(&[]).expect("no GPU is not too many");
    let length = data.len().min(LIMITS_LEN);
    file[..length].copy_from_slice(&data[..length]);
    properties::limits(&file);
});
