#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder to work in");
    sandhold_images::fuzzing::layers(bytes, folder.path());
});
