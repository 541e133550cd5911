//! What an entry of an archive may be called, and what its name means. Pure.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// How deep a tree may be. Deeper ones are refused: they were made to break whoever walks them.
const DEPTH_MAX: usize = 256;
/// The longest path, in bytes: the kernel's own limit.
const PATH_BYTES_MAX: usize = 4095;
/// The longest name, in bytes: the limit of every file system.
const NAME_BYTES_MAX: usize = 255;
/// What marks a name as the removal of another.
const WHITEOUT_PREFIX: &[u8] = b".wh.";
/// Marks a folder as hiding all that layers below have in it.
const OPAQUE_NAME: &[u8] = b".wh..wh..opq";
/// Names of AUFS's own files, which mean nothing here.
const BOOKKEEPING_PREFIX: &[u8] = b".wh..wh.";

/// Why a name is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EntryError {
    #[error("climbs out by '..'")]
    Climbs,
    #[error("is empty or holds a NUL")]
    NoName,
    #[error("is longer than a path can be")]
    TooLong,
    #[error("is nested deeper than {DEPTH_MAX} folders")]
    TooDeep,
    #[error("marks the removal of something that is no name")]
    Whiteout,
}

/// What an entry's name says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The root itself.
    Root,
    /// Something is put there.
    Put(PathBuf),
    /// What layers below have there goes.
    Remove(PathBuf),
    /// What layers below have in this folder goes. An empty path is the root.
    Hide(PathBuf),
    /// Nothing.
    Ignore,
}

/// Reads a name, a leading `/` or `./` aside.
///
/// # Errors
/// The name could lead out of the root or cannot be had on a file system.
pub(crate) fn path_in_root(bytes: &[u8]) -> Result<PathBuf, EntryError> {
    if bytes.len() > PATH_BYTES_MAX {
        return Err(EntryError::TooLong);
    }
    if bytes.contains(&0) {
        return Err(EntryError::NoName);
    }
    let mut path = PathBuf::new();
    let mut depth = 0_usize;
    for component in Path::new(OsStr::from_bytes(bytes)).components() {
        match component {
            Component::Normal(name) if name.len() > NAME_BYTES_MAX => {
                return Err(EntryError::TooLong);
            }
            Component::Normal(name) => path.push(name),
            Component::ParentDir => return Err(EntryError::Climbs),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => continue,
        }
        depth += 1;
    }
    if depth > DEPTH_MAX {
        return Err(EntryError::TooDeep);
    }
    Ok(path)
}

/// What the name of an entry means in a layer.
///
/// # Errors
/// As [`path_in_root`]; or it marks the removal of no name.
pub(crate) fn meaning(bytes: &[u8]) -> Result<Meaning, EntryError> {
    if bytes.is_empty() {
        return Err(EntryError::NoName);
    }
    let path = path_in_root(bytes)?;
    let Some(name) = path.file_name() else {
        return Ok(Meaning::Root);
    };
    let folder = path.parent().unwrap_or_else(|| Path::new(""));
    let name = name.as_bytes();
    if name == OPAQUE_NAME {
        return Ok(Meaning::Hide(folder.to_owned()));
    }
    if name.starts_with(BOOKKEEPING_PREFIX) {
        return Ok(Meaning::Ignore);
    }
    match name.strip_prefix(WHITEOUT_PREFIX) {
        Some(b"" | b"." | b"..") => Err(EntryError::Whiteout),
        Some(removed) => Ok(Meaning::Remove(folder.join(OsStr::from_bytes(removed)))),
        None => Ok(Meaning::Put(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_the_root() {
        // R-P5
        for (bytes, path) in [
            (&b"a/b"[..], "a/b"),
            (b"/a//b/", "a/b"),
            (b"./a/./b", "a/b"),
            (b"a/..b", "a/..b"),
            (b"\xff", "\u{fffd}"),
        ] {
            let read = path_in_root(bytes).unwrap();
            assert_eq!(read.to_string_lossy(), path);
        }
        for (bytes, error) in [
            (&b".."[..], EntryError::Climbs),
            (b"a/../b", EntryError::Climbs),
            (b"/../etc", EntryError::Climbs),
            (b"a\0b", EntryError::NoName),
            (&[b'x'; 256], EntryError::TooLong),
            (&b"x/".repeat(2048), EntryError::TooLong),
            (&b"x/".repeat(300), EntryError::TooDeep),
        ] {
            assert_eq!(path_in_root(bytes), Err(error));
        }
        assert_eq!(meaning(b""), Err(EntryError::NoName));
    }

    #[test]
    fn only_marked_names_remove() {
        // BC-113
        let put = |path: &str| Ok(Meaning::Put(path.into()));
        assert_eq!(meaning(b"d/.wh.a"), Ok(Meaning::Remove("d/a".into())));
        assert_eq!(meaning(b".wh..wh..opq"), Ok(Meaning::Hide("".into())));
        assert_eq!(meaning(b"d/.wh..wh..opq"), Ok(Meaning::Hide("d".into())));
        assert_eq!(meaning(b"d/.wh..wh.plnk"), Ok(Meaning::Ignore));
        assert_eq!(meaning(b"d/.whatever"), put("d/.whatever"));
        assert_eq!(meaning(b"d/x.wh.a"), put("d/x.wh.a"));
        assert_eq!(meaning(b"d.wh.d/a"), put("d.wh.d/a"));
        assert_eq!(meaning(b"./"), Ok(Meaning::Root));
        for nothing in [&b"d/.wh."[..], b".wh..", b".wh..."] {
            assert_eq!(meaning(nothing), Err(EntryError::Whiteout));
        }
    }
}
