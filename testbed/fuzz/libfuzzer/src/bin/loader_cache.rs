//! Fuzzes the adding of libraries to a loader's cache.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gpushare_fuzz::loader_cache(data));
