//! Every input that the fuzz targets start from, as a test that always runs.

use std::{fs, path::Path};

fn replay(target: &str, parser: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let mut inputs = 0;
    for entry in fs::read_dir(&corpus).unwrap() {
        parser(&fs::read(entry.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs >= 10, "{} has {inputs} inputs", corpus.display());
}

#[test]
fn bodies() {
    replay("bodies", sandhold_api::fuzzing::bodies);
}

#[test]
fn queries() {
    replay("queries", sandhold_api::fuzzing::queries);
}

#[test]
fn page_tokens() {
    replay("page_tokens", sandhold_api::fuzzing::page_tokens);
}
