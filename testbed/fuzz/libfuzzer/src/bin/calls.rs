//! Fuzzes the supervisor's reader of calls.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gpushare_fuzz::calls(data));
