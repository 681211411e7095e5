//! Fuzzes the host's readers of a limits file.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gpushare_fuzz::limits(data));
