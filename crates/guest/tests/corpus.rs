//! The inputs that the fuzz targets start from, and everything that they ever found.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path};

use sandhold_guest::fuzzing;

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
fn accounts() {
    replay("accounts", fuzzing::accounts);
}

#[test]
fn headers() {
    replay("headers", fuzzing::headers);
}

#[test]
fn kernels() {
    replay("kernels", fuzzing::kernels);
}

#[test]
fn messages() {
    replay("messages", fuzzing::messages);
}

#[test]
fn paths() {
    replay("paths", fuzzing::paths);
}

#[test]
fn signatures() {
    replay("signatures", fuzzing::signatures);
}

#[test]
fn uploads() {
    replay("uploads", fuzzing::uploads);
}
