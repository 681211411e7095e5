//! Fuzzes the edit of a config.json.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gpushare_fuzz::edit(data));
