#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mooncake_relay::fuzzing::frames(input));
