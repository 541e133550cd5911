use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
};

use tar::{Builder, EntryType, Header};

use super::*;

/// An archive being written.
struct Tar(Builder<Vec<u8>>);

impl Tar {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    fn entry(mut self, kind: EntryType, name: &str, mode: u32, target: &str, text: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_000_000_000);
        header.set_size(text.len() as u64);
        // Names that the crate itself would refuse.
        let fields = header.as_old_mut();
        fields.name[..name.len()].copy_from_slice(name.as_bytes());
        fields.linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        self.0.append(&header, text).unwrap();
        self
    }

    fn file(self, name: &str, text: &str) -> Self {
        self.entry(EntryType::Regular, name, 0o644, "", text.as_bytes())
    }

    fn folder(self, name: &str) -> Self {
        self.entry(EntryType::Directory, name, 0o755, "", b"")
    }

    fn link(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Symlink, name, 0o777, target, b"")
    }

    fn hard_link(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Link, name, 0o644, target, b"")
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

/// A root, and something beside it that must not change.
struct World {
    folder: tempfile::TempDir,
    budget: Budget,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("root")).unwrap();
        fs::create_dir(folder.path().join("outside")).unwrap();
        fs::write(folder.path().join("outside/canary"), "outside").unwrap();
        Self {
            folder,
            budget: Budget::new(1_000, 1 << 30),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("root").join(name)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    fn lay(&mut self, tar: Tar) -> Result<(), UnpackError> {
        let root = Confined::open(&self.folder.path().join("root")).unwrap();
        unpack(
            &tar.bytes()[..],
            &root,
            &mut self.budget,
            Owners::Kept,
            Whiteouts::Applied,
        )
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn assert_outside_is_as_it_was(&self) {
        let outside = self.folder.path().join("outside");
        assert_eq!(
            fs::read_to_string(outside.join("canary")).unwrap(),
            "outside"
        );
        assert_eq!(fs::metadata(outside.join("canary")).unwrap().nlink(), 1);
        assert_eq!(fs::read_dir(outside).unwrap().count(), 1);
        assert_eq!(fs::read_dir(self.folder.path()).unwrap().count(), 2);
    }
}

#[test]
fn layers_remove_what_is_below_them_and_nothing_of_their_own() {
    // BC-113
    let mut world = World::new();
    let below = Tar::new().folder("d").file("d/a", "old").file("d/b", "");
    world.lay(below.file("e", "")).unwrap();
    let middle = Tar::new()
        .file("d/.wh.a", "")
        // What comes before the mark in the same layer stays.
        .file("d/c", "new")
        .hard_link("d/.wh..wh..opq", "d/c")
        .file("d/.whatever", "")
        .file(".wh.nothing", "")
        .file("nowhere/.wh.nothing", "");
    world.lay(middle).unwrap();
    assert_eq!(world.names("d"), [".whatever", "c"]);
    world.lay(Tar::new().file("d/a", "new")).unwrap();
    assert_eq!(world.names("d"), [".whatever", "a", "c"]);
    assert_eq!(world.text("d/a"), "new");
    world.lay(Tar::new().file(".wh.d", "")).unwrap();
    assert_eq!(world.names(""), ["e"]);
}

#[test]
fn a_hidden_folder_keeps_what_its_own_layer_put_deep_inside() {
    // BC-113
    let mut world = World::new();
    let below = Tar::new().file("d/s/old", "").file("d/t/old", "");
    world.lay(below).unwrap();
    let above = Tar::new().file("d/s/new", "").file("d/.wh..wh..opq", "");
    world.lay(above).unwrap();
    assert_eq!(world.names("d"), ["s"]);
    assert_eq!(world.names("d/s"), ["new"]);
}

#[test]
fn files_are_what_the_archive_says() {
    // BC-115
    let mut world = World::new();
    let file = |tar: Tar, name, mode| tar.entry(EntryType::Regular, name, mode, "", b"x");
    let mut tar = file(Tar::new().folder("bin"), "bin/su", 0o4755);
    tar = file(tar, "closed", 0);
    tar = tar.link("link", "/bin/su").hard_link("bin/twin", "bin/su");
    world.lay(tar).unwrap();
    let above = Tar::new()
        .hard_link("third", "bin/twin")
        .link("bin/deep", "../link");
    world.lay(above).unwrap();
    let su = fs::metadata(world.path("bin/su")).unwrap();
    assert_eq!((su.mode() & 0o7777, su.nlink()), (0o4755, 3));
    assert_eq!(su.mtime(), 1_000_000_000);
    assert_eq!(
        fs::metadata(world.path("closed")).unwrap().mode() & 0o7777,
        0
    );
    assert_eq!(
        fs::read_link(world.path("link")).unwrap(),
        Path::new("/bin/su")
    );
}

#[test]
fn capabilities_of_files_are_kept() {
    // BC-115
    let mut world = World::new();
    // cap_net_raw, as `setcap` writes it.
    let value = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let mut builder = Tar::new().0;
    let records = [
        ("SCHILY.xattr.security.capability", &value[..]),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
    ];
    builder.append_pax_extensions(records).unwrap();
    world.lay(Tar(builder).file("ping", "x")).unwrap();
    let file = fs::File::open(world.path("ping")).unwrap();
    let mut read = [0; 64];
    let length = rustix::fs::fgetxattr(&file, "security.capability", &mut read).unwrap();
    assert_eq!(&read[..length], value);
    assert!(rustix::fs::fgetxattr(&file, "trusted.overlay.opaque", &mut read).is_err());
}

#[test]
fn names_that_climb_are_refused() {
    // R-P5
    for tar in [
        Tar::new().file("../up", ""),
        Tar::new().file("a/../../up", ""),
        Tar::new().folder(".."),
        Tar::new().file("a", "").hard_link("b", "../outside/canary"),
        Tar::new().file("a/.wh...", ""),
    ] {
        let mut world = World::new();
        let refused = world.lay(tar);
        assert!(
            matches!(refused, Err(UnpackError::Name { .. })),
            "{refused:?}"
        );
        world.assert_outside_is_as_it_was();
    }
}

#[test]
fn links_lead_nowhere_outside() {
    // R-P5
    let victim = World::new();
    let outside = victim.folder.path().join("outside");
    let target = outside.to_str().unwrap();
    for tar in [
        Tar::new().link("l", target).file("l/new", ""),
        Tar::new().link("l", target).file("l/canary", "changed"),
        Tar::new()
            .link("l", "../outside")
            .file("l/canary", "changed"),
        Tar::new().link("l", target).hard_link("h", "l/canary"),
        Tar::new().link("l", target).file("l/.wh.canary", ""),
        Tar::new().link("l", target).file("l/.wh..wh..opq", ""),
        Tar::new()
            .link("l", target)
            .link("l/m", "..")
            .file("l/m/new", ""),
        Tar::new()
            .link("l", target)
            .folder("l/sub")
            .file("l/sub/x", ""),
    ] {
        // Some are laid down inside the root, some refused; nothing is done outside.
        let mut world = World::new();
        let _ = world.lay(tar);
        world.assert_outside_is_as_it_was();
        victim.assert_outside_is_as_it_was();
    }
}

#[test]
fn a_link_of_the_layer_below_is_followed_inside_the_root() {
    // R-P5: layers write through `/lib`, which is a link to `usr/lib` nowadays.
    let mut world = World::new();
    let below = Tar::new()
        .folder("usr/lib")
        .link("lib", "/usr/lib")
        .link("x", "../../usr");
    world.lay(below).unwrap();
    world
        .lay(Tar::new().file("lib/a", "a").file("x/lib/b", "b"))
        .unwrap();
    assert_eq!(world.names("usr/lib"), ["a", "b"]);
    // A folder in the place of a link replaces it, as its layer says.
    world.lay(Tar::new().folder("lib")).unwrap();
    assert_eq!(world.names("lib"), [""; 0]);
    assert_eq!(world.names("usr/lib"), ["a", "b"]);
}

#[test]
fn links_that_loop_are_refused() {
    // R-P5
    let mut world = World::new();
    symlink("b", world.path("a")).unwrap();
    symlink("a", world.path("b")).unwrap();
    let refused = world.lay(Tar::new().file("a/x", ""));
    assert!(
        matches!(refused, Err(UnpackError::File { .. })),
        "{refused:?}"
    );
}

#[test]
fn devices_and_pipes_are_refused() {
    // R-P5
    for kind in [EntryType::Char, EntryType::Block, EntryType::Fifo] {
        let mut world = World::new();
        let refused = world.lay(Tar::new().entry(kind, "dev/x", 0o666, "", b""));
        assert!(
            matches!(refused, Err(UnpackError::Special { .. })),
            "{refused:?}"
        );
    }
}

#[test]
fn what_an_entry_announces_is_counted_before_it_is_read() {
    // R-P5: a bomb is refused by its size, which costs nothing to announce.
    let mut world = World::new();
    world.budget = Budget::new(10, 1_000);
    let mut header = Header::new_gnu();
    header.as_old_mut().name[0] = b'a';
    header.set_size(1 << 42);
    header.set_mode(0o644);
    header.set_cksum();
    let root = Confined::open(&world.path("")).unwrap();
    let endless = header.as_bytes().chain(io::repeat(0));
    let refused = unpack(
        endless,
        &root,
        &mut world.budget,
        Owners::Kept,
        Whiteouts::Applied,
    );
    assert!(
        matches!(refused, Err(UnpackError::TooLarge { .. })),
        "{refused:?}"
    );
    assert!(!world.path("a").exists());
}

#[test]
fn entries_are_counted_over_all_layers() {
    // R-P5
    let mut world = World::new();
    world.budget = Budget::new(3, 1_000);
    world.lay(Tar::new().file("a", "").file("b", "")).unwrap();
    world.lay(Tar::new().file("a", "")).unwrap();
    let refused = world.lay(Tar::new().file(".wh.a", ""));
    assert!(matches!(
        refused,
        Err(UnpackError::TooMany { entries_max: 3 })
    ));
}

#[test]
fn folders_are_not_nested_without_end_by_way_of_links() {
    // R-P5
    let mut world = World::new();
    world.budget = Budget::new(100_000, 1_000);
    let deep = "x/".repeat(45);
    let mut tar = Tar::new().folder(&deep).link("l0", &deep);
    for number in 0..20 {
        let (from, to) = (format!("l{number}"), format!("l{}", number + 1));
        let next = format!("{from}/{deep}");
        tar = tar.folder(&next).link(&to, &next);
    }
    let refused = world.lay(tar);
    assert!(
        matches!(refused, Err(UnpackError::File { .. })),
        "{refused:?}"
    );
}

#[test]
fn runs_of_zeros_take_no_room() {
    // BC-118
    let mut world = World::new();
    let mut bytes = vec![0; 8 << 20];
    bytes[4 << 20] = 1;
    let tar = Tar::new().entry(EntryType::Regular, "sparse", 0o644, "", &bytes);
    world.lay(tar).unwrap();
    let metadata = fs::metadata(world.path("sparse")).unwrap();
    assert_eq!(metadata.len(), 8 << 20);
    assert!(
        metadata.blocks() * 512 < 1 << 20,
        "{} blocks",
        metadata.blocks()
    );
    assert_eq!(fs::read(world.path("sparse")).unwrap(), bytes);
}

#[test]
fn each_kind_replaces_every_other() {
    // R-P5
    let mut world = World::new();
    world.lay(Tar::new().file("a/b/c", "")).unwrap();
    world.lay(Tar::new().file("a", "file")).unwrap();
    assert_eq!(world.text("a"), "file");
    world.lay(Tar::new().folder("a").file("a/x", "")).unwrap();
    world.lay(Tar::new().link("a", "elsewhere")).unwrap();
    assert!(fs::symlink_metadata(world.path("a")).unwrap().is_symlink());
    world
        .lay(Tar::new().file("b", "twin").hard_link("a", "b"))
        .unwrap();
    assert_eq!(world.text("a"), "twin");
    // A name of itself is no loss.
    world.lay(Tar::new().hard_link("a", "a")).unwrap();
    assert_eq!(world.text("a"), "twin");
}

#[test]
fn the_corpus_of_the_fuzz_targets_holds() {
    // R-P5
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    let inputs = |target: &str| {
        let entries = fs::read_dir(corpus.join(target)).unwrap();
        entries.map(|entry| fs::read(entry.unwrap().path()).unwrap())
    };
    for bytes in inputs("archives") {
        crate::fuzzing::archives(&bytes);
    }
    for bytes in inputs("layers") {
        let folder = tempfile::tempdir().unwrap();
        crate::fuzzing::layers(&bytes, folder.path());
    }
}
