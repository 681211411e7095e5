//! Fuzzes the reader of the administrator's settings.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gpushare_fuzz::settings(data));
