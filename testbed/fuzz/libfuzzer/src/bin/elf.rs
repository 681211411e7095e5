//! Fuzzes the fitting of our libraries to a driver's.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gpushare_fuzz::elf(data));
