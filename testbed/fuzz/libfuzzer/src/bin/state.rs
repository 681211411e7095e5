//! Fuzzes the reader of the state on a hook's standard input.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gpushare_fuzz::state(data));
