//! Fuzzes the readers of the driver's files below /proc.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gpushare_fuzz::proc(data));
