//! Fuzzes the host's reader of a usage file.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gpushare_fuzz::usage(data));
