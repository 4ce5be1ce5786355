#![no_main]

#[path = "../../tests/fuzz/mod.rs"]
mod fuzz;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::metadata(input));
