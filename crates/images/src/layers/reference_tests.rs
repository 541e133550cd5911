//! BC-113, BC-115: what is laid down is what a reference makes of the same layers: GNU tar, with the
//! marks of what is removed carried out by the letter of the image format.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use super::*;

/// A layer: how its folder is made (in `sh`), the names that its marks remove from what is below, and
/// the folders whose content they hide.
struct Layer {
    script: &'static str,
    removes: &'static [&'static str],
    hides: &'static [&'static str],
}

const LAYERS: [Layer; 4] = [
    Layer {
        script: "mkdir -p d/deep s bin only; echo a > d/a; echo b > d/b; echo e > e; echo x > d/deep/x
            ln -s /bin/su s/one; ln -s ../nowhere s/dangling; ln -s s/one top
            echo su > bin/su; chmod 4755 bin/su; ln bin/su bin/twin; echo secret > closed; chmod 0 closed
            chown 1234:4321 d/b; chmod 1777 s; touch -d @1000000000 bin/su d/a",
        removes: &[],
        hides: &[],
    },
    Layer {
        script: "mkdir -p d; echo c > d/c; touch d/.wh.a d/.wh..wh..opq; echo w > d/.whatever
            mkdir -p s; ln -s /etc s/two; touch .wh.top; chmod 700 s",
        removes: &["d/a", "top"],
        hides: &["d"],
    },
    Layer {
        script: "mkdir -p d bin; echo again > d/a; touch .wh.e; echo new > bin/su; chmod 755 bin/su
            mkdir top; echo f > top/f",
        removes: &["e"],
        hides: &[],
    },
    Layer {
        script: "mkdir -p s; ln -s one s/three; touch .wh.nothing; rmdir only 2>/dev/null; echo file > only",
        removes: &["nothing"],
        hides: &[],
    },
];

fn sh(directory: &Path, script: &str) {
    let status = Command::new("sh")
        .args(["-c", script])
        .current_dir(directory)
        .status();
    assert!(status.unwrap().success(), "{script}");
}

/// Lays a layer down as the reference does: first what it removes from below, then its own files.
fn lay_reference(root: &Path, layer: &Layer, archive: &Path) {
    for name in layer.removes {
        sh(root, &format!("rm -rf './{name}'"));
    }
    for name in layer.hides {
        sh(root, &format!("find './{name}' -mindepth 1 -delete"));
    }
    let archive = archive.display();
    sh(
        root,
        &format!("tar --numeric-owner --same-owner -p -xf {archive} --exclude='.wh.*'"),
    );
}

/// What a tree holds, by name: kind, mode, owner, links, time of files, and content.
fn manifest(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let kind = metadata.file_type();
        let content = if kind.is_symlink() {
            format!("-> {}", fs::read_link(&path).unwrap().display())
        } else if kind.is_dir() {
            let entries = fs::read_dir(&path).unwrap();
            left.extend(entries.map(|entry| entry.unwrap().path()));
            String::new()
        } else {
            let digest = Digest::of(&fs::read(&path).unwrap());
            format!(
                "{digest} links {} at {}",
                metadata.nlink(),
                metadata.mtime()
            )
        };
        let name = path.strip_prefix(root).unwrap().to_owned();
        let owner = (metadata.uid(), metadata.gid());
        found.insert(name, format!("{:o} {owner:?} {content}", metadata.mode()));
    }
    // The root itself is the place that was given.
    found.remove(Path::new(""));
    found
}

#[test]
fn layers_are_what_the_reference_makes_of_them() {
    // BC-113, BC-115
    let folder = tempfile::tempdir().unwrap();
    let (ours, reference) = (folder.path().join("ours"), folder.path().join("reference"));
    for place in [&ours, &reference] {
        fs::create_dir(place).unwrap();
    }
    let mut budget = Budget::new(10_000, 1 << 20);
    for (number, layer) in LAYERS.iter().enumerate() {
        let made = folder.path().join(format!("layer{number}"));
        fs::create_dir(&made).unwrap();
        sh(&made, layer.script);
        let archive = folder.path().join(format!("{number}.tar"));
        sh(
            &made,
            &format!("tar --numeric-owner -cf {} $(ls -A)", archive.display()),
        );
        if number == LAYERS.len() - 1 {
            // A folder of the layers below, in whose place this one has a file.
            sh(&reference, "rmdir only");
        }
        lay_reference(&reference, layer, &archive);
        let root = Confined::open(&ours).unwrap();
        let bytes = fs::File::open(&archive).unwrap();
        unpack(bytes, &root, &mut budget, Owners::Kept, Whiteouts::Applied).unwrap();
        assert_eq!(manifest(&ours), manifest(&reference), "layer {number}");
    }
}
