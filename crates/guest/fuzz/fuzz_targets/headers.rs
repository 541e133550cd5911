#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sandhold_guest::fuzzing::headers(bytes));
