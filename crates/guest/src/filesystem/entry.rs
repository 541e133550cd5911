//! What is told about one file.

use std::{
    collections::BTreeMap,
    fs::{self, Metadata},
    io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::Path,
};

use buffa_types::google::protobuf::Timestamp;
use sandhold_agent_proto::filesystem::{EntryInfo, FileType};

use crate::{account::OwnerNames, paths::base_name};

/// Extended attributes of this prefix are the client's metadata.
pub const METADATA_PREFIX: &str = "user.e2b.";
/// The largest value of one.
pub const METADATA_VALUE_BYTES_MAX: usize = 4096;
/// The kernel's limit for all names of a file's attributes.
const NAMES_BYTES_MAX: usize = 64 << 10;

/// Describes the file at this path. A symbolic link is described by its target's type and mode,
/// and flagged; a link that leads nowhere is of type symlink.
///
/// # Errors
/// There is nothing at the path, or it cannot be seen.
pub fn describe(path: &Path, names: &OwnerNames) -> io::Result<EntryInfo> {
    let own = fs::symlink_metadata(path)?;
    let is_symlink = own.file_type().is_symlink();
    let target = if is_symlink {
        fs::metadata(path).ok()
    } else {
        None
    };
    let described = target.as_ref().unwrap_or(&own);
    Ok(EntryInfo {
        name: base_name(path),
        r#type: file_type(described).into(),
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(own.size()).unwrap_or(i64::MAX),
        mode: described.mode() & 0o7777,
        permissions: permissions(&own),
        owner: names.user(own.uid()),
        group: names.group(own.gid()),
        modified_time: Timestamp {
            seconds: own.mtime(),
            nanos: i32::try_from(own.mtime_nsec()).unwrap_or(0),
            ..Timestamp::default()
        }
        .into(),
        symlink_target: is_symlink.then(|| link_target(path)),
        metadata: read_metadata(path).into_iter().collect(),
        is_symlink,
    })
}

fn file_type(metadata: &Metadata) -> FileType {
    let kind = metadata.file_type();
    if kind.is_file() {
        FileType::FILE_TYPE_FILE
    } else if kind.is_dir() {
        FileType::FILE_TYPE_DIRECTORY
    } else if kind.is_symlink() {
        FileType::FILE_TYPE_SYMLINK
    } else {
        FileType::FILE_TYPE_UNSPECIFIED
    }
}

/// Where a link leads in the end; if it leads nowhere, what it says.
fn link_target(path: &Path) -> String {
    fs::canonicalize(path)
        .or_else(|_| fs::read_link(path))
        .map(|target| target.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// The mode as `ls` shows it, with `L` for a link, as clients know it.
fn permissions(metadata: &Metadata) -> String {
    let kind = metadata.file_type();
    let letter = match () {
        () if kind.is_dir() => 'd',
        () if kind.is_symlink() => 'L',
        () if kind.is_fifo() => 'p',
        () if kind.is_socket() => 'S',
        () if kind.is_block_device() => 'b',
        () if kind.is_char_device() => 'c',
        () => '-',
    };
    mode_text(letter, metadata.mode())
}

fn mode_text(letter: char, mode: u32) -> String {
    let mut text = String::from(letter);
    for shift in [6, 3, 0] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(if bits & 1 != 0 { 'x' } else { '-' });
    }
    text
}

/// The client's metadata of the file. Attributes that cannot be read are left out: not every
/// filesystem has any.
#[must_use]
pub fn read_metadata(path: &Path) -> BTreeMap<String, String> {
    let mut names = vec![0u8; NAMES_BYTES_MAX];
    let Ok(length) = rustix::fs::listxattr(path, &mut names[..]) else {
        return BTreeMap::new();
    };
    let mut metadata = BTreeMap::new();
    for name in names[..length].split(|byte| *byte == 0) {
        let Some(key) = metadata_key(name) else {
            continue;
        };
        let mut value = [0u8; METADATA_VALUE_BYTES_MAX];
        let name = format!("{METADATA_PREFIX}{key}");
        if let Ok(length) = rustix::fs::getxattr(path, name, &mut value[..]) {
            let value = String::from_utf8_lossy(&value[..length]).into_owned();
            metadata.insert(key.to_owned(), value);
        }
    }
    metadata
}

/// The key of the client's metadata that an attribute's name stands for.
#[must_use]
pub fn metadata_key(attribute: &[u8]) -> Option<&str> {
    std::str::from_utf8(attribute)
        .ok()?
        .strip_prefix(METADATA_PREFIX)
        .filter(|key| !key.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn modes_read_as_clients_know_them() {
        assert_eq!(mode_text('-', 0o100_644), "-rw-r--r--");
        assert_eq!(mode_text('d', 0o751), "drwxr-x--x");
    }

    #[test]
    fn links_are_described_by_their_targets() {
        // BC-056
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("dir")).unwrap();
        fs::write(at("file"), "abc").unwrap();
        symlink(at("dir"), at("to-dir")).unwrap();
        symlink("file", at("to-file")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        symlink("to-file", at("link-0")).unwrap();
        for index in 0..50 {
            symlink(format!("link-{index}"), at(&format!("link-{}", index + 1))).unwrap();
        }
        let canonical = dir.path().canonicalize().unwrap();
        let in_canonical = |name: &str| canonical.join(name).to_string_lossy().into_owned();
        for (name, kind, target) in [
            ("to-dir", FileType::FILE_TYPE_DIRECTORY, in_canonical("dir")),
            ("to-file", FileType::FILE_TYPE_FILE, in_canonical("file")),
            ("link-5", FileType::FILE_TYPE_FILE, in_canonical("file")),
            ("dangling", FileType::FILE_TYPE_SYMLINK, "nowhere".into()),
            ("loop", FileType::FILE_TYPE_SYMLINK, "loop".into()),
            ("link-50", FileType::FILE_TYPE_SYMLINK, "link-49".into()),
        ] {
            let entry = describe(&at(name), &OwnerNames::default()).unwrap();
            assert!(entry.is_symlink, "{name}");
            assert_eq!(entry.r#type, kind, "{name}");
            assert_eq!(entry.symlink_target, Some(target), "{name}");
        }
        let file = describe(&at("file"), &OwnerNames::default()).unwrap();
        assert_eq!((file.size, file.is_symlink), (3, false));
        assert_eq!(file.symlink_target, None);
    }

    #[test]
    fn only_the_clients_attributes_are_metadata() {
        assert_eq!(metadata_key(b"user.e2b.author"), Some("author"));
        assert_eq!(metadata_key(b"user.e2b."), None);
        assert_eq!(metadata_key(b"user.other"), None);
        assert_eq!(metadata_key(b"user.e2b.\xff"), None);
    }
}
