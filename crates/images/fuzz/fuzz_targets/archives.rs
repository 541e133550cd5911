#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sandhold_images::fuzzing::archives(bytes));
