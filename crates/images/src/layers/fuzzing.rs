//! What reads layers, with what must hold of it, for the fuzz targets and their corpus. No part of
//! the API.

use std::{
    fs,
    io::Read,
    os::unix::fs::{FileTypeExt, MetadataExt, symlink},
    path::Path,
};

use tar::{EntryType, Header};

use super::{Budget, Confined, Owners, Whiteouts, archive::Archive, unpack};

/// What may be laid down in one round.
const ENTRIES_MAX: u64 = 200;
const BYTES_MAX: u64 = 1 << 20;
const BLOCK: usize = 512;
/// The content of the file that lies outside.
const CANARY: &str = "outside";

/// Reads `bytes` as an archive whose checksums are right, to its end.
///
/// # Panics
/// When a bound does not hold; that is what fuzzing looks for.
pub fn archives(bytes: &[u8]) {
    let bytes = with_checksums(bytes);
    let mut archive = Archive::new(&bytes[..]);
    let mut read = 0;
    while let Ok(Some(head)) = archive.next() {
        let mut content = archive.content().take(BYTES_MAX);
        read += std::io::copy(&mut content, &mut std::io::sink()).unwrap_or(0);
        assert!(read <= bytes.len() as u64, "more came out than went in");
        assert!(head.mode <= 0o7777);
    }
}

fn with_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let mut offset = 0;
    while let Some(block) = bytes.get_mut(offset..offset + BLOCK) {
        let mut header = Header::from_byte_slice(block).clone();
        header.set_cksum();
        block.copy_from_slice(header.as_bytes());
        let size = header.entry_size().unwrap_or(0);
        let Ok(size) = usize::try_from(size) else {
            break;
        };
        let Some(next) = size.checked_next_multiple_of(BLOCK) else {
            break;
        };
        offset = match offset.checked_add(BLOCK + next) {
            Some(offset) => offset,
            None => break,
        };
    }
    bytes
}

/// Lays a layer down into a root in the empty folder `folder`. Each line of `bytes` is an entry: a
/// letter for its kind (`d`, `f`, `l`, `h`, `c`, `p`), its name, and behind `>` the target of a
/// link. A line `=` begins the next layer.
///
/// # Panics
/// When anything outside the root has changed, or something in it is neither file, folder nor
/// link; that is what fuzzing looks for.
pub fn layers(bytes: &[u8], folder: &Path) {
    #[allow(clippy::expect_used, reason = "a fuzz target may fail loudly")]
    let root = prepare(folder).expect("a root to unpack into");
    let mut budget = Budget::new(ENTRIES_MAX, BYTES_MAX);
    let lines: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
    for layer in lines.split(|line| *line == b"=") {
        let archive = archive_of(layer);
        // Refusing is as good as laying down.
        let _ = unpack(
            &archive[..],
            &root,
            &mut budget,
            Owners::Root,
            Whiteouts::Applied,
        );
    }
    assert_outside_is_untouched(folder);
    assert_plain(&folder.join("root"), 0);
}

fn prepare(folder: &Path) -> std::io::Result<Confined> {
    let outside = folder.join("outside");
    fs::create_dir(&outside)?;
    fs::write(outside.join("canary"), CANARY)?;
    let root = folder.join("root");
    fs::create_dir(&root)?;
    // A root that an earlier layer filled with traps.
    symlink(&outside, root.join("absolute"))?;
    symlink("../outside", root.join("climbing"))?;
    symlink("loop", root.join("loop"))?;
    Confined::open(&root)
}

fn archive_of(lines: &[&[u8]]) -> Vec<u8> {
    let mut archive = Vec::new();
    for line in lines {
        let Some((kind, rest)) = line.split_first() else {
            continue;
        };
        let mut halves = rest.splitn(2, |byte| *byte == b'>');
        let name = halves.next().unwrap_or_default();
        let target = halves.next().unwrap_or_default();
        let (kind, size) = match kind {
            b'd' => (EntryType::Directory, 0),
            b'l' => (EntryType::Symlink, 0),
            b'h' => (EntryType::Link, 0),
            b'c' => (EntryType::Char, 0),
            b'p' => (EntryType::Fifo, 0),
            _ => (EntryType::Regular, BLOCK),
        };
        archive.extend_from_slice(header(kind, name, target, size).as_bytes());
        archive.resize(archive.len() + size, b'x');
    }
    archive
}

fn header(kind: EntryType, name: &[u8], target: &[u8], size: usize) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_size(size as u64);
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1);
    let fields = header.as_old_mut();
    copy(name, &mut fields.name);
    copy(target, &mut fields.linkname);
    header.set_cksum();
    header
}

fn copy(text: &[u8], field: &mut [u8]) {
    let length = text.len().min(field.len());
    field[..length].copy_from_slice(&text[..length]);
}

fn assert_outside_is_untouched(folder: &Path) {
    let outside = folder.join("outside");
    let canary = fs::read_to_string(outside.join("canary")).unwrap_or_default();
    assert_eq!(canary, CANARY, "a file outside was changed");
    let links = fs::metadata(outside.join("canary")).map_or(0, |m| m.nlink());
    assert_eq!(links, 1, "a file outside has another name");
    let names = fs::read_dir(&outside).map_or(0, Iterator::count);
    assert_eq!(names, 1, "something was made outside");
    let beside = fs::read_dir(folder).map_or(0, Iterator::count);
    assert_eq!(beside, 2, "something was made beside the root");
}

fn assert_plain(path: &Path, depth: usize) {
    assert!(depth <= 300, "deeper than folders may be");
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        let special =
            kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device();
        assert!(!special, "{} is special", entry.path().display());
        if kind.is_dir() {
            assert_plain(&entry.path(), depth + 1);
        }
    }
}
