//! The inputs that the fuzz targets start from, and everything that they ever found.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path};

/// Runs every input of a corpus; a panic in it fails the test.
fn replay(name: &str, run: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(name);
    let mut inputs = 0;
    for entry in fs::read_dir(&corpus).unwrap() {
        run(&fs::read(entry.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs >= 20, "{} has {inputs} inputs", corpus.display());
}

#[test]
fn heads() {
    replay("heads", sandhold_gateway::fuzzing::heads);
}

#[test]
fn paths() {
    replay("paths", sandhold_gateway::fuzzing::paths);
}

proptest::proptest! {
    // What it finds belongs into the corpus by name.
    #![proptest_config(proptest::test_runner::Config {
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn arbitrary_heads(lines in proptest::collection::vec("[ -~]{0,60}", 0..8)) {
        sandhold_gateway::fuzzing::heads(lines.join("\n").as_bytes());
    }

    #[test]
    fn arbitrary_paths(path in "(/|%2f|%2e|\\.|init|%69nit|tunnel|;|%25|[a-z%\\\\]){0,12}") {
        sandhold_gateway::fuzzing::paths(path.as_bytes());
    }
}
